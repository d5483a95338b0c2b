"""A patch series as files: read, and refused where it is incomplete or contradicts itself. Applies nothing.

A folder holds `series` (one patch a line), the patches, and `tree` (PATH SHA256_BEFORE SHA256_AFTER; `-` is the hash
before of a new file). A patch is a DEP-3 header and unified text diffs.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
PATH = re.compile(r"(?!.*(?:^|/)\.{0,2}(?:/|$))[A-Za-z0-9_.+/-]+")
GIT_LINES = (b"diff --git ", b"index ", b"new file mode 100644\n")
NO_NEWLINE = b"\\ No newline at end of file"
REMAKE = "make the patch again (patches/README.md)"
REFRESH = "run `nox -s new-series -- ENGINE VERSION --refresh`"


class Refused(Exception):
    """The series can't be applied. The message is one line: where, what is wrong, and the cure."""


@dataclass(frozen=True)
class Hunk:
    """A hunk: lines are (line number in the patch, b" " or b"-" or b"+", bytes with their line end)."""

    number: int
    old_start: int
    new_start: int
    lines: tuple[tuple[int, bytes, bytes], ...]


@dataclass(frozen=True)
class Change:
    """What a patch does to one file; `new` if it makes the file."""

    path: str
    new: bool
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    """A patch file: its name, the hash of its bytes, the first line of its Description, its changes."""

    name: str
    sha256: str
    description: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Series:
    """A series folder: patches in order, and path -> (hash before or "-", hash after)."""

    sha256: str
    why: str
    patches: tuple[Patch, ...]
    tree: dict[str, tuple[str, str]]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def split(data: bytes) -> list[bytes]:
    """Lines with their ends; only a line feed ends a line, so a carriage return is content."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)


def show(line: bytes | None) -> str:
    return "the end of the file" if line is None else repr(line.decode(errors="replace"))[:120]


def parse_hunk(lines: list[bytes], at: int, name: str) -> tuple[Hunk, int]:
    """The hunk whose @@ is lines[at], and the index after it. Raises Refused."""
    match = HUNK.match(lines[at])
    assert match
    old_left, new_left = (int(count) if count is not None else 1 for count in match.group(2, 4))
    number = at + 1
    body: list[tuple[int, bytes, bytes]] = []
    at += 1
    while old_left or new_left or (at < len(lines) and lines[at].startswith(NO_NEWLINE)):
        line = lines[at] if at < len(lines) else b""
        mark, text = line[:1], line[1:]
        if line.startswith(NO_NEWLINE) and body and body[-1][2].endswith(b"\n"):
            body[-1] = (body[-1][0], body[-1][1], body[-1][2][:-1])
        elif mark in (b" ", b"-", b"+") and text.endswith(b"\n"):
            old_left, new_left = old_left - (mark != b"+"), new_left - (mark != b"-")
            body.append((at + 1, mark, text))
        else:
            raise Refused(
                f"{name}:{at + 1}: the hunk of line {number} breaks off at {show(line or None)}: it was "
                f"edited by hand (a blank context line begins with a space, @@ counts lines); {REMAKE}"
            )
        if old_left < 0 or new_left < 0:
            raise Refused(f"{name}:{at + 1}: the hunk of line {number} has more lines than its @@ counts: {REMAKE}")
        at += 1
    if all(mark == b" " for _, mark, _ in body):
        raise Refused(f"{name}:{number}: the hunk changes nothing: {REMAKE}")
    return Hunk(number, int(match[1]), int(match[3]), tuple(body)), at


def parse_path(line: bytes, prefix: str, where: str) -> str:
    """The path in a `--- a/PATH` or `+++ b/PATH` line; a time after a tab is dropped. Raises Refused."""
    path = line[4:].decode(errors="replace").removesuffix("\n").split("\t")[0]
    if not path.startswith(prefix) or not PATH.fullmatch(path[len(prefix) :]):
        raise Refused(f"{where}: path {path!r}: write {prefix}PATH with PATH inside site-packages")
    return path[len(prefix) :]


def parse_patch(name: str, data: bytes) -> Patch:
    """Read a patch: a DEP-3 header, then unified diffs. Raises Refused with the line."""
    lines = split(data)
    begins = [a[:4] == b"--- " and b[:4] == b"+++ " for a, b in zip(lines, [*lines[1:], b""], strict=False)]
    at = next((i for i, line in enumerate(lines) if begins[i] or line.startswith(b"diff --git ")), len(lines))
    header = b"".join(lines[:at]).decode(errors="replace")
    description = re.search(r"^Description:[ \t]*(\S.*?)\s*$", header, re.MULTILINE)
    if not description:
        raise Refused(f"{name}:1: no `Description:` in the header: say why the patch is there (patches/README.md)")
    changes: list[Change] = []
    while at < len(lines):
        line, where = lines[at], f"{name}:{at + 1}"
        if line.startswith(GIT_LINES):
            at += 1
        elif begins[at]:
            if lines[at + 1].startswith(b"+++ /dev/null"):
                raise Refused(f"{where}: deletes a file, which a series can't do: leave the file, or empty it")
            path = parse_path(lines[at + 1], "b/", f"{name}:{at + 2}")
            new = line.startswith(b"--- /dev/null")
            if not new and (old := parse_path(line, "a/", where)) != path:
                raise Refused(f"{where}: renames {old} to {path}, which a series can't do: write a new file")
            if any(change.path == path for change in changes):
                raise Refused(f"{where}: {path} comes twice in this patch: put its hunks together")
            at, hunks = at + 2, []
            while at < len(lines) and HUNK.match(lines[at]):
                hunk, at = parse_hunk(lines, at, name)
                hunks.append(hunk)
            if not hunks:
                raise Refused(f"{where}: no hunk for {path}: {REMAKE}")
            changes.append(Change(path, new, tuple(hunks)))
        else:
            raise Refused(
                f"{where}: {show(line)} is no part of a text diff (deletions, renames, modes and binary "
                "files aren't supported; a line after a hunk means that its @@ counts are wrong)"
            )
    if not changes:
        raise Refused(f"{name}: holds no diff: add one, or drop the patch from `series`")
    return Patch(name, sha256(data), description[1], tuple(changes))


def parse_tree(text: str) -> dict[str, tuple[str, str]]:
    """Read `tree`. Raises Refused with the line."""
    tree: dict[str, tuple[str, str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"(\S+) ([0-9a-f]{64}|-) ([0-9a-f]{64})", line)
        if not match or not PATH.fullmatch(match[1]):
            raise Refused(f"tree:{number}: {line[:80]!r} is not `PATH SHA256_BEFORE SHA256_AFTER`: {REFRESH}")
        if tree and match[1] <= max(tree):
            raise Refused(f"tree:{number}: {match[1]} is not in sorted order, or comes twice: {REFRESH}")
        tree[match[1]] = (match[2], match[3])
    return tree


def load(folder: Path) -> Series:
    """Read a series folder. Its hash is that of the output of `sha256sum series PATCH... tree`, in that order.

    Raises Refused where it is incomplete or contradicts itself.
    """
    data: dict[str, bytes] = {}

    def read(name: str, listed: str) -> bytes:
        try:
            data[name] = (folder / name).read_bytes()
        except OSError as error:
            raise Refused(f"{folder / name}: {error.strerror}: {listed}") from None
        return data[name]

    text = read("series", "a series folder holds `series`, its patches and `tree`").decode(errors="replace")
    lines = text.splitlines()
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    why = " ".join(line.lstrip("# ") for line in lines if line.startswith("#")).strip()
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_.+-]+\.patch", name) or names.count(name) > 1:
            raise Refused(f"series: {name!r} is no name of a .patch in this folder, or comes twice")
    if not names and not why:
        raise Refused("series: it is empty and doesn't say why: add a comment with the reason")
    patches = tuple(parse_patch(name, read(name, "`series` lists it; add the file or drop the line")) for name in names)
    tree = parse_tree(read("tree", REFRESH).decode(errors="replace"))
    touched = {change.path: patch.name for patch in patches for change in patch.changes}
    for path in sorted(touched.keys() - tree.keys()):
        raise Refused(f"{touched[path]}: touches {path}, which `tree` doesn't list: {REFRESH}")
    for path in sorted(tree.keys() - touched.keys()):
        raise Refused(f"tree: lists {path}, which no patch touches: {REFRESH}")
    listing = "".join(f"{sha256(content)}  {name}\n" for name, content in data.items())
    return Series(sha256(listing.encode()), why, patches, tree)


def record(series: Series) -> dict[str, object]:
    """What went in, by hash, for a receipt; `before` is null for a new file."""
    return {
        "series_sha256": series.sha256,
        "patches": [{"name": p.name, "sha256": p.sha256, "description": p.description} for p in series.patches],
        "files": [
            {"path": path, "before": None if before == "-" else before, "after": after}
            for path, (before, after) in series.tree.items()
        ],
    }
