"""Apply a patch series to installed sources: exactly, in order, all or nothing.

`python3 apply_series.py SERIES_DIR ROOT [--check] [--json]`, where ROOT is a site-packages folder.

SERIES_DIR holds `series` (one patch a line), the patches, and `tree` (PATH SHA256_BEFORE SHA256_AFTER; `-` is
the hash before of a new file). Every hunk must fit at its line number, with all its lines, and every touched
file must have its recorded hash before and after: there is no fuzz, no offset and no merge. All of that is
computed in memory before the first file is written. The RECORD of the installed package is written with its files, so
that whoever checks the one against the other finds the truth. Exit status: 0, or 1 with one line on standard error.
"""

import argparse
import json
import os
import py_compile
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path

sys.dont_write_bytecode = True  # the folder of this file is read-only in a build
sys.path.insert(0, str(Path(__file__).resolve().parent))

import wheel_record  # noqa: E402
from patch_series import REFRESH, REMAKE, Change, Refused, Series, load, record, sha256, show, split  # noqa: E402

UNCHECKED = (0b01).to_bytes(4, "little")  # PEP 552: bytecode by hash, never compared with its source


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
        results |= wheel_record.updated(root, results)
        if not args.check:
            write({root / path: data for path, data in results.items()})
    except (Refused, wheel_record.Untrue) as refused:
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
