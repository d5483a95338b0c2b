"""Apply a patch series to installed sources: exactly, in order, all or nothing.

`python3 apply_series.py SERIES_DIR ROOT [--check] [--json]`, where ROOT is a site-packages folder.

SERIES_DIR holds `series` (one patch a line), the patches, and `tree` (PATH SHA256_BEFORE SHA256_AFTER; `-` is
the hash before of a new file). Every hunk must fit at its line number, with all its lines, and every touched
file must have its recorded hash before and after: there is no fuzz, no offset and no merge. All of that is
computed in memory before the first file is written. Exit status: 0, or 1 with one line on standard error.
"""

import argparse
import hashlib
import json
import os
import py_compile
import re
import sys
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
PATH = re.compile(r"(?!.*(?:^|/)\.{0,2}(?:/|$))[A-Za-z0-9_.+/-]+")
GIT_LINES = (b"diff --git ", b"index ", b"new file mode 100644\n")
NO_NEWLINE = b"\\ No newline at end of file"
REMAKE = "make the patch again (patches/README.md)"
REFRESH = "run `nox -s new-series -- ENGINE VERSION --refresh`"
UNCHECKED = (0b01).to_bytes(4, "little")  # PEP 552: bytecode by hash, never compared with its source


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


def change_lines(old: list[bytes], change: Change, name: str) -> list[bytes]:
    """The lines of a file after a change. Raises Refused at the first line that isn't as the patch says."""
    out: list[bytes] = []
    at = 0
    for hunk in change.hunks:
        has_old = any(mark != b"+" for _, mark, _ in hunk.lines)
        has_new = any(mark != b"-" for _, mark, _ in hunk.lines)
        start = hunk.old_start - has_old
        if not at <= start <= len(old):
            raise Refused(
                f"{name}:{hunk.number}: the hunk for {change.path} begins at line {hunk.old_start}, in the "
                f"hunk before it or past the end ({len(old)} lines): {REMAKE}"
            )
        out += old[at:start]
        if len(out) + has_new != hunk.new_start:
            raise Refused(
                f"{name}:{hunk.number}: the hunk for {change.path} says +{hunk.new_start}, and lands at "
                f"+{len(out) + has_new}: its @@ was edited by hand; {REMAKE}"
            )
        at = start
        for number, mark, text in hunk.lines:
            if mark != b"+":
                found = old[at] if at < len(old) else None
                if found != text:
                    raise Refused(
                        f"{name}:{number}: expects {show(text)} at {change.path}:{at + 1} and finds "
                        f"{show(found)}: the patch was made for other sources; {REMAKE}"
                    )
                at += 1
            if mark != b"-":
                out.append(text)
    out += old[at:]
    if any(not line.endswith(b"\n") for line in out[:-1]):
        raise Refused(f"{name}: `No newline at end of file` stands before the end of {change.path}: {REMAKE}")
    return out


