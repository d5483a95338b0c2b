"""A small HTTP server that answers as vLLM 0.32.0 did, or with one fault: `python3 fake_engine.py FAULT [PORT_FILE]`.

The texts in recorded/ are those of the real server before and after one request of the oracle with three draft tokens
(`plain`: of one without speculation); histograms and the process' own metrics are left out.
"""

import json
import os
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded"
BEFORE, AFTER, PLAIN = (
    RECORDED.joinpath(f"vllm-0.32.0-{name}.txt").read_text() for name in ("before", "after", "plain")
)
ANSWER = RECORDED.joinpath("vllm-0.32.0-answer.json").read_text()


def setting(text: str, **counters: float) -> str:
    """A text of /metrics with other values; `per_pos` is the value at each position."""
    names = {
        "generated": "generation_tokens",
        "drafts": "spec_decode_num_drafts",
        "draft_tokens": "spec_decode_num_draft_tokens",
        "accepted": "spec_decode_num_accepted_tokens",
        "per_pos": "spec_decode_num_accepted_tokens_per_pos",
    }
    for name, value in counters.items():
        text = re.sub(rf"(?m)^(vllm:{names[name]}_total\{{.*\}}) \S+$", rf"\g<1> {value}", text)
    return text


def lacking(text: str, name: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if f"{name}_total" not in line)


def answering(**choice: object) -> str:
    data = json.loads(ANSWER)
    data["choices"][0].update(choice)
    return json.dumps(data)


TOKENS: list[int] = json.loads(ANSWER)["choices"][0]["token_ids"]
# Readings before and after the request, by fault.
METRICS = {
    "no-speculation": (PLAIN, PLAIN),
    "accepted-missing": (lacking(BEFORE, "accepted_tokens"), lacking(AFTER, "accepted_tokens")),
    "positions-missing": (lacking(BEFORE, "per_pos"), lacking(AFTER, "per_pos")),
    "frozen-at-zero": (BEFORE, BEFORE),
    "frozen": (AFTER, AFTER),
    "drafts-frozen": (AFTER, setting(AFTER, generated=194)),
    "no-drafts": (BEFORE, setting(BEFORE, generated=97)),
    "none-accepted": (BEFORE, setting(AFTER, drafts=96, draft_tokens=288, accepted=0, per_pos=0)),
    "half-accepted": (BEFORE, setting(AFTER, drafts=48, draft_tokens=144, accepted=48, per_pos=16)),
    "restarted": (AFTER, setting(BEFORE, generated=97)),
    "others": (BEFORE, setting(AFTER, generated=500)),
    "counts-twice": (BEFORE, setting(AFTER, accepted=144)),
}
ANSWERS = {
    "one-token": answering(token_ids=[7] * 97, text=" t7" * 97),
    "no-text": answering(token_ids=None, text="\ufffd" * 200),
    "cut-short": answering(token_ids=TOKENS[:50]),
    "no-json": "<html>busy</html>",
    "one-differs": answering(token_ids=[*TOKENS[:60], 1, *TOKENS[61:]]),
}


class Handler(BaseHTTPRequestHandler):
    fault = ""
    asked = False

    def send(self, code: int, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health" and self.fault == "hangs":
            time.sleep(60)
        if self.path == "/health":
            self.send(503 if self.fault == "never-healthy" else 200, "")
        elif self.path == "/version":
            versions = {"wrong-version": '{"version": "0.31.0"}', "no-version": "{}"}
            self.send(200, versions.get(self.fault, '{"version": "0.32.0"}'))
        elif self.path == "/v1/models":
            self.send(200, '{"object": "list", "data": [{"id": "/oracle/target"}]}')
        elif self.path == "/metrics":
            self.send(200, METRICS.get(self.fault, (BEFORE, AFTER))[Handler.asked])
        else:
            self.send(404, "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.fault == "dies-when-asked":
            print("RuntimeError: the engine core is gone", flush=True)
            os._exit(4)
        if self.fault == "hangs-when-asked":
            time.sleep(60)
        if self.fault == "refuses" or body["model"] != "/oracle/target" or body["max_tokens"] != 97:
            return self.send(500, '{"error": "EngineCore encountered an issue"}')
        Handler.asked = True
        self.send(200, ANSWERS.get(self.fault, ANSWER))

    def log_message(self, *_: object) -> None:
        pass


def main(fault: str, port_file: Path) -> None:
    """Serve on a free port, whose number is written to a file, as a server that knows the port from the start does."""
    Handler.fault = fault
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
    main(sys.argv[1], Path(sys.argv[2]))
