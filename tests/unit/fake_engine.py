"""A small HTTP server that answers as a release did, or with one fault.

`python3 fake_engine.py FAULT PORT_FILE RELEASE`, e.g. '' port 'vllm 0.32.0'.
recorded/ holds what the releases say before and after one request of the oracle with three draft tokens. Of vLLM 0.32.0
the texts are those of a real server (`plain`: of one without speculation); of SGLang they were made by its own code
(tests/engine/sglang_signals.py). Histograms and the process' own metrics are left out.
"""

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recorded"
ANSWER: dict[str, Any] = json.loads(RECORDED.joinpath("vllm-0.32.0-answer.json").read_text())
TEXT: str = ANSWER["choices"][0]["text"]
TOKENS: list[int] = ANSWER["choices"][0]["token_ids"]


@dataclass(frozen=True)
class State:
    """What a server has counted; `per_pos` is the value at each of the three positions."""

    generated: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    per_pos: int = 0


ZERO, ONE = State(), State(97, 24, 72, 72, 24)


@dataclass(frozen=True)
class Fault:
    """How a server differs from a healthy one: what it has counted before and after the request, what it lacks (of the
    fields of State), and what it answers.
    """

    before: State = ZERO
    after: State = ONE
    lacks: str = ""
    text: str = TEXT
    tokens: list[int] | None = field(default_factory=lambda: TOKENS)
    raw: str = ""
    plain: bool = False  # started without speculation


FAULTS = {
    "no-speculation": Fault(after=State(97), plain=True),
    "accepted-missing": Fault(lacks="accepted"),
    "positions-missing": Fault(lacks="per_pos"),
    "frozen-at-zero": Fault(after=ZERO),
    "frozen": Fault(before=ONE),
    "drafts-frozen": Fault(before=ONE, after=replace(ONE, generated=194)),
    "no-drafts": Fault(after=State(97)),
    "none-accepted": Fault(after=State(97, 96, 288)),
    "half-accepted": Fault(after=State(97, 48, 144, 48, 16)),
    "restarted": Fault(before=replace(ONE, generated=500), after=State(97)),
    "others": Fault(after=replace(ONE, generated=500)),
    "counts-twice": Fault(after=replace(ONE, accepted=144)),
    "one-token": Fault(tokens=[7] * 97, text=" t7" * 97),
    "no-text": Fault(tokens=None, text="\ufffd" * 200),
    "cut-short": Fault(tokens=TOKENS[:50]),
    "no-json": Fault(raw="<html>busy</html>"),
    "one-differs": Fault(tokens=[*TOKENS[:60], 1, *TOKENS[61:]]),
}


class Vllm:
    """The interface of vLLM: all counters are in /metrics."""

    version_path = "/version"
    names: Mapping[str, str] = {
        "generated": "vllm:generation_tokens_total",
        "drafts": "vllm:spec_decode_num_drafts_total",
        "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        "per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    }

    def __init__(self, version: str) -> None:
        files = (RECORDED / f"vllm-{version}-{name}.txt" for name in ("after", "plain"))
        self.recorded, self.plain = (file.read_text() for file in files)

    def metrics(self, state: State, fault: Fault) -> str:
        text = self.plain if fault.plain else self.recorded
        for key, name in self.names.items():
            text = re.sub(rf"(?m)^({name}\{{.*\}}) \S+$", rf"\g<1> {getattr(state, key)}", text)
        lacks = self.names.get(fault.lacks)
        return "".join(line for line in text.splitlines(keepends=True) if not lacks or lacks not in line)

    def answer(self, fault: Fault) -> dict[str, Any]:
        (choice,) = ANSWER["choices"]
        return {**ANSWER, "choices": [{**choice, "text": fault.text, "token_ids": fault.tokens}]}

    def wanted(self, path: str, body: dict[str, Any]) -> int:
        """How many tokens are asked for; 0 for no request of this interface."""
        right = path == "/v1/completions" and body["model"] == "/oracle/target"
        return int(body["max_tokens"]) if right else 0


