"""Unified diffs as values: read, place on sources, write. Pure functions over bytes; only a line feed ends a line.

This is what a series is moved with. The judge of a series is scripts/in_image/apply_series.py.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@([^\n]*)\n")
PATH = re.compile(rb"(?!.*(?:^|/)\.{0,2}(?:/|$))[A-Za-z0-9_.+/-]+")
GIT_LINES = (b"diff --git ", b"index ", b"new file mode 100644\n")
NO_NEWLINE = b"\\ No newline at end of file\n"
CONTEXT = 3


class Malformed(Exception):
    """A patch that can't be read: `line` of the patch, from 1, and what is wrong with it."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


@dataclass(frozen=True)
class Hunk:
    """A hunk: `start` is the index in the old file (from 0) where it begins; lines are (b" ", b"-" or b"+"; text)."""

    start: int
    lines: tuple[tuple[bytes, bytes], ...]
    title: bytes = b""

    @property
    def old(self) -> list[bytes]:
        return [text for mark, text in self.lines if mark != b"+"]

    @property
    def new(self) -> list[bytes]:
        return [text for mark, text in self.lines if mark != b"-"]


@dataclass(frozen=True)
class Change:
    """What a patch does to one file; `new` if it makes it."""

    path: str
    new: bool
    hunks: tuple[Hunk, ...]

    def count(self, mark: bytes) -> int:
        """How many lines it adds (b"+") or removes (b"-")."""
        return sum(m == mark for hunk in self.hunks for m, _ in hunk.lines)


@dataclass(frozen=True)
class Patch:
    """A patch: the text before its first diff, and its changes in order."""

    header: bytes
    changes: tuple[Change, ...]


def split(data: bytes) -> list[bytes]:
    """Lines with their ends."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)


def header_end(lines: Sequence[bytes]) -> int:
    """The index of the line where the first diff begins; the number of lines if there is none."""
    for i, line in enumerate(lines):
        begins = line.startswith(b"--- ") and i + 1 < len(lines) and lines[i + 1].startswith(b"+++ ")
        if begins or line.startswith(b"diff --git "):
            return i
    return len(lines)


def _hunk(lines: list[bytes], at: int) -> tuple[Hunk, int]:
    match = HUNK.match(lines[at])
    if not match:
        raise Malformed(at + 1, "a line that begins with @@ and is no hunk header")
    old, new = (int(count) if count is not None else 1 for count in match.group(2, 4))
    start = int(match[1]) - (old > 0)
    body: list[tuple[bytes, bytes]] = []
    first = at
    at += 1
    while old or new or lines[at : at + 1] == [NO_NEWLINE]:
        line = lines[at] if at < len(lines) else b""
        if line == NO_NEWLINE and body:
            body[-1] = (body[-1][0], body[-1][1].removesuffix(b"\n"))
        elif line[:1] in (b" ", b"-", b"+") and line.endswith(b"\n"):
            old, new = old - (line[:1] != b"+"), new - (line[:1] != b"-")
            body.append((line[:1], line[1:]))
        else:
            raise Malformed(at + 1, f"the hunk of line {first + 1} ends before its @@ counts are used up")
        if min(old, new) < 0:
            raise Malformed(at + 1, f"the hunk of line {first + 1} has more lines than its @@ counts")
        at += 1
    return Hunk(start, tuple(body), match[5]), at


def _path(line: bytes, prefix: bytes, number: int) -> str:
    path = line[4:].removesuffix(b"\n").split(b"\t")[0]
    if not path.startswith(prefix) or not PATH.fullmatch(path[len(prefix) :]):
        raise Malformed(number, f"path {path.decode(errors='replace')!r} isn't {prefix.decode()}PATH in site-packages")
    return path[len(prefix) :].decode()


def parse(data: bytes) -> Patch:
    """Read a patch. Raises Malformed, also for what a series can't do: delete, rename, binary files."""
    lines = split(data)
    at = end = header_end(lines)
    changes: list[Change] = []
    while at < len(lines):
        line = lines[at]
        if line.startswith(GIT_LINES):
            at += 1
        elif line.startswith(b"--- ") and header_end(lines[at : at + 2]) == 0:
            if lines[at + 1].startswith(b"+++ /dev/null"):
                raise Malformed(at + 1, "deletes a file, which a series can't do")
            path, new = _path(lines[at + 1], b"b/", at + 2), line.startswith(b"--- /dev/null")
            if not new and _path(line, b"a/", at + 1) != path:
                raise Malformed(at + 1, "renames a file, which a series can't do")
            if path in [change.path for change in changes]:
                raise Malformed(at + 1, f"has {path} twice: put its hunks together")
            number, hunks = at + 1, []
            at += 2
            while at < len(lines) and lines[at].startswith(b"@@"):
                hunk, at = _hunk(lines, at)
                hunks.append(hunk)
            if not hunks:
                raise Malformed(number, f"no hunk for {path}")
            changes.append(Change(path, new, tuple(hunks)))
        else:
            shown = line.decode(errors="replace").rstrip()[:60]
            raise Malformed(at + 1, f"{shown!r} is no part of a text diff (or the @@ counts before it are wrong)")
    if not changes:
        raise Malformed(len(lines) or 1, "holds no diff")
    return Patch(b"".join(lines[:end]), tuple(changes))


