"""Which receipt speaks for an image, and how far up the ladder it got. Pure but for the folder of receipts."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.pipeline import ladder, pins, receipt
from scripts.pipeline.attest import SERIES
from scripts.pipeline.say import Stop
from scripts.pipeline.smoke import VERSION_LABEL as VERSION

KINDS = {"llama", "mla"}  # of drafters, that the oracle in a process has to cover
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Level:
    """How far an image came: `rung` of ladder.RUNGS, or empty; `how` in words."""

    rung: str
    how: str

    def reaches(self, asked: str) -> bool:
        return bool(self.rung) and ladder.RUNGS.index(self.rung) >= ladder.RUNGS.index(asked)

    def __str__(self) -> str:
        return f"{self.rung or 'nothing'}{self.how and f' ({self.how})'}"


def level(made: Json, twin: bool = False) -> Level:
    """How far up the ladder a receipt says that its image came: all of its runs together.

    The oracle in a process counts as S3 where no server could be started, and the release has no `twin` to start one.
    """
    runs = [{rung["name"]: rung["status"] for rung in run["rungs"]} for run in made["runs"]]
    hardware = " and ".join(sorted({run["hardware"] for run in made["runs"]}))
    where = f"on {'the twin, ' if made['release']['variant'] == 'cpu' else ''}{hardware}"
    if made["ok"]:
        pairs = {run["pair"]: rungs for run, rungs in zip(made["runs"], runs, strict=True)}
        if made["release"]["variant"] == "cuda" and pairs.get("pinned", {}).get("S4") == "passed":
            return Level("S4", f"the pinned pair {where}")
        return Level("S3", f"{' and '.join(sorted(pairs))} {where}")
    if any("failed" in run.values() for run in runs):
        return Level("", "a rung failed")
    inside = made.get("in_process") or []
    if {one["drafter"] for one in inside if one["runs"]} == KINDS and all(one["ok"] for one in inside):
        if not twin:
            return Level("S3", "the oracle in a process, without a server")
        return Level("", "the oracle in a process alone, and this release has a twin")
    reached = [name for name in ladder.RUNGS if all(run[name] == "passed" for run in runs)]
    return Level(reached[-1] if reached else "", where)


def stranger(made: Json, image_ids: Collection[str], labels: Json) -> str:
    """Why a receipt doesn't speak for an image, in words; empty where it does.

    It does where it is of the image, which engines know by any of `image_ids`, or of the twin that was made of it, and
    says nothing else of it than its `labels`; and where the contract held.
    """
    if any(run["pair"] == "own" for run in made["runs"]):
        return "it is of somebody's own pair of models"
    if made["image"] is None:
        return f"it is of the server {made['server']}, not of an image"
    if made["image"]["id"] not in image_ids:
        if made["release"]["variant"] != "cpu":
            return f"it is of another image, {made['image']['id'][:19]}"
        if not made.get("twin"):
            return "it is of a twin, and doesn't say of which image"
        if made["twin"]["of"] not in image_ids:
            return f"it is of the twin of another image, {made['twin']['of'][:19]}"
    says = {"version": (made["release"]["version"], VERSION), "series": (made["series"]["sha256"], SERIES)}
    if differ := [name for name, (value, label) in says.items() if value != labels.get(label)]:
        return f"it names another {' and '.join(differ)} than the image's labels"
    contract = made["contract"] or {"ok": False, "checks": ()}
    if not contract["ok"] or not all(check["ok"] for check in contract["checks"]):
        return "the contract didn't hold in it"
    return ""


def find(image_id: str, labels: Json, release: pins.Release, asked: str, twin: bool, given: Path | None) -> Json:
    """The receipt that speaks for an image: the one `given`, or the best of this machine's.

    `twin`: the release has one, so the oracle in a process is not enough. Raises Stop where none reaches `asked`.
    """
    cure = f"`nox -s smoke-{release.engine} -- --version {release.version}" + (" --gpus`" if asked == "S4" else "`")
    if asked != "S4" and not twin:
        cure = f"`nox -s build-{release.engine} -- --version {release.version}`, whose last act makes one"
    if given:
        made = receipt.read(given)
        if why := stranger(made, [image_id], labels):
            raise Stop(f"the receipt {given} doesn't speak for {image_id[:19]}: {why}: {cure}")
        found: list[Json] = [made]
    else:
        folder = receipt.path_for(image_id).parent
        readable = [one for path in sorted(folder.glob("*.json")) if (one := _readable(path))]
        found = [one for one in readable if not stranger(one, [image_id], labels)]
    if not found:
        raise Stop(f"there is no receipt for {release.name}, image {image_id[:19]}, so nothing was shown of it: {cure}")
    best = max(found, key=lambda made: (level(made, twin).rung, made["when"]))
    if not (got := level(best, twin)).reaches(asked):
        raise Stop(f"the receipt of {image_id[:19]} reached {got}, and the registry asks for {asked}: {cure}")
    return best


def _readable(path: Path) -> Json | None:
    """A receipt of this machine's folder; None where it is of another time's schema."""
    try:
        return receipt.read(path)
    except (Stop, ValueError):
        return None
