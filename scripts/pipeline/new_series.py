"""Move a patch series to another release, or finish one after its patches were edited.

`vllm 0.33.0 --from 0.32.0` tries each patch on the pristine sources of 0.33.0 and writes patches/vllm/0.33.0;
`vllm 0.32.0 --refresh` writes `tree` (and line numbers that moved) after patches were edited by hand;
`vllm 0.32.0 --add NAME.patch --edited DIR` makes a patch of the files in DIR and adds it to the series.
"""

import argparse
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from scripts.pipeline import check_patches, diffs, pins, say, series, wheels
from scripts.pipeline.say import Stop

TREE = "# Written by `nox -s new-series`: PATH SHA256_BEFORE SHA256_AFTER. A new file has no hash before: -\n"
HEADER = """\
Description: TODO what it does, in one line
 TODO why it is needed.
Origin: other, written for this repository
Bug: TODO the upstream issue, or none
Forwarded: TODO no, not-needed or the pull request
Applied-Upstream: no
Last-Update: {today}
---
"""


@dataclass(frozen=True)
class Verdict:
    """What became of a patch: `exact`, `moved`, `upstream` or `conflict`; its new bytes; why, an entry a hunk."""

    name: str
    kind: str
    data: bytes
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Moved:
    """A series on other sources: verdicts in order, and the content before and after of each file touched."""

    verdicts: tuple[Verdict, ...]
    before: dict[str, bytes | None]
    after: dict[str, bytes]


def inside(inner: list[bytes], outer: list[bytes]) -> bool:
    return bool(diffs.places(outer, inner))


def place(hunk: diffs.Hunk, lines: list[bytes], shift: int) -> tuple[str, int, str]:
    """Where a hunk goes: its kind, the index of its place, and a reason.

    `shift` is how many lines the hunks before it have moved: the place where it's expected. All its lines must
    be there unchanged, at the expected place or in exactly one other.
    """
    forward, reverse = diffs.places(lines, hunk.old), diffs.places(lines, hunk.new)
    if inside(hunk.old, hunk.new):
        forward = [f for f in forward if not any(r <= f < r + len(hunk.new) for r in reverse)]
    elif inside(hunk.new, hunk.old):
        reverse = [r for r in reverse if not any(f <= r < f + len(hunk.old) for f in forward)]
    if forward and reverse:
        return "conflict", 0, f"its lines are there before (line {forward[0] + 1}) and after it (line {reverse[0] + 1})"
    if reverse:
        return "upstream", reverse[0], f"line {reverse[0] + 1} has it already"
    if hunk.start in forward:
        return "exact", hunk.start, ""
    if len(forward) == 1:
        return "moved", forward[0], f"from line {hunk.start + 1} to {forward[0] + 1}"
    if not hunk.old:
        return "conflict", 0, "it has no context, so its place is unknown: make the patch with three lines of it"
    if forward:
        return "conflict", 0, f"fits at several lines: {', '.join(str(f + 1) for f in forward)}"
    return "conflict", 0, f"its lines aren't there (expected at line {hunk.start + shift + 1} of {len(lines)})"


def shown(hunk: diffs.Hunk) -> str:
    lines = (mark + text.rstrip(b"\r\n") for mark, text in hunk.lines)
    return "".join(f"\n    | {line.decode(errors='replace')}" for line in lines)


def try_change(change: diffs.Change, content: bytes | None) -> tuple[set[str], diffs.Change, bytes | None, list[str]]:
    """Place all hunks of a change: the kinds found, the change at its new place, the content after it, reasons.

    `content` is the file now, None if there is none.
    """
    if change.new:
        made = b"".join(diffs.splice([], change.hunks))
        if content is None:
            return {"exact"}, change, made, []
        if content == made:
            return {"upstream"}, change, content, [f"{change.path}: is there already, with the same content"]
        return {"conflict"}, change, content, [f"{change.path}: is there already, with other content"]
    if content is None:
        return {"conflict"}, change, content, [f"{change.path}: is no longer there"]
    lines = diffs.split(content)
    kinds: set[str] = set()
    reasons: list[str] = []
    starts: list[tuple[int, int]] = []
    shift = 0
    for hunk in change.hunks:
        kind, start, reason = place(hunk, lines, shift)
        if kind in ("exact", "moved") and starts and start < starts[-1][0] + starts[-1][1]:
            kind, reason = "conflict", f"fits only at line {start + 1}, before the hunk that precedes it"
        if kind in ("exact", "moved"):
            shift = start - hunk.start
            starts.append((start, len(hunk.old)))
        kinds.add(kind)
        if kind != "exact":
            number = (start if kind in ("moved", "upstream") else hunk.start + shift) + 1
            reasons.append(f"{change.path}:{number}: {kind}: {reason}" + (shown(hunk) if kind == "conflict" else ""))
    if kinds <= {"exact", "moved"}:
        there = diffs.moved(change, [start for start, _ in starts])
        return kinds, there, b"".join(diffs.splice(lines, there.hunks)), reasons
    return kinds, change, content, reasons


