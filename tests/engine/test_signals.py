"""What the smoke test reads of an SGLang release, made again by the release's own code: it is what was recorded.

Needs KIMI_EAGLE3_VENV_<version with underscores> of a pinned release of SGLang.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from scripts.pipeline import adapters, pins
from scripts.pipeline.ladder import Answer, Counters

HERE = Path(__file__).parent
RECORDED = HERE.parent / "unit/recorded"
INTERPRETERS = {
    release.version: os.environ[name]
    for release in pins.load().releases
    if release.engine == "sglang" and os.environ.get(name := f"KIMI_EAGLE3_VENV_{release.version.replace('.', '_')}")
}
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not INTERPRETERS, reason="no KIMI_EAGLE3_VENV_* of SGLang"),
]


@pytest.mark.parametrize("version", INTERPRETERS)
def test_what_was_recorded_is_what_the_release_says_and_the_adapter_reads_it_whole(version: str) -> None:
    command = [INTERPRETERS[version], HERE / "sglang_signals.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    recorded = json.loads((RECORDED / f"sglang-{version}.json").read_text())
    assert said == {key: value for key, value in recorded.items() if key != "made"}

    adapter = adapters.adapter("sglang", version)
    answer = adapters.answer(adapter, {"text": "a", "output_ids": [1] * 97, "meta_info": said["meta_info"]})
    assert answer == Answer("a", (1,) * 97, 97, Counters(0, 24, 72, 72, (24, 24, 24)))
    after = adapters.counters(said["after"], adapter, answer.told)
    before = adapters.counters(said["before"], adapter, Counters(0, 0, 0, 0, (0, 0, 0)))
    assert isinstance(after, Counters) and isinstance(before, Counters)
    assert after.since(before) == Counters(97, 24, 72, 72, (24, 24, 24))


@pytest.mark.parametrize("version", INTERPRETERS)
def test_the_release_serves_the_paths_and_answers_its_version_where_the_adapter_asks(version: str) -> None:
    find = "import importlib.util as u; print(u.find_spec('sglang').submodule_search_locations[0])"
    root = subprocess.run([INTERPRETERS[version], "-c", find], capture_output=True, text=True, check=True).stdout
    source = Path(root.strip(), "srt/entrypoints/http_server.py").read_text()
    adapter = adapters.adapter("sglang", version)
    for path in (adapter.version, adapter.health, adapter.models, adapter.completions):
        assert re.search(rf'@app\.\w+\(\s*"{re.escape(path)}"', source), path
    assert '"version": __version__' in source.split("async def server_info")[1].split("\n@app")[0]
    protocol = Path(root.strip(), "srt/entrypoints/openai/protocol.py").read_text()
    assert ("return_meta_info" in protocol) == bool(adapter.chat)
