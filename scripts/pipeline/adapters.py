"""What differs between engines: where a server answers, how it is asked, and what it calls its counters.

vLLM counts drafts in /metrics. SGLang tells them in each answer (`meta_info`), which counts from zero for each request,
so that the sum over our answers is a difference, too; in /metrics it has gauges and two counters.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from packaging.version import Version

from scripts.pipeline.ladder import Answer, Counters
from scripts.pipeline.say import Stop


@dataclass(frozen=True)
class Told:
    """What an answer calls its own drafts. `histogram`, at n: the rounds of which n drafts were accepted."""

    drafts: str
    draft_tokens: str
    accepted: str
    histogram: str


@dataclass(frozen=True)
class Adapter:
    """One engine's HTTP interface, and what a smoke test has to tell it.

    Paths begin with a slash; `chat` is empty where conversations tell nothing of their drafts. Counters are named as in
    the text of /metrics, empty where the engine has none and `told` names what its answers say instead. `position` is
    the label that numbers the draft positions, from 0. `environment` is for any server that we start, `on_cpu` for a
    CPU build beside it. `oracle_flags` make the image's own defaults, which are for the real target, fit a tiny one.
    """

    engine: str
    version: str
    version_key: str
    health: str
    models: str
    metrics: str
    completions: str
    chat: str
    generated: str
    api_key: str  # the environment variable with the server's key
    drafts: str = ""
    draft_tokens: str = ""
    accepted: str = ""
    per_position: str = ""
    position: str = ""
    told: Told | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    on_cpu: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    oracle_flags: tuple[str, ...] = ()
    split: str = "--tensor-parallel-size"  # the flag for the number of GPUs


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
    oracle_flags=("--max-model-len", "2048", "--limit-mm-per-prompt", '{"vision_chunk": 0}'),
)
# Its conversations (/v1/chat/completions) tell nothing of drafts, and no counter of /metrics does.
SGLANG = Adapter(
    engine="sglang",
    version="/server_info",
    version_key="version",
    health="/health",
    models="/v1/models",
    metrics="/metrics",
    completions="/generate",
    chat="",
    generated="sglang:generation_tokens_total",
    told=Told("spec_verify_ct", "spec_draft_token_num", "spec_accept_token_num", "spec_accept_histogram"),
    api_key="SGLANG_API_KEY",
    environment=MappingProxyType({"DO_NOT_TRACK": "1"}),
    # The engine's own warm-up shows the model a picture, which the tiny one has no use for.
    oracle_flags=("--context-length", "2048", "--max-total-tokens", "65536", "--skip-server-warmup"),
)
SGLANG_0_5_23 = replace(
    SGLANG,
    chat="/v1/chat/completions",
    drafts="sglang:spec_verify_calls_total",
    told=Told("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_correct_drafts_histogram"),
)
# By engine: from which version on an adapter holds. Read in the sources of these releases, and of none between them.
ADAPTERS = {"vllm": {"0.16.0": VLLM}, "sglang": {"0.5.9": SGLANG, "0.5.23": SGLANG_0_5_23}}


def adapter(engine: str, version: str) -> Adapter:
    """The adapter of a release. Raises Stop where there is none."""
    known = {since: found for since, found in ADAPTERS.get(engine, {}).items() if Version(since) <= Version(version)}
    if not known:
        raise Stop(f"no smoke test for {engine} {version}: scripts/pipeline/adapters.py has {', '.join(ADAPTERS)}")
    return known[max(known, key=Version)]


def request(engine: Adapter, model: str, prompt: Mapping[str, Any], max_tokens: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a request for a greedy answer of exactly `max_tokens`.

    `prompt` is {"prompt": text or token ids} or {"messages": ...}.
    """
    if engine.told and "prompt" in prompt:
        sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        given = "text" if isinstance(prompt["prompt"], str) else "input_ids"
        return engine.completions, {given: prompt["prompt"], "sampling_params": sampling}
    body = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    extra = {"return_meta_info": True} if engine.told else {}
    return engine.chat if "messages" in prompt else engine.completions, {**body, **extra, **prompt}


