"""RECORD: what an installed package says of its own files (PATH,sha256=HASH,SIZE), kept true and held against them.

The format is that of the packaging standards ("Recording installed projects"): CSV, paths relative to site-packages,
the hash in URL-safe base64 without padding. Bytecode is not listed, or listed without a hash.
"""

import base64
import csv
import hashlib
import io
from collections.abc import Mapping
from pathlib import Path, PurePosixPath


class Untrue(Exception):
    """A RECORD can't be kept true. The message is one line: what is wrong, where, and the cure."""


def entry(path: str, data: bytes) -> str:
    """The line of a file, without a line end."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow((path, f"sha256={digest}", len(data)))
    return line.getvalue()


def read(record: Path) -> list[tuple[str, list[str]]]:
    """The lines of a RECORD with their ends, each with its fields: path, hash (maybe empty), size (maybe empty)."""
    with record.open(newline="") as file:
        lines = file.read().splitlines(keepends=True)
    rows = [(line, next(csv.reader([line]), [])) for line in lines]
    for number, (_, fields) in enumerate(rows, 1):
        if len(fields) != 3:
            raise Untrue(f"{record}:{number}: has {len(fields)} fields instead of 3: install the package again")
    return rows


def _owner(path: str, folders: Mapping[str, set[Path]]) -> Path:
    """The RECORD that a new file belongs to: the one that lists files in the nearest folder above it. Raises Untrue."""
    for folder in PurePosixPath(path).parents:
        if found := folders.get(str(folder), set()) if str(folder) != "." else set():
            if len(found) > 1:
                names = ", ".join(sorted(record.parent.name for record in found))
                raise Untrue(f"{path}: {folder} belongs to more than one package ({names}): put the file elsewhere")
            return next(iter(found))
    raise Untrue(f"{path}: no installed package has files in a folder above it: put the file into the engine's package")


def updated(root: Path, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The RECORDs that change when `files` (path below `root` to content) are written: path to content. Writes nothing.

    A line that is listed keeps its place; new files come at the end, sorted. Without any RECORD below `root`, which is
    then no place of installed packages, there is nothing to keep. Raises Untrue.
    """
    if not files:
        return {}
    records = {record: read(record) for record in sorted(root.glob("*.dist-info/RECORD"))}
    if not records:
        return {}
    listed: dict[str, set[Path]] = {}
    folders: dict[str, set[Path]] = {}
    for record, rows in records.items():
        for _, (path, _, _) in rows:
            listed.setdefault(path, set()).add(record)
            for folder in PurePosixPath(path).parents:
                folders.setdefault(str(folder), set()).add(record)
    added: dict[Path, list[str]] = {}
    for path in sorted(files.keys() - listed.keys()):
        if (root / path).exists():
            raise Untrue(f"{root / path}: is listed in no RECORD: install the package that it belongs to again")
        added.setdefault(_owner(path, folders), []).append(path)
    changed = set(added).union(*(listed[path] for path in files if path in listed))
    results = {}
    for record in sorted(changed):
        rows = records[record]
        end = "\r\n" if rows[0][0].endswith("\r\n") else "\n"
        lines = [entry(path, files[path]) + end if path in files else line for line, (path, _, _) in rows]
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += end
        lines += [entry(path, files[path]) + end for path in added.get(record, [])]
        results[str(record.relative_to(root))] = "".join(lines).encode()
    return results


def differences(record: Path) -> list[str]:
    """One line for each file that isn't as its RECORD says, in the order of the RECORD. Raises Untrue."""
    root = record.parent.parent
    wrong = []
    for _, (path, recorded, size) in read(record):
        if not recorded:
            if not path.endswith((".pyc", "/RECORD", ".jws", ".p7s")):
                wrong.append(f"{path} is listed without a hash")
            continue
        name, _, digest = recorded.partition("=")
        file = root / path
        if name not in ("sha256", "sha384", "sha512"):
            wrong.append(f"{path} is listed with {name!r}, which is no hash that counts")
        elif not file.is_file():
            wrong.append(f"{path} is missing")
        elif size and int(size) != file.stat().st_size:
            wrong.append(f"{path} has {file.stat().st_size} bytes, and {size} are recorded")
        else:
            with file.open("rb") as data:
                found = base64.urlsafe_b64encode(hashlib.file_digest(data, name).digest()).rstrip(b"=").decode()
            if found != digest.rstrip("="):
                wrong.append(f"{path} has another {name} than is recorded")
    return wrong
