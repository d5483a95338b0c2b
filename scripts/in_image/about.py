"""Say what this image is: `python3 about.py [--json] [--root FOLDER]`.

Reads what the build left in the folder above this file (release.json, base.json, contract.json, coverage.json, locks/,
series/; in a twin also twin.json) and what is installed in this Python. Runs on any machine, in a second, and imports
no engine.
Exit status: 0; or 1 where something is missing, differs from its pin or failed, with one line each on standard error.
"""

import argparse
import hashlib
import json
import platform
import sys
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the folder of this file is read-only in an image
sys.path.insert(0, str(Path(__file__).resolve().parent))

import patch_series  # noqa: E402

NEEDS_GPU = (
    "that kernels compute the right thing on the GPU, and how fast",
    "that target, drafter and KV cache fit into its memory",
    "acceptance length and throughput with the real models",
    "copies between GPUs (NCCL over PCIe)",
)


class Missing(Exception):
    """A part of the image isn't there or isn't as pinned. The message is one line."""


def _json(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """The object in a JSON file, with at least these keys. Raises Missing."""
    try:
        data = json.loads(path.read_text())
        lacking = [key for key in keys if key not in data]
    except (OSError, ValueError, TypeError) as error:
        raise Missing(f"{path.name} can't be read ({getattr(error, 'strerror', None) or error}): build again") from None
    if lacking:
        raise Missing(f"{path.name} lacks {', '.join(lacking)}: build again")
    return dict(data)


def _installed(package: str, pinned: str) -> str:
    """The installed version. Raises Missing where it is none, or not the pinned one (`+cu128` and the like aside)."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise Missing(f"{package} isn't installed in {sys.executable}; pinned is {pinned}") from None
    if version.split("+")[0] != pinned:
        raise Missing(f"{package} {version} is installed, but pinned is {pinned}")
    return version


def _locks(folder: Path) -> dict[str, str]:
    """The sha256 of each lock, by file name. Raises Missing where there is none."""
    locks = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.txt"))}
    if not locks:
        raise Missing("locks/ holds no lock: build again")
    return locks


def _series(folder: Path) -> dict[str, Any]:
    """The series' hash, its patches with their descriptions, and why it is as it is. Raises Missing."""
    try:
        series = patch_series.load(folder)
    except patch_series.Refused as refused:
        raise Missing(str(refused)) from None
    return {"why": series.why, **patch_series.record(series)}


def _contract(path: Path) -> dict[str, Any]:
    """The build's contract result. Raises Missing where nothing was checked or a check failed."""
    contract = _json(path, ("checks", "ok"))
    failed = [check["name"] for check in contract["checks"] if not check["ok"]]
    if not contract["checks"] or not contract["ok"] or failed:
        raise Missing(f"contract.json: {'failed: ' + ', '.join(failed) if failed else 'nothing was checked'}")
    return contract


def _coverage(path: Path) -> dict[str, Any]:
    """The build's coverage: how many objects have each status, and that of each serving object. Raises Missing."""
    coverage = _json(path, ("arch", "objects", "serving", "ok"))
    if not coverage["objects"] or not coverage["ok"]:
        raise Missing(f"coverage.json: {'a serving object fails' if coverage['objects'] else 'nothing was measured'}")
    statuses = Counter(item["status"] for item in coverage["objects"])
    # An object is native as soon as part of it is; the rest is said, since the driver has to compile it.
    ptx = {item["path"]: item.get("fat_binaries", {}).get("ptx", 0) for item in coverage["objects"]}
    serving = {
        item["path"]: item["status"] + (", part ptx" if item["status"] == "native" and ptx.get(item["path"]) else "")
        for item in coverage["serving"]
    }
    return {"arch": coverage["arch"], "statuses": dict(sorted(statuses.items())), "serving": serving}


def _twin(path: Path, engine: str) -> dict[str, Any]:
    """Which files of the CPU build a twin has, and why. Raises Missing where one of them isn't what was put there."""
    twin = _json(path, ("wheel", "sha256", "swapped"))
    if not twin["swapped"]:
        raise Missing(f"{path.name}: nothing is swapped: build again")
    for one in twin["swapped"]:
        file = Path(str(metadata.distribution(engine).locate_file(one["path"])))
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != one["sha256"]:
            raise Missing(f"{one['path']} isn't that of {twin['wheel']}: build again")
    return twin


def gather(root: Path) -> tuple[dict[str, Any], list[str]]:
    """What the image is, and one line for each thing that is missing. A part that is missing is null."""
    missing: list[str] = []

    def part(read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return read(*arguments)
        except Missing as line:
            missing.append(str(line))
            return None

    keys = ("engine", "version", "variant", "torch", "cuda", "arch", "gpu", "target", "drafter")
    release = part(_json, root / "release.json", keys) or {}
    about = {key: release.get(key) for key in keys}
    about["python"] = platform.python_version()
    about["installed"] = {
        package: part(_installed, package, pinned)
        for package, pinned in ((release.get("engine"), release.get("version")), ("torch", release.get("torch")))
        if package and pinned
    }
    about["series"] = part(_series, root / "series")
    about["base"] = part(_json, root / "base.json", ("kind", "reference", "sha256"))
    about["locks"] = part(_locks, root / "locks")
    about["contract"] = part(_contract, root / "contract.json")
    about["coverage"] = part(_coverage, root / "coverage.json")
    about["twin"] = part(_twin, root / "twin.json", about["engine"]) if about["variant"] == "cpu" else None
    about["needs_gpu"] = list(NEEDS_GPU)
    about["missing"] = missing
    return about, missing


def _model(model: dict[str, Any] | None) -> str:
    """A model with its revision, or why it has none."""
    if not model:
        return "?"
    return f"{model['repo']} @ {model['revision'] or 'UNPINNED: ' + model.get('unpinned', '')}"


def table(about: dict[str, Any]) -> str:
    """The same for people. What is missing shows as `?`."""
    installed, series, gpu = about["installed"], about["series"], about["gpu"] or {}
    base, contract, coverage = about["base"], about["contract"], about["coverage"]
    engine, torch = installed.get(about["engine"]), installed.get("torch")
    rows = [
        ("engine", f"{about['engine'] or '?'} {engine or '?'} ({about['variant'] or '?'})"),
        ("torch", f"{torch or '?'}, CUDA {about['cuda'] or '?'}"),
        ("python", about["python"]),
        ("arch", f"{about['arch'] or '?'}, for {gpu.get('count', '?')} x {gpu.get('name', '?')}"),
        ("target", _model(about["target"])),
        ("drafter", _model(about["drafter"])),
        ("base", f"{base['reference']} ({base['kind']}), sha256 {base['sha256']}" if base else "?"),
        ("series", f"sha256 {series['series_sha256']}" if series else "?"),
    ]
    patches = series["patches"] if series else []
    rows += [("patch", f"{patch['name']}: {patch['description']}") for patch in patches]
    if series and not patches:
        rows.append(("patch", f"none: {series['why']}"))
    rows += [("swapped", f"{one['path']}: {one['why']}") for one in (about["twin"] or {}).get("swapped", ())]
    rows += [("lock", f"{name}: sha256 {sha256}") for name, sha256 in (about["locks"] or {"?": "?"}).items()]
    rows.append(("contract", f"{len(contract['checks'])} checks, all hold" if contract else "?"))
    statuses = ", ".join(f"{count} {status}" for status, count in coverage["statuses"].items()) if coverage else "?"
    rows.append(("coverage", f"shared objects: {statuses}"))
    rows += [("serving", f"{path}: {status}") for path, status in (coverage["serving"] if coverage else {}).items()]
    rows += [("not shown", f"only a GPU shows {what}") for what in about["needs_gpu"]]
    return "\n".join(f"{name:<11}{text}" for name, text in rows)


def main() -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(description="Say what this image is.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="default: %(default)s")
    options = parser.parse_args()
    about, missing = gather(options.root)
    print(json.dumps(about, indent=2, sort_keys=True) if options.json else table(about), flush=True)
    for line in missing:
        print(f"error: {line}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
