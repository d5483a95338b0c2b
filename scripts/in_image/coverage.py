"""Say of each shared object whether its GPU code runs on a GPU architecture: natively, through PTX, or not at all.

`python3 coverage.py [ROOT...] [--arch sm_120] [--require GLOB ...] [--release FILE] [--json]`

ROOT is a folder, by default the site-packages of /opt/venv. Measured is every ELF shared object of 1 MB or more,
found by its content and not by its name, and every smaller one that a required glob names. Statuses:

    native        some of its machine code runs on the GPU as it is
    ptx           none does, but the driver compiles its PTX when a kernel is first used (slow once; the driver must
                  know the PTX version that is shown)
    none          it has GPU code, and none of it is of use on this GPU
    no GPU code   what it says

One object holds many fat binaries, about one for each source file, so `native` alone can mislead: the table counts
how many are native, PTX and neither. `--require` (and `serving_objects` of FILE, an image's release.json) names what
the serving path loads, relative to ROOT: each glob must match, and each match must be native or ptx. In an image for
the CPU (`variant` of FILE) a match need only be there.

Exit status: 0, or 1 with one line for each failure on standard error.
"""

import argparse
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ != "__main__":
    # Numba, and with it an engine, imports whatever `coverage` it finds, and may find this file beside a command that
    # runs the engine. It goes on without one; with this one it would fail later.
    raise ImportError("coverage.py is a command, not the coverage package")

sys.dont_write_bytecode = True  # the folder of this file is read-only in an image

import fatbin  # noqa: E402

MIN_BYTES = 1_000_000
VENV = Path("/opt/venv/lib")
NO_CODE = "no GPU code"


class Failed(Exception):
    """Nothing could be measured. The message is one line, with the cure."""


@dataclass(frozen=True)
class Object:
    """A shared object: path relative to its root, size in bytes, its fat binaries in file order."""

    path: str
    bytes: int
    fat_binaries: tuple[fatbin.FatBinary, ...]

    def archs(self, kind: str) -> list[str]:
        """The architectures of a kind of code (`cubin` or `ptx`), each once, ascending."""
        found = {code.arch for binary in self.fat_binaries for code in binary.codes if code.kind == kind}
        return sorted(found, key=fatbin.arch_number)

    def counts(self, target: int) -> dict[str, int]:
        """How many of its fat binaries are native, ptx and none on a GPU of `target`."""
        counted = Counter(fatbin.status(binary.codes, target) for binary in self.fat_binaries)
        return {status: counted[status] for status in ("native", "ptx", "none")}

    def status(self, target: int) -> str:
        """The best of its fat binaries, or `no GPU code`."""
        return next((status for status, count in self.counts(target).items() if count), NO_CODE)

    def ptx_isa(self, target: int) -> str | None:
        """The PTX version that the driver must know, where there is no native code beside it; None where none is."""
        needed = [
            min(code.isa for code in binary.codes if code.kind == "ptx" and fatbin.usable(code, target))
            for binary in self.fat_binaries
            if fatbin.status(binary.codes, target) == "ptx"
        ]
        return ".".join(map(str, max(needed))) if needed else None


def _candidates(root: Path, required: list[str]) -> dict[Path, str]:
    """Shared objects below `root`: real path -> path relative to `root`. A link counts where its target doesn't."""
    names: list[Path] = []
    for folder, _, files in os.walk(root):
        names += (Path(folder, name) for name in files)
    wanted = {path for glob in required for path in root.glob(glob)}
    found: dict[Path, str] = {}
    for path in sorted(names, key=lambda p: (p.is_symlink(), p)):
        if path.is_file() and (path in wanted or path.stat().st_size >= MIN_BYTES) and fatbin.is_shared_object(path):
            found.setdefault(path.resolve(), path.relative_to(root).as_posix())
    return found


def measure(root: Path, required: list[str]) -> tuple[list[Object], dict[str, list[Object]]]:
    """The shared objects below `root` by path, and for each required glob those that it matches.

    Raises Failed where there is nothing to measure, fatbin.Malformed for a broken file, OSError.
    """
    if not root.is_dir():
        raise Failed(f"{root} is no folder; give the site-packages folder to measure")
    names = _candidates(root, required)
    if not names:
        raise Failed(f"{root} holds no shared object of 1 MB or more, so nothing was measured; give another folder")
    objects = {path: Object(name, path.stat().st_size, fatbin.read(path)) for path, name in names.items()}
    matches = {
        glob: sorted((objects[p] for p in {q.resolve() for q in root.glob(glob)} if p in objects), key=lambda o: o.path)
        for glob in required
    }
    return sorted(objects.values(), key=lambda o: o.path), matches


