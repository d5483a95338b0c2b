"""What a client of the chat server gets of streams with reasoning and tool calls. Runs inside an engine, of 0.16.0.

    python3 stream_chat.py RUNS [SEED]

The server's own generator of chunks, with its kimi_k2 parsers for reasoning and for tool calls, gets messages as the
engine hands them out: in deltas of any number of tokens. What a client makes of the chunks has to be what the parsers
make of the whole message. The last line is JSON: {streams, reasoning, content and calls: in how many streams they
aren't, examples: the shortest three}.
"""

import asyncio
import itertools
import json
import random
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from stream_tool_calls import REQUEST, STOP_ID, TOKENIZER, cuts, message, parser, texts, whole
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.reasoning import ReasoningParserManager

SHORT = "so<|/think|><|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
SHORT = SHORT.replace("<|/think|>", "</think>")
THOUGHTS = ["It is sunny.", "a < b <|", "東京 🙂\n"]


def server() -> OpenAIServingChat:
    """The server's object without an engine behind it."""
    made = OpenAIServingChat.__new__(OpenAIServingChat)
    settings = {
        "use_harmony": False,
        "tool_call_id_type": "random",
        "enable_auto_tools": True,
        "tool_parser": lambda tokenizer: parser(),
        "enable_force_include_usage": False,
        "enable_prompt_tokens_details": False,
        "enable_log_outputs": False,
        "enable_log_deltas": False,
        "request_logger": None,
        "response_role": "assistant",
    }
    made.__dict__.update(settings)
    return made


async def outputs(ids: list[int], seen: list[str], places: tuple[int, ...]) -> AsyncIterator[RequestOutput]:
    """The engine's outputs for tokens that are cut at `places`."""
    for start, end in itertools.pairwise((0, *places, len(ids))):
        finish = "stop" if end == len(ids) else None
        text = seen[end][len(seen[start]) :]
        part = CompletionOutput(0, text, ids[start:end], None, None, finish_reason=finish)
        yield RequestOutput("r", None, [1], None, [part], finish is not None)


async def client(ids: list[int], seen: list[str], places: tuple[int, ...]) -> dict[str, Any]:
    """What a client puts together of the chunks of one stream."""
    reasoning = ReasoningParserManager.get_reasoning_parser("kimi_k2")(TOKENIZER)
    request = REQUEST.model_copy(update={"stream": True, "tool_choice": "auto"})
    made = server().chat_completion_stream_generator(
        request, outputs(ids, seen, places), "r", "kimi", [], TOKENIZER, SimpleNamespace(), reasoning
    )
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    async for line in made:
        data = line.removeprefix("data: ").strip()
        chunk = {} if data == "[DONE]" else json.loads(data)
        assert "error" not in chunk, chunk
        for choice in chunk.get("choices", []):
            delta = choice["delta"]
            found["reasoning"] += delta.get("reasoning") or ""
            found["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                while len(found["calls"]) <= part["index"]:
                    found["calls"].append(["", "", ""])
                call, function = found["calls"][part["index"]], part.get("function") or {}
                call[0] += part.get("id") or ""
                call[1] += function.get("name") or ""
                call[2] += function.get("arguments") or ""
    return found


def main(runs: int, seed: int) -> None:
    dice = random.Random(seed)
    streams, examples = 0, []
    for text in [SHORT, *(dice.choice(THOUGHTS) + "</think>" + message(dice) for _ in range(30))]:
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), STOP_ID]
        thought, _, rest = text.partition("</think>")
        expected = {"reasoning": thought} | whole(rest)
        seen = texts(ids, 0)
        for places in cuts(len(ids), runs, dice):
            streams += 1
            found = asyncio.run(client(ids, seen, places))
            if found != expected:
                deltas = [seen[b][len(seen[a]) :] for a, b in itertools.pairwise((0, *places, len(ids)))]
                examples.append({"deltas": deltas, "got": found, "expected": expected})
    examples.sort(key=lambda case: len(str(case)))
    wrong = {part: sum(case["got"][part] != case["expected"][part] for case in examples) for part in expected}
    print(json.dumps({"streams": streams, **wrong, "examples": examples[:3]}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 0)
