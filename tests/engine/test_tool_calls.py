"""Kimi's tool calls in a stream: the same result however the stream is cut. See stream_tool_calls.py, stream_chat.py.

0.16.0 has the faults, and patches 0013 (the parser) and 0014 (the server). In 0.32.0 and 0.33.0 the result doesn't
depend on the cut, and is the non-streaming parser's but for white space around arguments; that holds for requests
without stop strings, whose text doesn't lag behind its tokens.
"""

from pathlib import Path

import pytest
from engine_help import VERSIONS, Engine

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("version", VERSIONS)
def test_the_result_does_not_depend_on_how_the_stream_is_cut(version: str, tmp_path: Path) -> None:
    engine = Engine(version, tmp_path)
    engine.apply()
    found = engine.measure("stream_tool_calls.py", "6", "0,5,40" if version == "0.16.0" else "0")
    assert found["streams"] > 3000 and found["several"] > 2000
    assert found["examples"] == [] and found["cut"] == 0
    assert found["wrong"] == (0 if version == "0.16.0" else found["spaced"])


def test_without_the_patch_calls_are_lost_where_a_delta_has_several_tokens(tmp_path: Path) -> None:
    engine = Engine("0.16.0", tmp_path)
    engine.apply(without="0013")
    found = engine.measure("stream_tool_calls.py", "1", "0")
    assert found["cut"] > found["streams"] / 4
    assert any(case["expected"]["calls"] and not case["got"]["calls"] for case in found["examples"])


def test_the_server_hands_on_reasoning_and_calls_whole(tmp_path: Path) -> None:
    engine = Engine("0.16.0", tmp_path)
    engine.apply()
    found = engine.measure("stream_chat.py", "10")
    assert found["streams"] > 300 and found["examples"] == []


def test_without_the_patch_the_server_loses_reasoning_and_garbles_calls(tmp_path: Path) -> None:
    engine = Engine("0.16.0", tmp_path)
    engine.apply(without="0014")
    found = engine.measure("stream_chat.py", "10")
    assert found["reasoning"] and found["calls"], "each of the patch's two faults shows"
