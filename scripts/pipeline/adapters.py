"""What differs between engines, as data: where a server answers, and what it calls its counters."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from scripts.pipeline.ladder import Counters
from scripts.pipeline.say import Stop


@dataclass(frozen=True)
class Adapter:
    """One engine's HTTP interface, and what a smoke test has to tell it.

    Paths begin with a slash. Counters are named as in the text of /metrics; `position` is the label that numbers the
    draft positions, from 0. `environment` is for any server that we start, `on_cpu` for a CPU build beside it.
    `oracle_flags` make the image's own defaults, which are for the real target, fit a tiny one.
    """

    engine: str
    version: str
    version_key: str
    health: str
    models: str
    metrics: str
    completions: str
    chat: str
    drafts: str
    draft_tokens: str
    accepted: str
    per_position: str
    position: str
    generated: str
    api_key: str  # the environment variable with the server's key
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    on_cpu: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    oracle_flags: tuple[str, ...] = ()
    split: str = ""  # the flag for the number of GPUs


# The names are the same in 0.16.0, 0.18.0, 0.19.1, 0.32.0 and 0.33.0.
VLLM = Adapter(
    engine="vllm",
    version="/version",
    version_key="version",
    health="/health",
    models="/v1/models",
    metrics="/metrics",
    completions="/v1/completions",
    chat="/v1/chat/completions",
    drafts="vllm:spec_decode_num_drafts_total",
    draft_tokens="vllm:spec_decode_num_draft_tokens_total",
    accepted="vllm:spec_decode_num_accepted_tokens_total",
    per_position="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    position="position",
    generated="vllm:generation_tokens_total",
    api_key="VLLM_API_KEY",
    environment=MappingProxyType({"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}),
    # One thread: more only cost time where the tensors are tiny.
    on_cpu=MappingProxyType({"VLLM_TARGET_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}),
    split="--tensor-parallel-size",
    oracle_flags=("--max-model-len", "2048", "--limit-mm-per-prompt", '{"vision_chunk": 0}'),
)
ADAPTERS = {adapter.engine: adapter for adapter in (VLLM,)}


def adapter(engine: str) -> Adapter:
    """The adapter of an engine. Raises Stop where there is none."""
    if engine not in ADAPTERS:
        raise Stop(f"no smoke test for {engine!r}: scripts/pipeline/adapters.py has {', '.join(ADAPTERS)}")
    return ADAPTERS[engine]


_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of each sample of a metric, from Prometheus' text format."""
    found = []
    for line in text.splitlines():
        if line.startswith(name) and (match := _SAMPLE.fullmatch(line.strip())) and match[1] == name:
            found.append((dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or "")), float(match[3])))
    return found


def counters(text: str, engine: Adapter) -> Counters | str:
    """The counters of one reading of /metrics, summed over a server's engines; or the name of one that is missing."""
    totals = {}
    for name in (engine.generated, engine.drafts, engine.draft_tokens, engine.accepted, engine.per_position):
        found = samples(text, name)
        if not found:
            return name
        totals[name] = sum(value for _, value in found)
    positions: dict[int, float] = {}
    for labels, value in samples(text, engine.per_position):
        place = int(labels.get(engine.position, -1))
        positions[place] = positions.get(place, 0.0) + value
    if sorted(positions) != list(range(len(positions))):
        return f"{engine.per_position}{{{engine.position}}}"
    return Counters(
        totals[engine.generated],
        totals[engine.drafts],
        totals[engine.draft_tokens],
        totals[engine.accepted],
        tuple(positions[place] for place in range(len(positions))),
    )