def compute(series: Series, root: Path) -> dict[str, bytes]:
    """The content of every touched file after the series; reads `root`, writes nothing.

    Raises Refused where a file before or after isn't the recorded one, a hunk doesn't fit exactly, or the
    Python of a result doesn't compile.
    """
    before: dict[str, bytes | None] = {}
    for path in series.tree:
        try:
            before[path] = (root / path).read_bytes()
        except FileNotFoundError:
            before[path] = None
        except OSError as error:
            raise Refused(f"{root / path}: {error.strerror}") from None
    hashes = {path: "-" if data is None else sha256(data) for path, data in before.items()}
    applied = [path for path, (_, after) in series.tree.items() if hashes[path] == after]
    if series.tree and len(applied) == len(series.tree):
        raise Refused(f"already applied: every file of the series has its hash after it in {root}; nothing to do")
    for path, (expected, _) in series.tree.items():
        if hashes[path] != expected:
            have = {"-": "is missing"}.get(hashes[path], f"has sha256 {hashes[path][:12]}")
            want = {"-": "there to be none"}.get(expected, expected[:12])
            hint = (
                "it is patched already while other files aren't: install the engine again"
                if path in applied
                else "these are other sources: install the pinned release, or move the series with `nox -s new-series`"
            )
            raise Refused(f"{root / path}: {have}, and `tree` wants {want} before the series: {hint}")
    now = dict(before)
    for patch in series.patches:
        for change in patch.changes:
            content = now[change.path]
            if change.new != (content is None):
                raise Refused(
                    f"{patch.name}: {change.path} {'is there already' if change.new else 'is missing'}: "
                    f"the patch was made for other sources; {REMAKE}"
                )
            now[change.path] = b"".join(change_lines(split(content or b""), change, patch.name))
    results = {path: data for path, data in now.items() if data is not None}
    for path, data in results.items():
        expected = series.tree[path][1]
        if sha256(data) != expected:
            raise Refused(
                f"{path}: has sha256 {sha256(data)[:12]} after the series, and `tree` says {expected[:12]}: "
                f"if a patch was edited on purpose, {REFRESH}"
            )
        if path.endswith(".py"):
            try:
                with warnings.catch_warnings(action="ignore"):
                    compile(data, path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                where = f"{path}:{getattr(error, 'lineno', None) or 1}"
                what = f"the patched Python doesn't compile ({error.args[0]}): correct the patch"
                raise Refused(f"{where}: {what}") from None
    return results


def bytecode(source: Path) -> Path:
    """Where this Python keeps the bytecode of a source; refuses bytecode that would hide the patch from another."""
    own = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
    for other in own.parent.glob(f"{source.stem}.*.pyc"):
        if other != own and other.is_file() and other.read_bytes()[4:8] == UNCHECKED:
            raise Refused(
                f"{other}: is never compared with its source and would hide the patch: delete it, or run "
                "this with the Python that it is for"
            )
    return own


def write(files: dict[Path, bytes]) -> None:
    """Replace all files or none, with the bytecode of the Python ones; each gets a new inode and keeps its mode.

    The bytecode goes first: it is checked against its source, so no moment serves old code for a new source.
    """
    with ExitStack() as made, ExitStack() as scratch, ExitStack() as undo:  # on a failure: undo, scratch, made

        def beside(target: Path, suffix: str) -> Path:
            for folder in reversed(target.parents):
                if not folder.exists():
                    folder.mkdir()
                    made.callback(folder.rmdir)
            path = target.with_name(f".{target.name}.{suffix}")
            path.unlink(missing_ok=True)
            scratch.callback(path.unlink, missing_ok=True)
            return path

        sources: list[tuple[Path, Path]] = []
        compiled: list[tuple[Path, Path]] = []
        for target, data in files.items():
            staged = beside(target, "new")
            staged.write_bytes(data)
            staged.chmod(target.stat().st_mode & 0o7777 if target.exists() else 0o644)
            sources.append((staged, target))
            if target.suffix == ".py":
                cache = bytecode(target)
                staged_cache = beside(cache, "new")
                with warnings.catch_warnings(action="ignore"):
                    py_compile.compile(
                        str(staged),
                        cfile=str(staged_cache),
                        dfile=str(target),
                        doraise=True,
                        invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
                    )
                compiled.append((staged_cache, cache))
        for staged, target in compiled + sources:
            if target.is_symlink() or target.exists():
                backup = beside(target, "before")
                os.link(target, backup, follow_symlinks=False)
                undo.callback(os.replace, backup, target)
            else:
                undo.callback(target.unlink, missing_ok=True)
            os.replace(staged, target)
        undo.pop_all()
        made.pop_all()


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


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("series", type=Path, help="folder with series, tree and the patches")
    parser.add_argument("root", type=Path, help="site-packages folder that holds the engine")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of text")
    args = parser.parse_args(argv)
    try:
        series = load(args.series)
        if not args.root.is_dir():
            raise Refused(f"{args.root}: is no folder: name the site-packages folder that holds the engine")
        root = args.root.resolve()
        results = compute(series, root)
        if not args.check:
            write({root / path: data for path, data in results.items()})
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}: no file is changed; cure it and try again", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(record(series), indent=2))
        return 0
    for patch in series.patches:
        hunks = sum(len(change.hunks) for change in patch.changes)
        print(f"{patch.name}: {hunks} hunks in {len(patch.changes)} files: {patch.description}")
    print(
        f"{'fits' if args.check else 'applied'}: {len(series.patches)} patches, {len(series.tree)} files, "
        f"series sha256 {series.sha256}" + ("" if series.patches else f" (empty: {series.why})")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
