"""Write what an image needs to know about its own release, and nothing else of pins.toml.

`python3 release.py PINS_TOML ENGINE VERSION VARIANT OUT`, where VARIANT is `cuda` or `cpu`. OUT is JSON with
sorted keys: another release's entry, a comment or the order of keys changes no byte of it.
Exit status: 0, or 1 with one line on standard error and no OUT.
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any


class Refused(Exception):
    """pins.toml can't give what was asked for. The message is one line, with the cure."""


def _release(pins: dict[str, Any], engine: str, version: str, variant: str) -> dict[str, Any]:
    """The entry of a release. Raises Refused, naming what there is."""
    if variant not in ("cuda", "cpu"):
        raise Refused(f"no variant {variant!r}: choose cuda or cpu")
    of_variant = [r for r in pins["release"] if variant == "cuda" or "cpu" in r]
    for entry in of_variant:
        if (entry["engine"], entry["version"]) == (engine, version):
            return dict(entry)
    known = ", ".join(f"{r['engine']} {r['version']}" for r in of_variant) or "none"
    raise Refused(f"no release {engine} {version}, variant {variant}: there is {known}; add it to pins.toml")


def _drafter(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """The drafter. `revision` is null only with the reason in `unpinned`. Raises Refused where both are missing."""
    if not data.get("revision") and not data.get("unpinned"):
        raise Refused(f"drafters.{name} has neither a revision nor the reason why it is unpinned")
    keys = ("repo", "architecture", "draft_tokens")
    return {
        "name": name,
        **{key: data[key] for key in keys},
        "revision": data.get("revision"),
        "unpinned": data.get("unpinned", ""),
    }


def _serve(pins: dict[str, Any], entry: dict[str, Any], variant: str) -> dict[str, Any]:
    """Flags, environment and port. The twin serves test models on a CPU, so the defaults for GPUs aren't its own."""
    common = pins["serve"][entry["engine"]]
    if variant == "cpu":
        return {"port": common["port"], "flags": entry["cpu"].get("flags", {}), "env": entry["cpu"].get("env", {})}
    flags = {"tensor-parallel-size": pins["gpu"]["count"], **common["flags"], **entry.get("flags", {})}
    return {"port": common["port"], "flags": flags, "env": {**common.get("env", {}), **entry.get("env", {})}}


def extract(pins: dict[str, Any], engine: str, version: str, variant: str) -> dict[str, Any]:
    """What the image of one release needs, from the parsed pins.toml.

    Raises Refused where the release is unknown, KeyError with the name of a missing key or entry.
    """
    entry = _release(pins, engine, version, variant)
    torch = pins["torch"][entry["torch"]]
    own = entry["cpu"] if variant == "cpu" else entry
    return {
        "engine": engine,
        "version": version,
        "variant": variant,
        "package": own.get("package", engine),
        "python": pins["python"]["version"],
        "torch": entry["torch"],
        "cuda": torch["cuda"],
        "nvcc": torch["nvcc"],
        "arch": pins["gpu"]["arch"],
        "gpu": {key: pins["gpu"][key] for key in ("count", "name")},
        "target": {key: pins["target"][key] for key in ("repo", "revision", "size_gb")},
        "drafter": _drafter(entry["drafter"], pins["drafters"][entry["drafter"]]),
        "serve": _serve(pins, entry, variant),
        "serving_objects": own.get("serving_objects", []),
    }


def main(argv: list[str]) -> None:
    """Run as a command."""
    if len(argv) != 5:
        raise Refused("usage: release.py PINS_TOML ENGINE VERSION VARIANT OUT")
    source, engine, version, variant, out = argv
    try:
        record = extract(tomllib.loads(Path(source).read_text()), engine, version, variant)
        Path(out).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    except KeyError as key:
        raise Refused(f"{source} lacks the key or the entry {key}") from None
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise Refused(f"{source}: {error}") from None


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        raise SystemExit(1) from None
