"""What the image passes to the engine, read by the real parser of each installed release.

Needs KIMI_EAGLE3_VENV_<version with underscores> of a pinned release: the Python interpreter of an environment that
holds it. No GPU: the parser only wants to know a platform, and gets the CPU's.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.in_image import entrypoint
from scripts.in_image.engine_command import Engine
from scripts.pipeline import pins

ROOT = Path(__file__).resolve().parents[2]
INTERPRETERS = {
    (release.engine, release.version): os.environ[name]
    for release in pins.load().releases
    if os.environ.get(name := f"KIMI_EAGLE3_VENV_{release.version.replace('.', '_')}")
}
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not INTERPRETERS, reason="no KIMI_EAGLE3_VENV_*"),
]
# Each reads command lines from standard input; writes what the engine's parser makes of each, null where it refuses,
# and for each flag under which name that is.
PARSE = {
    "vllm": """
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
flags = ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))._option_string_actions
lines = [line[1:] for line in json.load(sys.stdin)]
reasoning, tools = ReasoningParserManager.list_registered(), ToolParserManager.list_registered()
variables = list(vllm.envs.environment_variables)
""",
    "sglang": """
import argparse, json, os, re, subprocess, sys
import sglang, tvm_ffi
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
flags = parser._option_string_actions
lines = [line[3:] for line in json.load(sys.stdin)]
reasoning, tools = flags["--reasoning-parser"].choices, flags["--tool-call-parser"].choices
folders = [module.__path__[0] for module in (sglang, tvm_ffi)]
found = subprocess.run(["grep", "-rhoE", "--include=*.py", "(SGLANG|TVM_FFI)_[A-Z_]+", *folders], capture_output=True)
variables = set(found.stdout.decode().split())
""",
}
TELL = """
def parsed(line):
    try:
        return {name: value for name, value in vars(parser.parse_args(line)).items()
                if isinstance(value, (str, int, float, dict, type(None)))}
    except SystemExit:
        return None