def answer(engine: Adapter, data: Any) -> Answer:
    """What came back for a request. Raises LookupError, TypeError, ValueError or AttributeError for no such answer."""
    if "choices" in data:
        choice, generated = data["choices"][0], int(data["usage"]["completion_tokens"])
        message, meta = choice.get("message") or {}, choice.get("meta_info")
        said = choice["text"] if not message else "".join(
            str(message.get(part) or "") for part in ("reasoning", "reasoning_content", "content")
        )  # fmt: skip
        ids = choice.get("token_ids", choice.get("response_token_ids"))
    else:
        said, ids, meta = data["text"], data.get("output_ids"), data["meta_info"]
        generated = int(meta["completion_tokens"])
    tokens = tuple(int(token) for token in ids) if ids is not None else None
    return Answer(str(said), tokens, generated, told(engine.told, meta) if engine.told else None)


def told(names: Told, meta: Mapping[str, Any] | None) -> Counters | str:
    """What an answer tells of its drafts; or the name of what is missing.

    Where nothing was drafted for it, it has none of the entries: zero drafts.
    """
    if meta is None:
        return "meta_info in an answer"
    if names.drafts not in meta:
        return Counters(0, 0, 0, 0, ())
    for name in (names.draft_tokens, names.accepted, names.histogram):
        if name not in meta:
            return f"{name} in an answer's meta_info"
    drafts, draft_tokens = int(meta[names.drafts]), int(meta[names.draft_tokens])
    rounds = [int(count) for count in meta[names.histogram]]
    positions = max(draft_tokens // max(drafts, 1), len(rounds) - 1)
    accepted = tuple(float(sum(rounds[place + 1 :])) for place in range(positions))
    return Counters(0, drafts, draft_tokens, int(meta[names.accepted]), accepted)


def all_told(answers: Sequence[Answer]) -> Counters | str | None:
    """What answers tell of their drafts, summed; or what is missing; None where /metrics tells it."""
    each = [answer.told for answer in answers if answer.told is not None]
    if missing := next((one for one in each if isinstance(one, str)), None):
        return missing
    whole = [one for one in each if isinstance(one, Counters)]
    if not whole:
        return None
    positions = max(len(one.per_position) for one in whole)
    padded = [(*one.per_position, *[0.0] * (positions - len(one.per_position))) for one in whole]
    return Counters(
        0,
        sum(one.drafts for one in whole),
        sum(one.draft_tokens for one in whole),
        sum(one.accepted for one in whole),
        tuple(map(sum, zip(*padded, strict=True))),
    )


_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of each sample of a metric, from Prometheus' text format."""
    found = []
    for line in text.splitlines():
        if line.startswith(name) and (match := _SAMPLE.fullmatch(line.strip())) and match[1] == name:
            found.append((dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or "")), float(match[3])))
    return found


def counters(text: str, engine: Adapter, answers: Counters | str | None = None) -> Counters | str:
    """The counters of one reading, or the name of one that is missing.

    Those of /metrics are summed over a server's engines. For those that it doesn't have, `answers` is what all answers
    up to this reading have told.
    """
    totals = {}
    for name in filter(None, (engine.generated, engine.drafts, engine.draft_tokens, engine.accepted)):
        found = samples(text, name)
        if not found:
            return f"{name} in {engine.metrics}"
        totals[name] = sum(value for _, value in found)
    if engine.told:
        if not isinstance(answers, Counters):
            return answers or "meta_info in an answer"
        return replace(answers, generated=totals[engine.generated], drafts=totals.get(engine.drafts, answers.drafts))
    positions: dict[int, float] = {}
    for labels, value in samples(text, engine.per_position):
        place = int(labels.get(engine.position, -1))
        positions[place] = positions.get(place, 0.0) + value
    if not positions or sorted(positions) != list(range(len(positions))):
        return f"{engine.per_position} by {engine.position} in {engine.metrics}"
    return Counters(
        totals[engine.generated],
        totals[engine.drafts],
        totals[engine.draft_tokens],
        totals[engine.accepted],
        tuple(positions[place] for place in range(len(positions))),
    )
