"""Does the engine's kimi_k2 tool-call parser give the same result however its stream is cut? Runs inside an engine.

    python3 stream_tool_calls.py RUNS LAG,... [SEED]

Messages are made up from seeds; each is one string of tokens of a tiny tokenizer with Kimi's special tokens. It is
given to the non-streaming parser as a whole, which is the reference, and to the streaming parser in deltas: all at
once, token by token, and in RUNS random ways, for each LAG: the characters by which the text is behind its tokens, as
it is in a request with stop strings (0 without). Short messages are cut in every way there is. What a client makes of
the deltas has to be the reference.

The last line is JSON: {messages, streams, several: deltas with more than one structural token, wrong: streams whose
result is not the reference, spaced: those among them that are the reference but for white space around arguments, cut:
streams whose result differs from another stream's of the same message, examples: [the shortest ten that are wrong and
not just spaced, each with the text, the deltas, and what came of them]}.
"""

import itertools
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()

from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.tool_parsers import ToolParserManager  # noqa: E402

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKERS = (BEGIN, END, CALL, ARGUMENTS, CALL_END)
STOP = "<|im_end|>"
THINK = ("<think>", "</think>")
SHORT = [
    f"a{BEGIN}{CALL}f:0{ARGUMENTS}{{}}{CALL_END}{END}",
    f"{BEGIN}{CALL}f:0{ARGUMENTS}{CALL_END}{CALL}g:1{ARGUMENTS}",
    f"{CALL}f:0{ARGUMENTS}{{}}{CALL_END}<",
    "a < b <|",
]
CONTENT = ["", "Let me look.", "a < b, <|, <|tool", "Zürich 東京 🙂\n\n", "  ", f"say {CALL[:9]}"]
NAMES = ["functions.get_weather", "get_weather", "functions.mcp.read_file", "f"]
VALUES = [
    "Tokyo",
    "東京 🙂",
    "a < b <|x|> \n",
    '"quoted" \\ back',
    12,
    -0.5,
    True,
    None,
    [1, [2, {}]],
    {"deep": {"er": "}"}},
]
SPACE = ["", "", "", "\n", " \n "]
REQUEST = ChatCompletionRequest(
    model="kimi",
    messages=[{"role": "user", "content": "?"}],
    tools=[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}],
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and Kimi's special tokens: text that isn't ASCII takes several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([*THINK, *MARKERS])
    made.add_special_tokens([STOP])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=STOP)


TOKENIZER = tokenizer()
STOP_ID = TOKENIZER.convert_tokens_to_ids(STOP)
STRUCTURAL = {TOKENIZER.convert_tokens_to_ids(marker) for marker in MARKERS}


def message(dice: random.Random) -> str:
    """What a model may write: content, and mostly a section with calls; now and then without the section's markers."""
    text = dice.choice(CONTENT)
    calls = dice.choice([0, 1, 1, 2, 3])
    if not calls:
        return text
    section = dice.random() < 0.8
    text += BEGIN + dice.choice(SPACE) if section else ""
    for number in range(calls):
        names = dice.sample(["city", "days", "x"], dice.randrange(4))
        arguments = json.dumps({name: dice.choice(VALUES) for name in names}, ensure_ascii=dice.random() < 0.5)
        space = [dice.choice(SPACE) for _ in range(5)]
        text += f"{CALL}{space[0]}{dice.choice(NAMES)}:{number + dice.choice([0, 10])}{space[1]}{ARGUMENTS}"
        text += f"{space[2]}{arguments}{space[3]}{CALL_END}{space[4]}"
    return text + (END if section else "")


def texts(ids: list[int], lag: int) -> list[str]:
    """What the engine has handed out after each token: whole characters, and `lag` fewer of them before the end."""
    seen = []
    for count in range(len(ids) + 1):
        text = TOKENIZER.decode(ids[:count], skip_special_tokens=False).removesuffix(STOP)
        seen.append(text.rstrip("\ufffd") if count < len(ids) else text)
    return [*(text[: max(0, len(text) - lag)] for text in seen[:-1]), seen[-1]]


