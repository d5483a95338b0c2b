"""How each engine is told on its command line what this image serves: data, and how it is given a drafter."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Drafter:
    """A drafter to serve with: repository or folder, its revision (None: the newest), draft tokens a step."""

    model: str
    revision: str | None
    tokens: int


def _vllm(drafter: Drafter) -> dict[str, object]:
    config = {"method": "eagle3", "model": drafter.model, "num_speculative_tokens": drafter.tokens}
    revision = {"revision": drafter.revision} if drafter.revision else {}
    return {"speculative-config": json.dumps(config | revision)}


def _sglang(drafter: Drafter) -> dict[str, object]:
    """K draft tokens are K steps with one candidate each; SGLang counts the token that they follow as one more."""
    revision = {"speculative-draft-model-revision": drafter.revision} if drafter.revision else {}
    return {
        # EAGLE, written for EAGLE3, runs with an acceptance length of exactly 1 and no error.
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": drafter.model,
        **revision,
        "speculative-num-steps": drafter.tokens,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": drafter.tokens + 1,
    }


@dataclass(frozen=True)
class Engine:
    """One engine's command line. Names of flags are without their dashes.

    `start` comes first and the target follows it; `short` maps other names of a flag, as they are written, to the one
    that is meant. A flag of `replaces` stands for the drafter as a whole; one of `tokens` contradicts --draft-tokens.
    `negated`: a flag without a value has a --no-FLAG of the engine's own. `caches` are the variables whose folders must
    be writable.
    """

    start: tuple[str, ...]
    drafter: Callable[[Drafter], dict[str, object]]
    short: Mapping[str, str]
    replaces: tuple[str, ...]
    help: str
    caches: tuple[str, ...]
    tokens: frozenset[str] = field(default=frozenset())
    negated: bool = False


ENGINES = {
    "vllm": Engine(
        start=("vllm", "serve"),
        drafter=_vllm,
        short={"-tp": "tensor-parallel-size", "-sc": "speculative-config"},
        replaces=("speculative-config", "spec-method", "spec-model", "spec-tokens"),
        help="serve --help=all (needs a GPU)",
        caches=("VLLM_CACHE_ROOT",),
        negated=True,
    ),
    "sglang": Engine(
        start=("python3", "-m", "sglang.launch_server", "--model-path"),
        drafter=_sglang,
        short={
            "--tp": "tensor-parallel-size",
            "--tp-size": "tensor-parallel-size",
            "--speculative-draft-model": "speculative-draft-model-path",
        },
        replaces=("speculative-algorithm", "speculative-draft-model-path"),
        help="serve --help",
        caches=("SGLANG_CACHE_DIR", "TVM_FFI_CACHE_DIR"),
        tokens=frozenset({"speculative-num-steps", "speculative-num-draft-tokens", "speculative-eagle-topk"}),
    ),
}