def move(patches: Mapping[str, bytes], read: Callable[[str], bytes | None], version: str) -> Moved:
    """Try patches in order on the sources that `read` gives; later ones see what fits, not what is left out.

    Raises Stop where a patch can't be read.
    """
    verdicts: list[Verdict] = []
    before: dict[str, bytes | None] = {}
    now: dict[str, bytes | None] = {}
    for name, data in patches.items():
        try:
            patch = diffs.parse(data)
        except diffs.Malformed as error:
            raise Stop(f"{name}:{error.line}: {error}: correct the patch first") from None
        for change in patch.changes:
            if change.path not in before:
                before[change.path] = now[change.path] = read(change.path)
        tried = [try_change(change, now[change.path]) for change in patch.changes]
        kinds: set[str] = set().union(*(kinds for kinds, *_ in tried))
        reasons = [reason for *_, found in tried for reason in found]
        stale = [error for error in series.lint_header(data, version) if error.startswith("stale")]
        fits = kinds <= {"exact", "moved"}
        if kinds == {"upstream"} or (stale and not fits):
            said = series.header(data).get("Applied-Upstream")
            why = (f"its header says so (Applied-Upstream: {said})",) if stale else tuple(reasons)
            verdicts.append(Verdict(name, "upstream", data, why))
        elif stale:
            why = (*stale, "and yet it fits: upstream's sources don't have it; correct Applied-Upstream, or delete it")
            verdicts.append(Verdict(name, "conflict", data, why))
        elif not fits:
            part = ["only a part of it is upstream"] if "upstream" in kinds else []
            verdicts.append(Verdict(name, "conflict", data, (*part, *reasons)))
        else:
            now |= {change.path: content for _, change, content, _ in tried}
            text = b"".join([patch.header, *(diffs.render(change) for _, change, _, _ in tried)])
            kind = "exact" if kinds == {"exact"} and numbers(data) == numbers(text) else "moved"
            verdicts.append(Verdict(name, kind, data if kind == "exact" else text, tuple(reasons)))
    after = {path: content for path, content in now.items() if content is not None and content != before[path]}
    return Moved(tuple(verdicts), {path: before[path] for path in after}, after)


