"""What the image passes to the engine, read by the real parser of each installed release.

Needs KIMI_EAGLE3_VENV_<version with underscores> of a pinned release: the Python interpreter of an environment that
holds it. No GPU: the parser only wants to know a platform, and gets the CPU's.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.in_image import entrypoint
from scripts.pipeline import pins

ROOT = Path(__file__).resolve().parents[2]
INTERPRETERS = {
    release.version: os.environ[name]
    for release in pins.load().releases
    if os.environ.get(name := f"KIMI_EAGLE3_VENV_{release.version.replace('.', '_')}")
}
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not INTERPRETERS, reason="no KIMI_EAGLE3_VENV_*"),
]
# Reads command lines from standard input; writes what the engine's parser makes of each, null where it refuses.
PARSE = """
import json, sys
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
vllm.platforms._current_platform = CpuPlatform()
import vllm.envs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
serve = ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
def parsed(line):
    try:
        return {name: value for name, value in vars(parser.parse_args(line)).items()
                if isinstance(value, (str, int, float, dict, type(None)))}
    except SystemExit:
        return None
print("\\n" + json.dumps({
    "parsed": [parsed(line) for line in json.load(sys.stdin)],
    "flags": sorted(serve._option_string_actions),
    "reasoning": sorted(ReasoningParserManager.list_registered()),
    "tools": sorted(ToolParserManager.list_registered()),
    "variables": sorted(vllm.envs.environment_variables),
}))
"""
CASES: dict[str, list[str]] = {
    "defaults": [],
    "user": ["-tp=4", "--no-trust-remote-code", "--max_model_len", "4096", "--no-reasoning-parser"],
    "abbreviated": ["--tensor-parallel", "2"],
    "pinned drafter": ["--drafter", "a/b@c", "--draft-tokens", "5"],
    "no speculation": ["--no-speculation", "--no-defaults"],
    "unknown flag": ["--no-such-flag"],
}


@pytest.fixture(scope="module", params=list(INTERPRETERS))
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the engine says, with `parsed` by the name of the case, and `release`."""
    python = INTERPRETERS[request.param]
    all_pins = pins.load()
    release = pins.record(all_pins, all_pins.release("vllm", request.param))
    plans = [entrypoint.plan(release, entrypoint.parse(case), {}) for case in CASES.values()]
    lines = json.dumps([plan.command[1:] for plan in plans])
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, "-c", PARSE], input=lines, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    return {**said, "parsed": dict(zip(CASES, said["parsed"], strict=True)), "release": release}


def test_the_engine_reads_every_default_as_it_is_meant(engine: dict[str, Any]) -> None:
    parsed, release = engine["parsed"]["defaults"], engine["release"]
    assert parsed["model_tag"] == release["target"]["repo"]
    assert parsed["revision"] == release["target"]["revision"]
    assert (parsed["host"], parsed["port"]) == ("0.0.0.0", 8000)
    for name, value in release["serve"]["flags"].items():
        assert parsed[name.replace("-", "_")] == value, name
    assert parsed["speculative_config"]["method"] == "eagle3"
    assert parsed["speculative_config"]["model"] == release["drafter"]["repo"]


def test_the_users_flags_win_in_the_engine(engine: dict[str, Any]) -> None:
    parsed = engine["parsed"]["user"]
    assert (parsed["tensor_parallel_size"], parsed["trust_remote_code"], parsed["max_model_len"]) == (4, False, 4096)
    assert not parsed["reasoning_parser"]
    assert engine["parsed"]["abbreviated"]["tensor_parallel_size"] == 2


def test_the_images_options_reach_the_engine(engine: dict[str, Any]) -> None:
    config = {"method": "eagle3", "model": "a/b", "revision": "c", "num_speculative_tokens": 5}
    assert engine["parsed"]["pinned drafter"]["speculative_config"] == config
    assert engine["parsed"]["no speculation"]["speculative_config"] is None


def test_a_flag_that_the_engine_does_not_have_is_refused_by_it(engine: dict[str, Any]) -> None:
    assert engine["parsed"]["unknown flag"] is None


def test_the_images_options_hide_no_flag_of_the_engine(engine: dict[str, Any]) -> None:
    options = entrypoint.VALUED | entrypoint.SWITCHES
    assert {name for name in options if f"--{name}" in engine["flags"]} == {"model"}  # the same as --target


def test_short_names_mean_what_they_mean_in_the_engine(engine: dict[str, Any]) -> None:
    assert "-tp" in engine["flags"]
    assert {f"--{name}" for name in entrypoint.SHORT.values()} <= set(engine["flags"])


def test_parsers_and_variables_exist_in_the_engine(engine: dict[str, Any]) -> None:
    serve = engine["release"]["serve"]
    assert serve["flags"]["reasoning-parser"] in engine["reasoning"]
    assert serve["flags"]["tool-call-parser"] in engine["tools"]
    assert {name for name in serve["env"] if name.startswith("VLLM_")} <= set(engine["variables"])
    assert {"VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT"} <= set(engine["variables"])
