"""The receipt: the JSON record of one image, what went in, what was checked, with which results, on which hardware.

schemas/receipt.schema.json says what is in it. A receipt that doesn't fit is never written.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scripts.pipeline import files, pins
from scripts.pipeline.ladder import Rung, ok
from scripts.pipeline.say import Stop

SCHEMA = pins.ROOT / "schemas" / "receipt.schema.json"
TWIN_OF = "kimi-eagle3.twin.of"  # the label with the id of the image that a twin was made of
COVERAGE = ("arch", "statuses", "serving")


@dataclass(frozen=True)
class Image:
    """An image as the container engine knows it: `id` and `digests` are `sha256:...` and `NAME@sha256:...`."""

    reference: str
    id: str
    digests: tuple[str, ...]
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Run:
    """One way up the ladder. `pair` is `oracle`, `pinned` or `own`; `command` starts the same server by hand."""

    pair: str
    target: str
    drafter: str
    k: int
    command: str
    hardware: str
    rungs: tuple[Rung, ...]

    @property
    def name(self) -> str:
        return f"{self.pair}, K = {self.k}"


def path_for(image_id: str) -> Path:
    """Where the receipt of an image is kept on this machine."""
    return files.cache() / "receipts" / f"{image_id.removeprefix('sha256:')}.json"


def make(
    release: pins.Release,
    image: Image | None,
    url: str | None,
    about: Mapping[str, Any],
    runs: Sequence[Run],
    when: datetime | None = None,
    in_process: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """A receipt. `image` is None for a server that was already up at `url`; `about` is what the image says of itself.

    `ok` holds only if there are runs and each of them is passed.
    """
    series, coverage = about.get("series") or {}, about.get("coverage") or {}
    labels = dict(image.labels) if image else {}
    return {
        "schema": 1,
        "when": (when or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "ok": bool(runs) and all(ok(run.rungs) for run in runs),
        "release": {"engine": release.engine, "version": release.version, "variant": release.variant},
        "image": {"reference": image.reference, "id": image.id, "digests": list(image.digests)} if image else None,
        "server": url,
        "revision": labels.get("org.opencontainers.image.revision"),
        "series": {
            "sha256": labels.get("kimi-eagle3.series"),
            "patches": [patch["name"] for patch in series.get("patches", ())],
        },
        "locks": {
            **{f"{name}.txt": labels.get(f"kimi-eagle3.lock.{name}") for name in ("torch", "engine")},
            **(about.get("locks") or {}),
        },
        "base": about.get("base"),
        "contract": about.get("contract"),
        "coverage": {key: coverage[key] for key in COVERAGE} if coverage else None,
        "runs": [
            {**{key: value for key, value in asdict(run).items() if key != "rungs"}, "ok": ok(run.rungs),
             "rungs": [asdict(rung) for rung in run.rungs]} for run in runs
        ],
        "not_climbed": [
            {"run": run.name, "rung": rung.name, "why": rung.detail}
            for run in runs for rung in run.rungs if rung.status == "not climbed"
        ],
        "in_process": list(in_process),
        "twin": about["twin"] | {"of": labels.get(TWIN_OF)} if about.get("twin") else None,
        "needs_gpu": list(about.get("needs_gpu") or ()) if release.variant == "cpu" else [],
    }  # fmt: skip


def check(receipt: Mapping[str, Any]) -> None:
    """Hold a receipt against the schema, and its verdict against its runs. Raises Stop with the first thing wrong."""
    import jsonschema

    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    error = next(iter(sorted(validator.iter_errors(receipt), key=lambda e: list(map(str, e.absolute_path)))), None)
    if error is not None:
        where = "/".join(map(str, error.absolute_path)) or "the receipt"
        raise Stop(f"{where}: {error.message[:200]} (schemas/{SCHEMA.name})")
    for run in receipt["runs"]:
        held = ok([Rung(**rung) for rung in run["rungs"]])
        if run["ok"] != held:
            raise Stop(f"the run {run['pair']}, K = {run['k']} says ok = {run['ok']}, and its rungs say {held}")
    if receipt["ok"] != (bool(receipt["runs"]) and all(run["ok"] for run in receipt["runs"])):
        raise Stop(f"ok = {receipt['ok']} isn't what the runs say")


def write(path: Path, receipt: Mapping[str, Any]) -> None:
    """Write a receipt, whole or not at all. Raises Stop where it doesn't fit its schema or can't be written."""
    check(receipt)
    half = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            half = file.name
            file.write(json.dumps(receipt, indent=1, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(half, 0o644)
        os.replace(half, path)
    except OSError as error:
        raise Stop(f"the receipt {path} can't be written: {error.strerror}: name another with --receipt") from None
    finally:
        if half:
            Path(half).unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """A receipt that fits its schema. Raises Stop where there is none or it doesn't."""
    try:
        receipt = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise Stop(f"{path} is no receipt ({error}): `nox -s smoke-ENGINE` writes one") from None
    try:
        check(receipt)
    except Stop as stop:
        raise Stop(f"{path}: {stop}") from None
    return receipt