def errors(matches: dict[str, list[Object]], arch: str, gpu: bool) -> list[str]:
    """One line for each required glob that matches nothing or, if `gpu`, an object that can't run on `arch`."""
    target = fatbin.arch_number(arch)[0]
    lines = []
    for glob, found in matches.items():
        if not found:
            lines.append(f"{glob}: no shared object matches, and the serving path needs it; correct serving_objects")
        for item in found if gpu else []:
            status = item.status(target)
            if status not in ("native", "ptx"):
                held = ", ".join(item.archs("cubin") + [f"PTX {arch}" for arch in item.archs("ptx")]) or NO_CODE
                cure = "choose an engine or torch release that is built for it, or correct serving_objects"
                lines.append(f"{item.path}: nothing in it runs on {arch} (it holds: {held}); {cure}")
    return lines


def record(objects: list[Object], matches: dict[str, list[Object]], arch: str, gpu: bool) -> dict[str, Any]:
    """The result as JSON data: sorted, and the same for the same files."""
    target = fatbin.arch_number(arch)[0]
    failures = errors(matches, arch, gpu)
    return {
        "arch": arch,
        "objects": [
            {
                "path": item.path,
                "bytes": item.bytes,
                "status": item.status(target),
                "cubins": item.archs("cubin"),
                "ptx": item.archs("ptx"),
                "fat_binaries": item.counts(target),
                "ptx_isa": item.ptx_isa(target),
            }
            for item in objects
        ],
        "serving": [
            {"glob": glob, "path": item.path, "status": item.status(target)}
            for glob, found in matches.items()
            for item in found
        ],
        "errors": failures,
        "ok": not failures,
    }


def table(data: dict[str, Any], everything: bool = False) -> str:
    """The record for people: the objects that serving loads, marked with `*`, then the others that hold GPU code."""
    serving = {row["path"] for row in data["serving"]}
    shown = [item for item in data["objects"] if everything or item["status"] != NO_CODE or item["path"] in serving]
    lines = [f"{data['arch']:<12} {'MB':>6}  object (*: serving loads it)"]
    for item in sorted(shown, key=lambda item: item["path"] not in serving):
        counts, total = item["fat_binaries"], sum(item["fat_binaries"].values())
        mark = "*" if item["path"] in serving else " "
        line = f"{item['status']:<12} {item['bytes'] / 1e6:>6.0f} {mark}{item['path']}"
        if total:
            parts = {"native": "native", "ptx": f"PTX {item['ptx_isa']}", "none": "neither"}
            shares = ", ".join(f"{counts[key]} {text}" for key, text in parts.items() if counts[key])
            archs = " ".join(arch.removeprefix("sm_") for arch in item["cubins"]) or "-"
            ptx = " ".join(arch.removeprefix("sm_") for arch in item["ptx"]) or "-"
            line += f"  [{shares} of {total}; cubins {archs}; PTX {ptx}]"
        lines.append(line)
    if hidden := len(data["objects"]) - len(shown):
        lines.append(f"and {hidden} without GPU code (--all)")
    return "\n".join(lines)


def _release(path: Path) -> tuple[str, list[str], bool]:
    """Architecture, serving objects and whether it is for a GPU, of a release.json. Raises Failed."""
    try:
        data = json.loads(path.read_text())
        return str(data["arch"]), list(data["serving_objects"]), data.get("variant", "cuda") != "cpu"
    except (OSError, ValueError) as error:
        raise Failed(f"{path}: {error}; give the release.json of an image") from None
    except (KeyError, TypeError) as error:
        raise Failed(f"{path} lacks {error}; give the release.json of an image") from None


def main(argv: list[str]) -> int:
    """Run as a command. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("roots", nargs="*", type=Path, metavar="ROOT", help="default: the site-packages of /opt/venv")
    parser.add_argument("--arch", help="architecture of the GPU, e.g. sm_120 (default: that of --release)")
    parser.add_argument("--require", nargs="+", action="extend", default=[], metavar="GLOB", help="must run on it")
    parser.add_argument("--release", type=Path, metavar="FILE", help="release.json of an image")
    parser.add_argument("--json", action="store_true", help="print the record instead of the table")
    parser.add_argument("--all", action="store_true", help="also the objects without GPU code")
    args = parser.parse_args(argv)
    try:
        arch, required, gpu = _release(args.release) if args.release else ("sm_120", [], True)
        arch, required = args.arch or arch, list(dict.fromkeys(required + args.require))
        if fatbin.arch_number(arch)[1]:
            raise ValueError(f"{arch!r} is not the architecture of a GPU; give it without its suffix")
        roots = args.roots or sorted(VENV.glob("python3.*/site-packages"))
        if not roots:
            raise Failed(f"{VENV} holds no python3.*/site-packages; name the folder to measure")
        objects: list[Object] = []
        matches: dict[str, list[Object]] = {glob: [] for glob in required}
        for root in roots:
            more, matched = measure(root.resolve(), required)
            objects += more
            for glob in required:
                matches[glob] += matched[glob]
    except (Failed, fatbin.Malformed, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    data = record(objects, matches, arch, gpu)
    print(json.dumps(data, indent=1, sort_keys=True) if args.json else table(data, args.all))
    for line in data["errors"]:
        print(f"error: {line}", file=sys.stderr)
    return 0 if data["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
