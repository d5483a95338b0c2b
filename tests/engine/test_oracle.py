"""The oracle with torch and transformers: the same bytes each time, right with the right states and with no other.

Runs in an image or an environment of a release: the interpreter of the tests has torch, safetensors and transformers.
No engine is started; that the files load in one, and what it then accepts, is the smoke test's matter.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "in_image" / "oracle.py"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
PAIRS = {
    "llama": ("--drafter", "llama"),
    "mla": ("--drafter", "mla"),
    "llama-plain": ("--drafter", "llama", "--no-attention", "--layers", "7", "--experts", "4", "--ids", "1", "2", "6"),
    "mla-partial": ("--drafter", "mla", "--partial-vocabulary", "--layers", "12"),
}
MODELS = ("target/model.safetensors", "drafter/model.safetensors")

pytestmark = pytest.mark.engine


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, env=ENV)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each pair of PAIRS, written once."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("oracle")
    for name, arguments in PAIRS.items():
        done = run(folder / name, *arguments)
        assert done.returncode == 0, done.stderr
    return {name: folder / name for name in PAIRS}


def test_two_processes_write_the_same_bytes(pairs: dict[str, Path], tmp_path: Path) -> None:
    for name in ("llama", "mla-partial"):
        assert run(tmp_path / name, *PAIRS[name]).returncode == 0
        assert digests(tmp_path / name) == digests(pairs[name])
    assert digests(pairs["llama"]) != digests(pairs["mla"])


def test_a_pair_is_small_and_nothing_half_made_is_beside_it(pairs: dict[str, Path]) -> None:
    for folder in pairs.values():
        assert sum((folder / model).stat().st_size for model in MODELS) < 25e6
    assert {path.name for path in pairs["llama"].parent.iterdir()} == set(PAIRS)


def test_a_folder_that_is_not_empty_is_left_as_it_is(pairs: dict[str, Path]) -> None:
    before = digests(pairs["llama"])
    done = run(pairs["llama"])
    assert done.returncode == 1 and "not an empty folder" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and digests(pairs["llama"]) == before


@pytest.mark.parametrize("name", PAIRS)
def test_drafts_are_right_with_the_right_states_and_with_no_others(name: str, pairs: dict[str, Path]) -> None:
    done = run("check", pairs[name], "--json")
    result = json.loads(done.stdout)
    checks = {check["name"]: check for check in result["checks"]}
    wrong = [check for check in checks.values() if not check["passed"]]
    assert not wrong and result["passed"] and done.returncode == 0
    # The right states come second; what follows are faults, none of which may go unseen.
    own, right, *faults = result["checks"]
    assert own["found"] == own["of"]
    assert right["found"] == right["expected"] > right["of"] / 2
    assert len(faults) >= 31 and all(fault["found"] < right["found"] for fault in faults)
    attention = {"the drafter has no KV cache", "the drafter's positions stand still"}
    assert attention & set(checks) == (set() if "--no-attention" in PAIRS[name] else attention)


def test_ids_that_the_weights_are_not_made_for_fail_the_check(pairs: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    for part in ("target", "drafter"):
        (folder / part).symlink_to(pairs["llama"] / part)
    said = json.loads((pairs["llama"] / "oracle.json").read_text())
    said["oracle"]["ids"] = [i + 1 for i in said["oracle"]["ids"]]
    (folder / "oracle.json").write_text(json.dumps(said))
    done = run("check", folder)
    assert done.returncode == 1
    assert "FAIL the input of layers 3, 5, 7: 0 of 120 right" in done.stdout


def test_the_tokenizer_reads_and_writes_the_prompt_from_the_folder_alone(pairs: dict[str, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(pairs["mla"] / "target"))
    said = json.loads((pairs["mla"] / "oracle.json").read_text())
    assert tokenizer(said["prompt_text"])["input_ids"] == said["prompt"]
    assert tokenizer.decode(said["prompt"]).split() == said["prompt_text"].split()
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "t1 t2"}], tokenize=False)
    assert [token for token in tokenizer(chat)["input_ids"] if token < 504] == [1, 2]
    assert tokenizer.unk_token_id not in tokenizer(chat)["input_ids"]


# What 0.16.0 does with remote code and 0.32.0 without, in one process each: the wrapper's own processing class.
PROCESSOR = """
import sys
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.version import __version__
config = ModelConfig(model=sys.argv[1], tokenizer=sys.argv[1], max_model_len=512, dtype="bfloat16",
                     limit_mm_per_prompt={"vision_chunk": 0}, trust_remote_code=__version__.startswith("0.16."))
print("processor", type(MULTIMODAL_REGISTRY.create_processor(config)).__name__)
"""


def test_the_engine_makes_its_processor_from_the_folder_alone(pairs: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    caches = {name: str(tmp_path) for name in ("HOME", "HF_HOME", "VLLM_CACHE_ROOT", "NUMBA_CACHE_DIR")}
    command = [sys.executable, "-c", PROCESSOR, str(pairs["mla"] / "target")]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV | caches | {"VLLM_TARGET_DEVICE": "cpu"})
    assert "processor KimiK25MultiModalProcessor" in done.stdout, done.stderr[-2000:]
