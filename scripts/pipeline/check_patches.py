"""Check every patch series without building anything: lint, then exact application to the pristine wheels."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.pipeline import diffs, pins, say, series, twin, wheels
from scripts.pipeline.say import Stop

APPLY = pins.ROOT / "scripts" / "in_image" / "apply_series.py"


def judge(folder: Path, paths: list[str], wheel: wheels.Wheel) -> dict[str, object]:
    """Apply a series to the files of a wheel, in a folder of its own, as an image build does: the record of it.

    Raises Stop with what apply_series.py says.
    """
    with tempfile.TemporaryDirectory() as root:
        wheel.extract(paths, Path(root))
        command = [sys.executable, str(APPLY), str(folder), root, "--check", "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"apply_series.py ended with status {done.returncode}"]
            raise Stop(lines[-1].removeprefix("error: ").replace(f"{Path(root).resolve()}/", ""))
        record: dict[str, object] = json.loads(done.stdout)
        return record


def check(variants: list[pins.Release], all_pins: pins.Pins) -> tuple[int, list[str]]:
    """Check the series of one release, on its wheel and against its twin: number of patches, and what is wrong."""
    folder = variants[0].series
    where = folder.relative_to(pins.ROOT) if folder.is_relative_to(pins.ROOT) else folder
    say.step(f"{variants[0].engine} {variants[0].version}")
    try:
        files = series.load(folder)
    except Stop as stop:
        return 0, [str(stop).replace(str(folder), str(where))]
    names = series.entries(files["series"]) if "series" in files else []
    errors = [f"{where}/{error}" for error in series.lint(files, variants[0].version)]
    try:
        changes = {name: diffs.parse(files[name]).changes for name in names}
    except (diffs.Malformed, KeyError):
        return len(names), errors  # lint has named it
    if "series" not in files or "tree" not in files:
        return len(names), errors
    paths = series.touched(files)
    fits = []
    for release in variants:
        try:
            if release.swapped:
                twin.check(release)  # it is its image, so the series is applied to no wheel of its own
                continue
            wheel = wheels.pristine(release, all_pins)
            judge(folder, paths, wheel)
            fits.append(f"wheel {wheel.sha256[:12]}")
        except Stop as stop:
            errors.append(f"{where}: {stop}")
    width = max((len(name) for name in names), default=0)
    for name in names:
        added, removed = (sum(change.count(mark) for change in changes[name]) for mark in (b"+", b"-"))
        size = f"{len(changes[name])} files +{added} -{removed}"
        say.note(f"{name:{width}}  {size:18} {series.header(files[name]).get('Description', '').partition(chr(10))[0]}")
    say.note(f"{len(names)} patches, {len(paths)} files; fits exactly: {', '.join(fits) or 'none'}")
    return len(names), errors


def job(argv: list[str]) -> None:
    """Check all series, or the one that is named."""
    parser = argparse.ArgumentParser(prog="nox -s check-patches --", description=__doc__)
    parser.add_argument("engine", nargs="?", help="only this engine")
    parser.add_argument("version", nargs="?", help="only this version of it")
    args = parser.parse_args(argv)
    all_pins = pins.load()
    releases: dict[tuple[str, str], list[pins.Release]] = {}
    for release in all_pins.releases:
        if args.engine in (None, release.engine) and args.version in (None, release.version):
            releases.setdefault((release.engine, release.version), []).append(release)
    if not releases:
        known = ", ".join(sorted({f"{r.engine} {r.version}" for r in all_pins.releases}))
        raise Stop(f"pins.toml has no release {args.engine} {args.version or ''}".rstrip() + f"; it has: {known}")
    results = [check(variants, all_pins) for variants in releases.values()]
    errors = [error for _, found in results for error in found]
    for error in errors:
        print(f"error: {error}", file=sys.stderr, flush=True)
    if errors:
        raise Stop(f"{len(errors)} problems in {len(releases)} series, named above")
    say.step(f"{sum(count for count, _ in results)} patches of {len(releases)} releases fit exactly")


if __name__ == "__main__":
    say.main(job)