class Sglang:
    """The interface of SGLang: drafts are told in answers, and from 0.5.13 on rounds are counted in /metrics, too."""

    version_path = "/server_info"
    names: Mapping[str, str] = {
        "generated": "sglang:generation_tokens_total",
        "drafts": "sglang:spec_verify_calls_total",
    }
    # In meta_info: 0.5.9, 0.5.23.
    told: Mapping[str, tuple[str, ...]] = {
        "drafts": ("spec_verify_ct",),
        "draft_tokens": ("spec_draft_token_num", "spec_num_proposed_drafts"),
        "accepted": ("spec_accept_token_num", "spec_num_correct_drafts"),
        "per_pos": ("spec_accept_histogram", "spec_correct_drafts_histogram"),
    }

    def __init__(self, version: str) -> None:
        self.recorded = json.loads((RECORDED / f"sglang-{version}.json").read_text())

    def metrics(self, state: State, fault: Fault) -> str:
        text: str = self.recorded["before"]  # it has counted a first request already
        for key, name in self.names.items():
            if fault.plain and key == "drafts":
                text = re.sub(rf"(?m)^{name}\{{.*\n", "", text)
            for line, value in re.findall(rf"(?m)^({name}\{{.*\}}) (\S+)$", text):
                text = text.replace(f"{line} {value}\n", f"{line} {float(value) + getattr(state, key)}\n")
        return text

    def answer(self, fault: Fault) -> dict[str, Any]:
        drafts = fault.after.drafts - fault.before.drafts
        per_pos = fault.after.per_pos - fault.before.per_pos
        values = {
            "drafts": drafts, "draft_tokens": fault.after.draft_tokens - fault.before.draft_tokens,
            "accepted": fault.after.accepted - fault.before.accepted, "per_pos": [drafts - per_pos, 0, 0, per_pos],
        }  # fmt: skip
        meta = dict(self.recorded["meta_info"])
        for key, names in self.told.items():
            for name in set(names) & set(meta):
                meta[name] = values[key]
                if drafts <= 0 or key == fault.lacks:
                    del meta[name]
        return {"text": fault.text, **({"output_ids": fault.tokens} if fault.tokens else {}), "meta_info": meta}

    def wanted(self, path: str, body: dict[str, Any]) -> int:
        """How many tokens are asked for; 0 for no request of this interface."""
        right = path == "/generate" and body["sampling_params"]["temperature"] == 0 and body["input_ids"]
        return int(body["sampling_params"]["max_new_tokens"]) if right else 0


def interface(release: str) -> Vllm | Sglang:
    engine, version = release.split()
    return {"vllm": Vllm, "sglang": Sglang}[engine](version)


class Handler(BaseHTTPRequestHandler):
    name = ""
    version = ""
    engine: Vllm | Sglang
    asked = False

    @property
    def fault(self) -> Fault:
        return FAULTS.get(self.name, Fault())

    def send(self, code: int, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health" and self.name == "hangs":
            time.sleep(60)
        if self.path == "/health":
            self.send(503 if self.name == "never-healthy" else 200, "")
        elif self.path == self.engine.version_path:
            versions = {"wrong-version": '{"version": "0.31.0"}', "no-version": "{}"}
            self.send(200, versions.get(self.name, json.dumps({"version": self.version})))
        elif self.path == "/v1/models":
            self.send(200, '{"object": "list", "data": [{"id": "/oracle/target"}]}')
        elif self.path == "/metrics":
            state = self.fault.after if Handler.asked else self.fault.before
            self.send(200, self.engine.metrics(state, self.fault))
        else:
            self.send(404, "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.name == "dies-when-asked":
            print("RuntimeError: the engine core is gone", flush=True)
            os._exit(4)
        if self.name == "hangs-when-asked":
            time.sleep(60)
        wanted = self.engine.wanted(self.path, body)
        if self.name == "refuses" or wanted not in (8, 97):
            return self.send(500, '{"error": "EngineCore encountered an issue"}')
        fault = self.fault if wanted == 97 else replace(self.fault, tokens=TOKENS[:8])
        answer = self.engine.answer(fault)
        if wanted == 8:
            answer["meta_info"]["completion_tokens"] = 8
        else:
            Handler.asked = True
        self.send(200, fault.raw or json.dumps(answer))

    def log_message(self, *_: object) -> None:
        pass


def main(fault: str, port_file: Path, release: str) -> None:
    """Serve on a free port, whose number is written to a file, as a server that knows the port from the start does."""
    Handler.name, Handler.version, Handler.engine = fault, release.split()[1], interface(release)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    half = port_file.with_suffix(".part")
    half.write_text(str(server.server_port))
    half.rename(port_file)
    print(
        "Loading safetensors checkpoint shards:   0% Completed | 0/96\rLoading shards:  40% Completed | 38/96",
        flush=True,
    )
    if fault == "dies":
        print("ValueError: there is no module or parameter named 'fc_norm'", flush=True)
        raise SystemExit(3)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
