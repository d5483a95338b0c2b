"""The contract: what an engine must satisfy so that Kimi-K2.5 runs with an EAGLE-3 drafter.

    python3 contract.py [--json] [--list] [--only NAME,...] [--drafter DIR] [--release FILE] [--series DIR] [--verbose]

Runs inside an image, as any user, without a GPU or a network, and leaves nothing behind. Prints a table (or JSON with
--json): the name of each check, whether it holds, and one line on what was seen. Exit 0 when all hold, 1 otherwise.
The output holds no time and no path of this run, so the JSON of one image is the same bytes each time.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

sys.dont_write_bytecode = True  # the folder of this file is read-only in an image

from contract_check import FIRST, LAST, Check, Context, Unmet  # noqa: E402

HOME = Path("/opt/kimi-eagle3")
ADAPTERS = {"sglang": "contract_sglang", "vllm": "contract_vllm"}


@dataclass(frozen=True)
class Result:
    """What one check found. `cure` is empty where the check holds."""

    name: str
    ok: bool
    detail: str
    cure: str


def load_release(path: Path) -> dict[str, Any]:
    """Read release.json. Raises Unmet with the file and what it lacks."""
    try:
        release = json.loads(path.read_text())
        missing = [key for key in ("engine", "version") if not isinstance(release.get(key), str)]
    except (OSError, ValueError, AttributeError) as error:
        raise Unmet(f"{path}: {error}; give the release with --release FILE") from None
    if missing:
        raise Unmet(f"{path} lacks {', '.join(missing)}; build the image again")
    if release["engine"] not in ADAPTERS:
        raise Unmet(f"{path}: no contract is written for engine {release['engine']!r}, only for {', '.join(ADAPTERS)}")
    return dict(release)


def one_line(text: str, work: Path) -> str:
    """`text` on one line of at most 300 characters, without what differs from run to run."""
    text = re.sub(r"\s+", " ", text.replace(str(work), "<work>")).strip()
    text = re.sub(r"0x[0-9a-f]{6,}", "0x...", text)
    text = re.sub(r" \[type=\w+, input_value=.*", "", text)  # what pydantic adds to a message
    return text if len(text) <= 300 else text[:297] + "..."


def run_check(check: Check, context: Context) -> Result:
    """Run one check; whatever it raises becomes a false result of its own."""
    try:
        return Result(check.name, True, one_line(check.run(context), context.work), "")
    except Unmet as unmet:
        problem = str(unmet)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}"
    return Result(check.name, False, one_line(problem, context.work), check.cure)


@contextmanager
def quiet(noise: IO[Any]) -> Iterator[IO[str]]:
    """Send all that this process and its libraries print to `noise`; yield the real standard output."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    os.dup2(noise.fileno(), 1)
    os.dup2(noise.fileno(), 2)
    with os.fdopen(os.dup(saved[0]), "w") as out:
        try:
            yield out
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, copy in enumerate(saved, start=1):
                os.dup2(copy, fd)
                os.close(copy)


def run_all(checks: Sequence[Check], context: Context, verbose: bool, progress: IO[str] | None) -> list[Result]:
    """Run the checks in order, with the noise of the engine hidden (or on standard error, with `verbose`)."""
    results = []
    with tempfile.TemporaryFile() as hidden, quiet(sys.stderr if verbose else hidden):
        terminal = progress is not None and progress.isatty()
        start, end = ("\r\033[K", "") if terminal else ("", "\n")
        for number, check in enumerate(checks, start=1):
            if progress:
                print(f"{start}[{number}/{len(checks)}] {check.name} ...", end=end, file=progress, flush=True)
            results.append(run_check(check, context))
        if terminal:
            print(start, end="", file=progress, flush=True)
    return results


def table(results: Sequence[Result]) -> str:
    """The results for people: one line each, and a line with the cure under each that is false."""
    width = max(len(result.name) for result in results)
    lines = []
    for result in results:
        lines.append(f"{result.name:<{width}}  {'true ' if result.ok else 'FALSE'}  {result.detail}")
        if not result.ok:
            lines.append(f"{'':<{width}}         cure: {result.cure}")
    return "\n".join(lines)


def report(release: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """The results for programs: {engine, version, checks: [{name, ok, detail, cure}], ok}."""
    return {
        "engine": release["engine"],
        "version": release["version"],
        "checks": [asdict(result) for result in results],
        "ok": bool(results) and all(result.ok for result in results),
    }


def choose(checks: Sequence[Check], only: str | None) -> list[Check]:
    """The checks named in `only` (comma-separated), or all. Raises Unmet for an unknown name, or none at all."""
    wanted = [check.name for check in checks] if only is None else [name for name in only.split(",") if name]
    unknown = sorted(set(wanted) - {check.name for check in checks})
    if unknown:
        raise Unmet(f"no check is named {', '.join(unknown)}; contract.py --list names them")
    if not wanted:
        raise Unmet("nothing to check: --only names no check")
    return [check for check in checks if check.name in wanted]


def of_drafter(adapter: Any, folder: Path | None) -> list[Check]:
    """The check of a real drafter's folder, where one is named. Raises Unmet where the engine has none."""
    if folder is None:
        return []
    if not hasattr(adapter, "drafter_check"):
        raise Unmet("--drafter: no check of a drafter's config is written for this engine")
    return [adapter.drafter_check(folder.resolve())]


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Check that this engine can run Kimi-K2.5 with an EAGLE-3 drafter.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--list", action="store_true", help="name the checks and run none")
    parser.add_argument("--only", metavar="NAME,...", help="run these checks alone")
    parser.add_argument("--drafter", type=Path, metavar="DIR", help="check the config of this drafter, too")
    parser.add_argument("--release", type=Path, default=HOME / "release.json", metavar="FILE")
    parser.add_argument("--series", type=Path, default=HOME / "series", metavar="DIR")
    parser.add_argument("--progress", action="store_true", help="name each check as it runs, also without a terminal")
    parser.add_argument("--verbose", action="store_true", help="show what the engine prints, on standard error")
    options = parser.parse_args(arguments)
    try:
        release = load_release(options.release)
        adapter = import_module(ADAPTERS[release["engine"]])
        # All of our own modules are in. The engine must not find one of them by a name that it means otherwise:
        # numba asks for a module `coverage`, and there is one in this folder.
        sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
        checks = choose([*FIRST, *adapter.CHECKS, *of_drafter(adapter, options.drafter), *LAST], options.only)
    except Unmet as unmet:
        print(f"error: {unmet}", file=sys.stderr)
        return 1
    if options.list:
        print("\n".join(check.name for check in checks))
        return 0
    show = options.progress or sys.stderr.isatty()
    progress = os.fdopen(os.dup(2), "w") if show and not options.verbose else None
    with tempfile.TemporaryDirectory(prefix="contract-") as folder:
        context = Context(release, options.series.resolve(), Path(folder))
        adapter.prepare(context)
        results = run_all(checks, context, options.verbose, progress)
    outcome = report(release, results)
    print(json.dumps(outcome, indent=1) if options.json else table(results))
    return 0 if outcome["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
