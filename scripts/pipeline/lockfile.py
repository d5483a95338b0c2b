"""The files in locks/: what is in one, and whether it is whole."""

import re
from pathlib import Path

from scripts.pipeline.say import Stop, note

HEADER = "# Written by `nox -s lock` from pins.toml. Do not edit.\n"
END = "# end:"
# `name==version` of a wheel, `name=version` of a Debian package; hashes stand on lines of their own.
ENTRY = re.compile(r"^([A-Za-z0-9][A-Za-z0-9.+_-]*?)==?([^\s;\\=]+)", re.MULTILINE)


def write(path: Path, body: str) -> None:
    """Write a lock, whole or not at all. Its last line tells how much there is, so that a cut-off one is noticed."""
    count = len(ENTRY.findall(body))
    new = path.with_suffix(".new")
    try:
        new.write_text(f"{HEADER}{body.rstrip()}\n{END} {count}\n")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    note(f"locks/{path.name}: {count} packages")


def packages(path: Path) -> dict[str, str]:
    """Name and version of each package in a lock. Raises Stop where it is missing or not whole."""
    try:
        text = path.read_text()
    except OSError:
        raise Stop(f"{path.name} is missing in locks/: run `nox -s lock`") from None
    except UnicodeDecodeError:
        raise Stop(f"locks/{path.name} is no text: run `nox -s lock`") from None
    entries = ENTRY.findall(text)
    if not entries or not text.endswith(f"{END} {len(entries)}\n"):
        raise Stop(
            f"locks/{path.name} is not whole: {len(entries)} packages, and its last line is another: `nox -s lock`"
        )
    return dict(entries)
