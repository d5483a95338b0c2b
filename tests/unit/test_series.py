"""Lint of a series folder, and patches read as values."""

from pathlib import Path

import pytest
from series_help import HEADER, diff, write_series

from scripts.pipeline import diffs, series
from scripts.pipeline.say import Stop

BEFORE = {"vllm/a.py": b"a = 1\nb = 2\n"}
AFTER = {"vllm/a.py": b"a = 1\nb = 3\n"}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    return series.load(write_series(tmp_path / "s", BEFORE, AFTER))


def with_header(files: dict[str, bytes], old: str, new: str) -> dict[str, bytes]:
    assert old.encode() in files["0001-step.patch"]
    return files | {"0001-step.patch": files["0001-step.patch"].replace(old.encode(), new.encode())}


def test_a_sound_series_has_no_errors(files: dict[str, bytes]) -> None:
    assert series.lint(files, "0.16.0") == []


def test_a_header_is_read_with_its_folded_lines() -> None:
    fields = series.header(HEADER.encode() + diff("vllm/a.py", b"Bug: a\n", b"Bug: b\n"))
    assert fields["Description"] == "Make the example say something else\nIt said the wrong thing."
    assert fields["Bug"] == "none" and list(fields) == list(series.FIELDS)


@pytest.mark.parametrize("field", series.FIELDS)
def test_each_field_is_required(files: dict[str, bytes], field: str) -> None:
    errors = series.lint(with_header(files, f"{field}:", f"X-{field}:"), "0.16.0")
    assert errors == [f"0001-step.patch:1: header field {field} is missing or empty: add it"]


@pytest.mark.parametrize("day", ["30.11.2026", "2026-13-01", "2026-02-30", "20261130", "today"])
def test_last_update_is_a_date(files: dict[str, bytes], day: str) -> None:
    assert "is no date" in series.lint(with_header(files, "2026-11-30", day), "0.16.0")[0]


@pytest.mark.parametrize(
    ("upstream", "version", "word"),
    [
        ("0.18.0", "0.18.0", "stale"),
        ("0.18.0", "0.32.0", "stale"),
        ("0.9.0", "0.16.0", "stale"),
        ("0.18.0", "0.16.0", None),
        ("0.18.0", "0.18.0rc1", None),
        ("0.16.0.post1", "0.16.0", None),
        ("soon", "0.16.0", "neither"),
    ],
)
def test_a_patch_that_upstream_has_is_stale(
    files: dict[str, bytes], upstream: str, version: str, word: str | None
) -> None:
    errors = series.lint(with_header(files, "Applied-Upstream: no", f"Applied-Upstream: {upstream}"), version)
    assert ([word in error for error in errors] == [True]) if word else (errors == [])


def test_every_file_is_listed_and_every_entry_is_there(files: dict[str, bytes]) -> None:
    assert "0002-more.patch: isn't listed" in series.lint(files | {"0002-more.patch": b""}, "0.16.0")[0]
    assert "notes.txt: isn't listed" in series.lint(files | {"notes.txt": b""}, "0.16.0")[0]
    assert "open conflict" in series.lint(files | {"0002-more.patch.rej": b""}, "0.16.0")[0]
    listed = files | {"series": files["series"] + b"0002-more.patch\n"}
    assert "lists 0002-more.patch, which isn't there" in series.lint(listed, "0.16.0")[0]
    twice = files | {"series": files["series"] + b"0001-step.patch\n"}
    assert "0001-step.patch 2 times" in series.lint(twice, "0.16.0")[0]
    outside = files | {"series": files["series"] + b"../0001-step.patch\n"}
    assert "is no name of a patch in this folder" in series.lint(outside, "0.16.0")[0]


def test_series_and_tree_are_required(files: dict[str, bytes]) -> None:
    assert "series: is missing" in series.lint({"tree": b""}, "0.16.0")[0]
    assert "tree: is missing" in series.lint({n: d for n, d in files.items() if n != "tree"}, "0.16.0")[0]


@pytest.mark.parametrize(("text", "sound"), [(b"# Upstream has it all.\n", True), (b"", False), (b"#\n\n", False)])
def test_an_empty_series_says_why(text: bytes, sound: bool) -> None:
    assert (series.lint({"series": text, "tree": b""}, "0.32.0") == []) is sound


def test_a_patch_that_does_not_parse_is_named_with_its_line(files: dict[str, bytes]) -> None:
    errors = series.lint(with_header(files, "+b = 3\n", ""), "0.16.0")
    assert len(errors) == 1 and errors[0].startswith("0001-step.patch:")


def test_a_missing_folder_is_an_error_and_so_is_a_folder_inside(tmp_path: Path) -> None:
    with pytest.raises(Stop, match="there is no series"):
        series.load(tmp_path / "0.99.0")
    (tmp_path / "old").mkdir()
    with pytest.raises(Stop, match="is no file"):
        series.load(tmp_path)


@pytest.mark.parametrize("new", [None, b"", b"a = 1\nb = 2", b"x\n" * 30])
def test_a_change_survives_writing_and_reading(new: bytes | None) -> None:
    old = b"x\n" * 9 + b"y\n" + b"x\n" * 9
    change = diffs.compare("vllm/a.py", None if new is None else old, new or b"made = 1\n")
    assert change is not None
    assert diffs.parse(b"Description: x\n" + diffs.render(change)).changes == (change,)


def test_equal_files_have_no_change() -> None:
    assert diffs.compare("vllm/a.py", b"a\n", b"a\n") is None
