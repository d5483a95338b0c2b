"""TRITON_MLA of vLLM 0.16.0 with the series, on a CPU: the verify pass as a decode, CUDA graphs, an fp8 cache.

The engine's own code runs; mla_rig says what stands in. Versions of the two files that the series changes are played
side by side: as released, patched, and broken in the ways that a hurried backport would break them.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from engine_help import REPO, Engine

HERE = Path(__file__).parent
KERNELS = "vllm/v1/attention/ops/triton_decode_attention.py"
BACKEND = "vllm/v1/attention/backends/mla/triton_mla.py"
EXACT = 1e-5  # float32, added up in another order

pytestmark = pytest.mark.engine

Seq = tuple[int, int]  # tokens that were computed before, tokens of this step
Scenes = dict[str, tuple[str, dict[str, Any]]]
Change = Callable[[str], str]


def uniform(k: int) -> list[Seq]:
    """A verify pass: prefixes at, before and after the border of a page of 16, and ends on either side of one."""
    return [(before, k + 1) for before in (1, 15, 16, 17, 31, 32 - k, 63, 100)]


def mixed(k: int) -> list[Seq]:
    """Verify passes, single tokens, fewer drafts than K, and prefills with a context and without, in no order."""
    return [(0, 10), (33, k + 1), (20, 1), (5, 20), (47, k), (16, k + 1), (64, 1), (0, 1)]


KS = range(1, 8)
STEPS: Scenes = {f"K = {k}": ("steps", {"sizes": {"k": k}, "batches": [uniform(k), mixed(k)]}) for k in KS}
SIZES: dict[str, dict[str, Any]] = {
    "pages of 64, 17 heads": {"k": 3, "page": 64, "heads": 17},
    "one head": {"k": 3, "heads": 1},
    "no drafter": {"k": 0},
}
FP8: dict[str, dict[str, Any]] = {
    "fp8": {"k": 3, "cache": "fp8", "k_scale": 0.05},
    "fp8_e4m3, one head": {"k": 3, "heads": 1, "cache": "fp8_e4m3", "k_scale": 0.02},
}
OTHERS: Scenes = {name: ("steps", {"sizes": sizes, "batches": [mixed(3)]}) for name, sizes in (SIZES | FP8).items()}
GRAPH = [[(15, 4), (31, 4), (2, 4), (70, 4)], [(16, 4), (90, 4)], [(100, 4)]]
SCENES: Scenes = {
    **STEPS,
    **OTHERS,
    "graph": ("replay", {"sizes": {"k": 3}, "seqs": 4, "batches": GRAPH}),
    "graph without a drafter": ("replay", {"sizes": {"k": 0}, "seqs": 4, "batches": [[(15, 1), (31, 1), (2, 1)]]}),
    "mode": ("modes", {"sizes": {"k": 3}}),
    "mode without a drafter": ("modes", {"sizes": {"k": 0}}),
    "mode with DCP": ("modes", {"sizes": {"k": 0, "dcp": 8}}),
    "start": ("start", {"sizes": {"k": 3}}),
    "start with DCP": ("start", {"sizes": {"k": 3, "dcp": 8}}),
    "start with DCP, no drafter": ("start", {"sizes": {"k": 0, "dcp": 8}}),
    "start with DCP and fp8": ("start", {"sizes": {"k": 0, "dcp": 8, "cache": "fp8"}}),
    "start with fp8": ("start", {"sizes": {"k": 3, "cache": "fp8"}}),
    "cost at 1024": ("cost", {"context": 1024}),
    "cost at 2048": ("cost", {"context": 2048}),
}
BEFORE = [name for name in SCENES if name not in (*STEPS, *OTHERS, "graph", "mode with DCP")] + ["K = 3"]


def swap(old: str, new: str) -> Change:
    return lambda text: text.replace(old, new)


def unexpanded(text: str) -> str:
    """Several tokens are said to be supported, and nothing is expanded: the backport that reads past its tables."""
    return re.sub(r" {8}assert attn_metadata\.decode\.(seq_lens|block_table)\.shape\[0\] == B\n", "", asserted(text))


asserted = swap("def _build_decode(", "def _never_called(")
# What is broken: in which file, how, and which scenes show it.
BROKEN: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "unexpanded": (BACKEND, unexpanded, ("K = 3", "graph")),
    "unexpanded, with the assertion": (BACKEND, asserted, ("K = 3", "graph")),
    "no causal extents": (BACKEND, swap("- 1 - rows", "- query_ends[seqs]"), ("K = 3", "graph")),
    "padding rows are read": (BACKEND, swap("row_seq_lens.masked_fill_(padding, 0)", "pass"), ("graph",)),
    "padding is 0 / 0": (KERNELS, swap("tl.where(e_sum > 0, e_sum, 1.0)", "e_sum"), ("graph",)),
    "new buffers at each step": (BACKEND, swap("if self.row_block_table is None:", "if True:"), ("graph",)),
    "keys without the scale": (KERNELS, swap("k = widen(k, kv_scale, ", "k = widen(k, 1.0, "), tuple(FP8)),
    "values without the scale": (KERNELS, swap("v = widen(v, kv_scale, ", "v = widen(v, 1.0, "), tuple(FP8)),
}


class Plays:
    """Versions of the two files, and the scenes that each is to play; one process for all, as the import takes long."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.plays, self.names = folder, [], {}

    def add(self, version: str, scenes: list[str], sources: dict[str, str]) -> None:
        files = {}
        for path in (KERNELS, BACKEND):
            file = self.folder / f"{len(self.plays)}-{Path(path).name}"
            file.write_text(sources[path])
            files[path.removesuffix(".py").replace("/", ".")] = str(file)
        self.plays.append({"files": files, "scenes": [SCENES[name] for name in scenes]})
        self.names[version] = scenes

    def run(self, engine: Engine) -> dict[str, dict[str, Any]]:
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(engine.root),
            "HOME": str(engine.work),
            "OMP_NUM_THREADS": "1",
        }
        command = [engine.python, HERE / "mla_scenes.py", json.dumps(self.plays)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        answers = json.loads(done.stdout.splitlines()[-1])
        return {
            version: dict(zip(names, answer, strict=True))
            for (version, names), answer in zip(self.names.items(), answers, strict=True)
        }


def sources(engine: Engine) -> dict[str, str]:
    return {path: (engine.root / path).read_text() for path in (KERNELS, BACKEND)}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    engine, plays = Engine("0.16.0", tmp_path_factory.mktemp("engine")), Plays(tmp_path_factory.mktemp("files"))
    plays.add("pristine", BEFORE, sources(engine))
    engine.apply()
    good = sources(engine)
    plays.add("patched", list(SCENES), good)
    for name, (path, change, scenes) in BROKEN.items():
        assert change(good[path]) != good[path], f"{name}: the change finds nothing; fit it to the patch"
        plays.add(name, list(scenes), good | {path: change(good[path])})
    return plays.run(engine)


@pytest.fixture(scope="module")
def patched(answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return answers["patched"]


@pytest.fixture(scope="module")
def pristine(answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return answers["pristine"]


def error(steps: list[dict[str, Any]]) -> float:
    return max(step["error"] for step in steps)


@pytest.mark.parametrize("name", [*STEPS, *OTHERS])
def test_every_token_gets_what_dense_attention_gives(patched: dict[str, Any], name: str) -> None:
    assert error(patched[name]) < EXACT


@pytest.mark.parametrize("k", KS)
def test_the_decode_kernel_gets_a_row_for_each_query_token_and_prefill_none_of_them(
    patched: dict[str, Any], k: int
) -> None:
    for step in patched[f"K = {k}"]:
        # In the runner's order prefills come last; a prompt of one token may be among them.
        decodes = list(takewhile(lambda seq: seq[1] <= k + 1, step["batch"]))
        assert {tuple(seq) for seq in step["batch"] if seq[0] and seq[1] <= k + 1} <= set(map(tuple, decodes))
        extents = [before + token + 1 for before, new in decodes for token in range(new)]
        (call,) = step["decode"]
        assert call["seq_lens"] == extents
        assert call["rows"] == call["table_rows"] == call["scratch_rows"] == len(extents)
        pages = iter(call["first_pages"])
        own = [{next(pages) for _ in range(new)} for _, new in decodes]
        assert all(len(page) == 1 for page in own) and len(set.union(*own)) == len(decodes)
        assert step["prefill_tokens"] == sum(new for _, new in step["batch"]) - len(extents)


def test_as_released_a_verify_pass_is_a_prefill(pristine: dict[str, Any]) -> None:
    verify, _ = pristine["K = 3"]
    assert verify["decode"] == [] and verify["prefill_tokens"] == 8 * 4
    assert error(pristine["K = 3"]) < EXACT  # right, and slow


def test_a_cuda_graph_reads_where_it_was_captured_whatever_the_batch(patched: dict[str, Any]) -> None:
    for graph in (patched["graph"], patched["graph without a drafter"]):
        assert all(graph["same"]) and max(graph["errors"]) < EXACT


def test_padding_rows_are_zero(patched: dict[str, Any], pristine: dict[str, Any]) -> None:
    assert all(patched["graph"]["padding_is_zero"]) and all(patched["graph without a drafter"]["padding_is_zero"])
    assert not any(pristine["graph without a drafter"]["padding_is_zero"])  # 0 / 0


def test_the_runner_captures_full_graphs_of_verify_passes(patched: dict[str, Any], pristine: dict[str, Any]) -> None:
    full = {"mode": "FULL_AND_PIECEWISE", "verify": "FULL", "verify_seqs": 2}
    assert patched["mode"] == full | {"sizes": [4, 8, 16, 24, 32]}
    assert patched["mode without a drafter"] == full | {"sizes": [1, 2, 4, 8, 16, 24, 32]}
    assert pristine["mode"]["verify"] == pristine["mode without a drafter"]["verify"] == "PIECEWISE"


def test_dcp_with_a_drafter_is_refused_while_the_layer_is_made(
    patched: dict[str, Any], pristine: dict[str, Any]
) -> None:
    said = patched["start with DCP"]["failed"]
    assert said.startswith("ValueError: TRITON_MLA can't verify drafts with decode context parallelism")
    assert "--speculative-config" in said and "--decode-context-parallel-size 1 (it is 8)" in said
    assert "failed" not in patched["start"]
    assert "failed" not in pristine["start with DCP"]


def test_dcp_without_a_drafter_stays_as_it_is(patched: dict[str, Any]) -> None:
    assert "failed" not in patched["start with DCP, no drafter"]
    assert patched["mode with DCP"]["mode"] == "PIECEWISE"


def test_an_fp8_cache_is_offered_and_read_with_queries_as_they_are(
    patched: dict[str, Any], pristine: dict[str, Any]
) -> None:
    assert patched["start with fp8"] == {"caches": ["auto", "bfloat16", "fp8", "fp8_e4m3"], "quantizes_queries": False}
    assert pristine["start with fp8"]["failed"].startswith("NotImplementedError")
    assert pristine["start"]["caches"] == ["auto", "bfloat16"]


def test_an_fp8_cache_with_dcp_is_refused_while_the_layer_is_made(patched: dict[str, Any]) -> None:
    said = patched["start with DCP and fp8"]["failed"]
    assert said.startswith("ValueError: MLA has no fp8 KV cache with decode context parallelism")


def test_broken_rows_are_seen(answers: dict[str, dict[str, Any]]) -> None:
    for name in ("unexpanded", "no causal extents"):
        assert error(answers[name]["K = 3"]) > 100 * EXACT and max(answers[name]["graph"]["errors"]) > 100 * EXACT
    for scene in answers["unexpanded, with the assertion"].values():
        assert scene["failed"].startswith("AssertionError")


def test_broken_padding_is_seen(answers: dict[str, dict[str, Any]]) -> None:
    for name in ("padding rows are read", "padding is 0 / 0"):
        assert answers[name]["graph"]["padding_is_zero"] == [True, False, False]  # the first batch fills the graph


def test_buffers_that_move_are_seen(answers: dict[str, dict[str, Any]]) -> None:
    graph = answers["new buffers at each step"]["graph"]
    assert not any(graph["same"]) and max(graph["errors"][1:]) > 100 * EXACT


@pytest.mark.parametrize("scene", FP8)
def test_a_forgotten_scale_is_seen(answers: dict[str, dict[str, Any]], scene: str) -> None:
    for name in ("keys without the scale", "values without the scale"):
        assert error(answers[name][scene]) > 100 * EXACT


def table() -> dict[int, dict[str, list[str]]]:
    """README's table of what a verify step costs: for each context, the words of its columns before and after."""
    rows = re.findall(
        r"^\| ([\d,]+) tokens \| (before|after) \|(.*)\|$", (REPO / "README.md").read_text(), re.MULTILINE
    )
    found: dict[int, dict[str, list[str]]] = {}
    for context, when, cells in rows:
        found.setdefault(int(context.replace(",", "")), {})[when] = [cell.strip() for cell in cells.split("|")]
    return found


def written(cost: dict[str, Any]) -> list[str]:
    """A cost in the words of README's table."""
    sizes = [f"{cost[key] / 1e6:.1f} MB" for key in ("cache_bytes", "cache_loads", "moved")]
    return [cost["path"], *sizes, f"{cost['flops'] / 1e9:.2f} G", str(cost["kernels"])]


def test_readme_says_what_a_verify_step_costs(patched: dict[str, Any], pristine: dict[str, Any]) -> None:
    name = "cost at 1024"
    assert table()[1024] == {"before": written(pristine[name]), "after": written(patched[name])}


def test_the_verify_step_does_a_fraction_of_the_work_and_it_is_linear(
    patched: dict[str, Any], pristine: dict[str, Any]
) -> None:
    small, large = (patched[f"cost at {context}"] for context in (1024, 2048))
    before = pristine["cost at 2048"]
    assert (small["path"], large["path"], before["path"]) == ("decode", "decode", "prefill")
    assert large["cache_loads"] / small["cache_loads"] == pytest.approx(2, rel=0.02)
    assert large["flops"] * 10 < before["flops"] and large["moved"] * 2 < before["moved"]


@pytest.mark.slow
@pytest.mark.parametrize("context", [8192, 32768])
def test_readme_says_what_a_verify_step_costs_behind_more_tokens(tmp_path: Path, context: int) -> None:
    name = f"cost at {context}"
    SCENES[name] = ("cost", {"context": context})
    engine, plays = Engine("0.16.0", tmp_path), Plays(tmp_path)
    plays.add("before", [name], sources(engine))
    engine.apply()
    plays.add("after", [name], sources(engine))
    assert table()[context] == {when: written(answer[name]) for when, answer in plays.run(engine).items()}