def cuts(length: int, runs: int, dice: random.Random) -> Iterator[tuple[int, ...]]:
    """Places to cut `length` tokens: every way if it is short, or none, all, and random ones."""
    inner = range(1, length)
    if length <= 12:
        for size in range(length):
            yield from itertools.combinations(inner, size)
        return
    yield ()
    yield tuple(inner)
    for _ in range(runs):
        density = dice.choice([0.02, 0.1, 0.3, 0.7])
        yield tuple(place for place in inner if dice.random() < density)


def client(deltas: list[Any]) -> dict[str, Any]:
    """What a client puts together: content, and each call by its index. A call's first delta names it."""
    content, calls = "", {}
    for delta in deltas:
        content += delta.content or ""
        for part in delta.tool_calls or []:
            if part.index not in calls:
                calls[part.index] = [part.id, part.function.name if part.function else None, ""]
            elif part.id or (part.function and part.function.name):
                calls[part.index].append("named again")
            calls[part.index][2] += (part.function.arguments if part.function else None) or ""
    return {"content": content, "calls": [calls[index] for index in sorted(calls)]}


def parser() -> Any:
    return ToolParserManager.get_tool_parser("kimi_k2")(TOKENIZER)


def whole(text: str) -> dict[str, Any]:
    """The non-streaming parser's result."""
    found = parser().extract_tool_calls(text, REQUEST)
    calls = [[call.id, call.function.name, call.function.arguments] for call in found.tool_calls]
    return {"content": found.content or "", "calls": calls}


def streamed(ids: list[int], seen: list[str], places: tuple[int, ...]) -> dict[str, Any]:
    """The streaming parser's result for tokens that are cut at `places`."""
    streaming, deltas = parser(), []
    for start, end in itertools.pairwise((0, *places, len(ids))):
        before, now = seen[start], seen[end]
        deltas.append(
            streaming.extract_tool_calls_streaming(
                before, now, now[len(before) :], ids[:start], ids[:end], ids[start:end], REQUEST
            )
        )
    if hasattr(streaming, "finish_streaming"):
        deltas.append(streaming.finish_streaming())
    result = client([delta for delta in deltas if delta])
    recorded = [call.get("arguments") for call in streaming.prev_tool_call_arr]
    if recorded and recorded != list(streaming.streamed_args_for_tool):
        result["unstreamed"] = recorded  # the server would append the difference to the last delta
    return result


def unspaced(result: dict[str, Any]) -> dict[str, Any]:
    """A result without the white space around arguments, which means nothing in JSON."""
    return result | {"calls": [[*call[:2], call[2].strip(), *call[3:]] for call in result["calls"]]}


def main(runs: int, lags: list[int], seed: int = 0) -> None:
    dice = random.Random(seed)
    examples: list[dict[str, Any]] = []
    messages = [*SHORT, *(message(dice) for _ in range(60))]
    counts = dict.fromkeys(("streams", "several", "wrong", "spaced", "cut"), 0)
    for text in messages:
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), STOP_ID]
        reference, first = whole(text), None
        for lag in lags:
            seen = texts(ids, lag)
            for places in cuts(len(ids), runs, dice):
                result = streamed(ids, seen, places)
                first = first or result
                # A call that breaks off is none for the reference, and has been named by then in a stream.
                expected = first if text == SHORT[1] else reference
                bounds = list(itertools.pairwise((0, *places, len(ids))))
                wrong, spaced = result != expected, unspaced(result) == expected
                counts["streams"] += 1
                counts["several"] += sum(sum(i in STRUCTURAL for i in ids[a:b]) > 1 for a, b in bounds)
                counts["wrong"] += wrong
                counts["spaced"] += wrong and spaced
                counts["cut"] += result != first
                if wrong and not spaced:
                    deltas = [seen[b][len(seen[a]) :] for a, b in bounds]
                    examples.append({"text": text, "deltas": deltas, "got": result, "expected": expected})
    examples.sort(key=lambda case: (len(case["deltas"]), len(case["text"])))
    print(json.dumps({"messages": len(messages), **counts, "examples": examples[:10]}))


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(lag) for lag in sys.argv[2].split(",")], *map(int, sys.argv[3:]))