def numbers(data: bytes) -> list[tuple[int, ...]]:
    """The line numbers and counts in the @@ lines of a patch."""
    lines = re.findall(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", data, re.MULTILINE)
    return [tuple(int(number or 1) for number in line) for line in lines]


def tree(before: Mapping[str, bytes | None], after: Mapping[str, bytes]) -> bytes:
    """The text of `tree`."""

    def digest(data: bytes | None) -> str:
        return "-" if data is None else hashlib.sha256(data).hexdigest()

    return (TREE + "".join(f"{path} {digest(before[path])} {digest(after[path])}\n" for path in sorted(after))).encode()


def new_folder(moved: Moved, engine: str, old: str, new: str) -> dict[str, bytes]:
    """The files of the new series: what applies is listed; a conflict is beside it as .rej, listed in a comment."""
    lines = [f"# {engine} {new}, moved from {old}. One patch a line, in order."]
    files: dict[str, bytes] = {}
    for verdict in moved.verdicts:
        if verdict.kind in ("exact", "moved"):
            lines.append(verdict.name)
            files[verdict.name] = verdict.data
        elif verdict.kind == "upstream":
            lines.append(f"# {verdict.name}: left out, {new} has it already")
        else:
            lines.append(f"# {verdict.name}: CONFLICT, see {verdict.name}.rej: decide, then delete it and this line")
            files[f"{verdict.name}.rej"] = "\n".join([*verdict.reasons, "", ""]).encode() + verdict.data
    files["series"] = "\n".join([*lines, ""]).encode()
    files["tree"] = tree(moved.before, moved.after)
    return files


def write_folder(folder: Path, files: Mapping[str, bytes], wheel: wheels.Wheel) -> None:
    """Write a series folder whole or not at all, after apply_series.py has accepted it on the wheel. Raises Stop."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as tmp:
        staged = Path(tmp, "new")
        staged.mkdir()
        for name, data in files.items():
            (staged / name).write_bytes(data)
        check_patches.judge(staged, series.touched(files), wheel)
        if folder.exists():
            os.rename(folder, Path(tmp, "old"))
        try:
            os.rename(staged, folder)
        except BaseException:
            if Path(tmp, "old").exists():
                os.rename(Path(tmp, "old"), folder)
            raise


def report(moved: Moved) -> None:
    """Say what became of each patch."""
    text = {"exact": "applies exactly", "moved": "applies moved", "upstream": "is upstream already"}
    for verdict in moved.verdicts:
        say.note(f"{verdict.name}: {text.get(verdict.kind, 'CONFLICT')}")
        for reason in verdict.reasons:
            print("        " + reason.rstrip().replace("\n", "\n        "))


def listed(files: Mapping[str, bytes], folder: Path) -> dict[str, bytes]:
    """The listed patches in order. Raises Stop where one isn't there."""
    names = series.entries(files.get("series", b""))
    for name in names:
        if name not in files:
            raise Stop(f"{folder}/series: lists {name}, which isn't there: add the file or drop the line")
    return {name: files[name] for name in names}


def port(release: pins.Release, old: str, all_pins: pins.Pins) -> None:
    """Move the series of `old` to a release. Raises Stop where its folder is there already."""
    source = release.series.with_name(old)
    files = series.load(source)
    if release.series.exists():
        raise Stop(f"{release.series}: is there already: delete it first, or finish it with --refresh")
    patches = listed(files, source)
    wheel = wheels.pristine(release, all_pins)
    say.step(f"{release.engine} {old} -> {release.version}: {len(patches)} patches on wheel {wheel.sha256[:12]}")
    moved = move(patches, wheel.read, release.version)
    report(moved)
    empty = files | {"tree": tree({}, {})}
    new = new_folder(moved, release.engine, old, release.version) if patches else empty
    write_folder(release.series, new, wheel)
    conflicts = sum(verdict.kind == "conflict" for verdict in moved.verdicts)
    rest = f"; {conflicts} conflicts to decide: check-patches fails until then" if conflicts else ""
    say.step(f"wrote {release.series}{rest}")


def refresh(release: pins.Release, all_pins: pins.Pins, extra: Mapping[str, bytes] | None = None) -> None:
    """Write `tree` anew, and line numbers that moved; with `extra`, replace or add these files. Raises Stop."""
    files = series.load(release.series) | dict(extra or {})
    wheel = wheels.pristine(release, all_pins)
    moved = move(listed(files, release.series), wheel.read, release.version)
    report(moved)
    bad = [verdict.name for verdict in moved.verdicts if verdict.kind not in ("exact", "moved")]
    if bad:
        raise Stop(f"{release.series}: {', '.join(bad)} doesn't fit, see above: correct the patch; nothing is written")
    files |= {verdict.name: verdict.data for verdict in moved.verdicts}
    write_folder(release.series, files | {"tree": tree(moved.before, moved.after)}, wheel)
    say.step(f"wrote {release.series}: {len(moved.verdicts)} patches, {len(moved.after)} files")


def add(release: pins.Release, name: str, edited: Path, all_pins: pins.Pins) -> None:
    """Make a patch of the files in `edited` (paths as in site-packages) and add it at the end of the series.

    Raises Stop where the name is taken or nothing differs.
    """
    files = series.load(release.series)
    if name in files or not series.ENTRY.fullmatch(name):
        raise Stop(f"--add {name}: is there already, or is no name like 0003-what-it-does.patch: choose another")
    wheel = wheels.pristine(release, all_pins)
    now = move(listed(files, release.series), wheel.read, release.version)
    if any(verdict.kind not in ("exact", "moved") for verdict in now.verdicts):
        raise Stop(f"{release.series}: its patches don't fit: run --refresh first, it says which")
    changes = []
    for path in sorted(p for p in edited.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        inner = str(path.relative_to(edited))
        change = diffs.compare(inner, now.after.get(inner, wheel.read(inner)), path.read_bytes())
        changes += [change] if change else []
    if not changes:
        raise Stop(f"{edited}: nothing in it differs from {release.name} with its series: use paths of site-packages")
    text = HEADER.format(today=date.today().isoformat()).encode() + b"".join(diffs.render(c) for c in changes)
    listing = files["series"].rstrip(b"\n") + b"\n" + name.encode() + b"\n"
    refresh(release, all_pins, {name: text, "series": listing})
    say.note(f"now replace the TODOs in the header of {release.series / name}")


def job(argv: list[str]) -> None:
    """Move, refresh or extend a series."""
    parser = argparse.ArgumentParser(
        prog="nox -s new-series --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument("version", help="the release that the series is for; pins.toml and its lock come first")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--from", dest="old", metavar="VERSION", help="the release whose series is moved")
    what.add_argument("--refresh", action="store_true", help="write `tree` anew after patches were edited")
    what.add_argument("--add", metavar="NAME.patch", help="make a patch of the files in --edited DIR")
    parser.add_argument("--edited", type=Path, metavar="DIR", help="holds edited files, e.g. DIR/vllm/config/x.py")
    args = parser.parse_args(argv)
    if bool(args.add) != bool(args.edited):
        parser.error("--add and --edited go together")
    all_pins = pins.load()
    try:
        release = all_pins.release(args.engine, args.version)
    except Stop as stop:
        raise Stop(f"{stop}: its entry and `nox -s lock` come first: the hash of its wheel is in the lock") from None
    if args.old:
        port(release, args.old, all_pins)
    elif args.add:
        add(release, args.add, args.edited, all_pins)
    else:
        refresh(release, all_pins)


if __name__ == "__main__":
    say.main(job)
