"""A patch series as text: DEP-3 headers, and lint. Pure functions; the folder is a mapping of name to content."""

import hashlib
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from packaging.version import InvalidVersion, Version

from scripts.pipeline import diffs
from scripts.pipeline.say import Stop

FIELDS = ("Description", "Origin", "Bug", "Forwarded", "Applied-Upstream", "Last-Update")
FIELD = re.compile(r"([A-Z][A-Za-z-]*):[ \t]*(.*)")
ENTRY = re.compile(r"[A-Za-z0-9_.+-]+\.patch")


def header(data: bytes) -> dict[str, str]:
    """The DEP-3 fields of a patch; a folded field keeps its lines. Of a field given twice, the values are joined."""
    lines = diffs.split(data)
    fields: dict[str, str] = {}
    name = ""
    for raw in lines[: diffs.header_end(lines)]:
        line = raw.decode(errors="replace").rstrip()
        if line == "---":
            break
        if match := FIELD.fullmatch(line):
            name = match[1]
            fields[name] = f"{fields[name]}\n{match[2]}" if name in fields else match[2]
        elif name and raw[:1] in (b" ", b"\t"):
            fields[name] += "\n" + line.strip()
    return {name: value.strip() for name, value in fields.items()}


def lint_header(data: bytes, version: str) -> list[str]:
    """What is wrong with a patch's header in a series of `version`."""
    fields = header(data)
    errors = [f"header field {name} is missing or empty: add it" for name in FIELDS if not fields.get(name)]
    updated, upstream = fields.get("Last-Update", ""), fields.get("Applied-Upstream", "")
    if updated and not is_date(updated):
        errors.append(f"Last-Update {updated!r} is no date: write YYYY-MM-DD")
    if upstream and upstream != "no":
        try:
            stale = Version(upstream) <= Version(version)
        except InvalidVersion:
            errors.append(f"Applied-Upstream {upstream!r} is neither `no` nor a version: name the release that has it")
        else:
            if stale:
                errors.append(
                    f"stale: upstream has it since {upstream}, and this series is for {version}: delete the patch"
                )
    return errors


def is_date(text: str) -> bool:
    """Whether `text` is YYYY-MM-DD and a day of the calendar."""
    try:
        return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text)) and bool(date.fromisoformat(text))
    except ValueError:
        return False


def entries(series: bytes) -> list[str]:
    """The patches that a `series` file lists, in order."""
    lines = series.decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def lint(files: Mapping[str, bytes], version: str) -> list[str]:
    """What is wrong with a series folder for `version`: one line each, beginning with the file's name."""
    if "series" not in files:
        return ["series: is missing: list the patches in order, or say in a comment why there is none"]
    names = entries(files["series"])
    errors = []
    if not names and not re.search(rb"^#+[ \t]*\S", files["series"], re.MULTILINE):
        errors.append("series: is empty and doesn't say why: add a comment with the reason")
    for name in sorted(set(names)):
        if not ENTRY.fullmatch(name):
            errors.append(f"series: {name!r} is no name of a patch in this folder: write NAME.patch")
        elif name not in files:
            errors.append(f"series: lists {name}, which isn't there: add the file or drop the line")
        if names.count(name) > 1:
            errors.append(f"series: lists {name} {names.count(name)} times: keep one line")
    if "tree" not in files:
        errors.append("tree: is missing: run `nox -s new-series -- ENGINE VERSION --refresh`")
    for name in sorted(set(files) - set(names) - {"series", "tree"}):
        if name.endswith(".rej"):
            errors.append(f"{name}: an open conflict: write the patch anew and list it, or drop it; delete this file")
        else:
            errors.append(f"{name}: isn't listed in series: list it or delete it")
    for name in dict.fromkeys(name for name in names if name in files):
        errors += [f"{name}:1: {error}" for error in lint_header(files[name], version)]
        try:
            diffs.parse(files[name])
        except diffs.Malformed as error:
            errors.append(f"{name}:{error.line}: {error}: make the patch again (patches/README.md)")
    return errors


def load(folder: Path) -> dict[str, bytes]:
    """The files of a series folder by name.

    Raises Stop where there is no such folder, or it holds another folder.
    """
    if not folder.is_dir():
        raise Stop(f"{folder}: there is no series: add the folder (patches/README.md); an empty series says why")
    for path in folder.iterdir():
        if not path.is_file():
            raise Stop(f"{path}: is no file: a series folder holds series, tree and patches only; move it elsewhere")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def touched(files: Mapping[str, bytes]) -> list[str]:
    """The paths that the listed patches touch, sorted. Raises diffs.Malformed."""
    return sorted({c.path for name in entries(files["series"]) for c in diffs.parse(files[name]).changes})


def digest(files: Mapping[str, bytes]) -> str:
    """The hash of a series: of the output of `sha256sum series PATCH... tree`, as patch_series.py records it."""
    names = ["series", *entries(files["series"]), "tree"]
    listing = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in names)
    return hashlib.sha256(listing.encode()).hexdigest()