def places(lines: Sequence[bytes], wanted: Sequence[bytes]) -> list[int]:
    """Every index where `wanted` stands in `lines`, all lines equal; none for an empty `wanted`."""
    if not wanted:
        return []
    n = len(wanted)
    return [i for i, line in enumerate(lines) if line == wanted[0] and list(lines[i : i + n]) == list(wanted)]


def splice(lines: Sequence[bytes], hunks: Sequence[Hunk]) -> list[bytes]:
    """The lines after hunks that fit at their `start`; they must be in order and apart."""
    out: list[bytes] = []
    at = 0
    for hunk in hunks:
        assert at <= hunk.start and list(lines[hunk.start : hunk.start + len(hunk.old)]) == hunk.old
        out += [*lines[at : hunk.start], *hunk.new]
        at = hunk.start + len(hunk.old)
    return out + list(lines[at:])


def render(change: Change) -> bytes:
    """The text of a change, its hunks at their `start`."""
    path = change.path.encode()
    out = [b"--- /dev/null\n" if change.new else b"--- a/%b\n" % path, b"+++ b/%b\n" % path]
    delta = 0
    for hunk in change.hunks:
        old, new = len(hunk.old), len(hunk.new)
        ranges = (hunk.start + (old > 0), old, hunk.start + delta + (new > 0), new)
        out.append(b"@@ -%d,%d +%d,%d @@%b\n" % (*ranges, hunk.title))
        for mark, text in hunk.lines:
            out.append(mark + text if text.endswith(b"\n") else mark + text + b"\n" + NO_NEWLINE)
        delta += new - old
    return b"".join(out)


def moved(change: Change, starts: Sequence[int]) -> Change:
    """The change with its hunks at other places."""
    return replace(change, hunks=tuple(replace(h, start=s) for h, s in zip(change.hunks, starts, strict=True)))


def compare(path: str, old: bytes | None, new: bytes) -> Change | None:
    """The change that turns `old` (None: no such file) into `new`; None if they are equal."""
    before, after = split(old or b""), split(new)
    hunks = []
    for group in difflib.SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(CONTEXT):
        lines: list[tuple[bytes, bytes]] = []
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += [(b" ", text) for text in before[i1:i2]]
            else:
                lines += [(b"-", text) for text in before[i1:i2]] + [(b"+", text) for text in after[j1:j2]]
        hunks.append(Hunk(group[0][1], tuple(lines)))
    return Change(path, old is None, tuple(hunks)) if hunks else None