print("\\n" + json.dumps({
    "parsed": [parsed(line) for line in lines], "names": {flag: action.dest for flag, action in flags.items()},
    "reasoning": sorted(reasoning), "tools": sorted(tools), "variables": sorted(variables),
}))
"""
CASES: dict[str, list[str]] = {
    "defaults": [],
    "pinned drafter": ["--drafter", "a/b@c", "--draft-tokens", "5"],
    "no speculation": ["--no-speculation", "--no-defaults"],
    "unknown flag": ["--no-such-flag"],
}
# The user's word, in each engine's spelling: 4 GPUs, 4096 tokens, no code of the model's, no reasoning parser.
USER = {
    "vllm": ["-tp=4", "--no-trust-remote-code", "--max_model_len", "4096", "--no-reasoning-parser"],
    "sglang": ["--tp=4", "--no-trust-remote-code", "--context-length", "4096", "--no-reasoning-parser"],
}
CONTEXT = {"vllm": "max-model-len", "sglang": "context-length"}


@dataclass(frozen=True)
class Said:
    """What an engine says: `parsed` by the name of the case, and about its flags."""

    release: dict[str, Any]
    parsed: dict[str, dict[str, Any]]
    names: dict[str, str]
    reasoning: list[str]
    tools: list[str]
    variables: list[str]

    @property
    def engine(self) -> Engine:
        return entrypoint.ENGINES[self.release["engine"]]

    def value(self, case: str, flag: str) -> Any:
        return self.parsed[case][self.names[f"--{flag}"]]

    def drafter(self, case: str) -> dict[str, Any] | None:
        """The drafter in common words; None for none."""
        if self.release["engine"] == "vllm":
            config: dict[str, Any] | None = self.value(case, "speculative-config")
            return config
        if self.value(case, "speculative-algorithm") is None:
            return None
        steps, topk = (self.value(case, f"speculative-{name}") for name in ("num-steps", "eagle-topk"))
        assert (topk, self.value(case, "speculative-num-draft-tokens")) == (1, steps + 1)
        found = {
            "method": self.value(case, "speculative-algorithm").lower(), "num_speculative_tokens": steps,
            "model": self.value(case, "speculative-draft-model-path"),
        }  # fmt: skip
        revision = self.value(case, "speculative-draft-model-revision")
        return found | ({"revision": revision} if revision else {})


@pytest.fixture(scope="module", params=list(INTERPRETERS), ids=" ".join)
def said(request: pytest.FixtureRequest) -> Said:
    name, version = request.param
    all_pins = pins.load()
    release = pins.record(all_pins, all_pins.release(name, version))
    cases = {**CASES, "user": USER[name]}
    plans = [entrypoint.plan(release, entrypoint.parse(case), {}) for case in cases.values()]
    lines = json.dumps([plan.command for plan in plans])
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [INTERPRETERS[request.param], "-c", PARSE[name] + TELL]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return Said(release, **{**found, "parsed": dict(zip(cases, found["parsed"], strict=True))})


def test_the_engine_reads_every_default_as_it_is_meant(said: Said) -> None:
    release = said.release
    target = "model_tag" if release["engine"] == "vllm" else "model_path"
    assert said.parsed["defaults"][target] == release["target"]["repo"]
    assert said.value("defaults", "revision") == release["target"]["revision"]
    assert (said.value("defaults", "host"), said.value("defaults", "port")) == ("0.0.0.0", 8000)
    flags = {**release["serve"]["flags"], **release["serve"]["drafter_flags"]}
    assert {name: said.value("defaults", name) for name in flags} == flags
    drafter = {"method": "eagle3", "model": release["drafter"]["repo"], "num_speculative_tokens": 3}
    assert said.drafter("defaults") == drafter


def test_the_users_flags_win_in_the_engine(said: Said) -> None:
    names = ("tensor-parallel-size", "trust-remote-code", CONTEXT[said.release["engine"]])
    assert [said.value("user", name) for name in names] == [4, False, 4096]
    assert not said.value("user", "reasoning-parser")


def test_the_images_options_reach_the_engine(said: Said) -> None:
    config = {"method": "eagle3", "model": "a/b", "revision": "c", "num_speculative_tokens": 5}
    assert said.drafter("pinned drafter") == config
    assert said.drafter("no speculation") is None


def test_a_flag_that_the_engine_does_not_have_is_refused_by_it(said: Said) -> None:
    assert said.parsed["unknown flag"] is None


def test_the_images_options_hide_no_flag_of_the_engine(said: Said) -> None:
    options = entrypoint.VALUED | entrypoint.SWITCHES
    assert {name for name in options if f"--{name}" in said.names} <= entrypoint.TARGET - {"target"}


def test_short_names_mean_what_they_mean_in_the_engine(said: Said) -> None:
    for short, name in said.engine.short.items():
        # vLLM's parser has -sc in no table: it makes it of --speculative-config.
        assert said.names.get(short, said.names[f"--{name}"]) == said.names[f"--{name}"]
    own = {*said.engine.replaces[:1], *said.engine.tokens}
    assert {f"--{name}" for name in own} <= set(said.names)


def test_no_attention_backend_is_left_to_the_engine_where_it_could_choose_a_wrong_one(said: Said) -> None:
    if said.release["engine"] == "vllm":
        pytest.skip("vLLM has one for sm_120")
    for name in ("attention-backend", "speculative-draft-attention-backend"):
        assert said.value("defaults", name) == "triton"


def test_parsers_and_variables_exist_in_the_engine(said: Said) -> None:
    serve, prefix = said.release["serve"], said.release["engine"].upper() + "_"
    assert serve["flags"]["reasoning-parser"] in said.reasoning
    assert serve["flags"]["tool-call-parser"] in said.tools
    assert {name for name in serve["env"] if name.startswith(prefix)} <= set(said.variables)
    assert set(said.engine.caches) <= set(said.variables)
