"""pins.toml as frozen dataclasses: each fact that goes into an image."""

import re
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.pipeline.say import Stop

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "pins.toml"
LEVELS = ("S3", "S4")  # what a registry may ask for; less shows nothing of a drafter


@dataclass(frozen=True)
class Debian:
    """The distribution that images are built from."""

    suite: str
    snapshot: str
    image: str
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Torch:
    """A torch stack: torch, triton and the nvidia wheels of one CUDA line."""

    version: str
    cuda: str
    requirements: tuple[str, ...]
    nvcc: bool

    @property
    def lock(self) -> Path:
        return ROOT / "locks" / f"torch-{self.version}.txt"


@dataclass(frozen=True)
class Model:
    """A model on a hub. `revision` is a commit, or None with the reason in `unpinned`."""

    repo: str
    revision: str | None
    unpinned: str = ""


@dataclass(frozen=True)
class Published:
    """An acceptance length that somebody published: with which prompts, at K draft tokens, and where it stands.

    `kind` is the kind of our own prompts that comes nearest (scripts/pipeline/prompts.toml).
    """

    prompts: str
    kind: str
    k: int
    acceptance: float
    source: str


@dataclass(frozen=True)
class Drafter:
    """An EAGLE-3 drafter and the number of draft tokens that it is served with.

    `floor` is the acceptance length at `draft_tokens` below which something is wrong; None where none is pinned.
    """

    name: str
    model: Model
    architecture: str
    draft_tokens: int
    floor: float | None = None
    published: tuple[Published, ...] = ()


@dataclass(frozen=True)
class Serve:
    """What an image serves with when it is told nothing else. A flag that is `True` has no value.

    `drafter_flags` go with a drafter, and not without one.
    """

    port: int
    flags: dict[str, Any]
    drafter_flags: dict[str, Any]
    env: dict[str, str]


@dataclass(frozen=True)
class Release:
    """An engine at a version, in one variant: `cuda`, or `cpu` (the twin).

    `serving_objects` are globs below site-packages of the shared objects that serving loads. `swapped` are the files
    that a twin takes from `package`, each with the reason; empty for what isn't one.
    """

    engine: str
    version: str
    variant: str
    package: str
    torch: Torch
    drafter: Drafter
    default: bool
    serve: Serve
    serving_objects: tuple[str, ...]
    swapped: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.engine} {self.version}" + ("" if self.variant == "cuda" else f" ({self.variant})")

    @property
    def tag(self) -> str:
        """The tag of its image: the engine's version, `-cpu` for the twin."""
        return self.version + ("" if self.variant == "cuda" else f"-{self.variant}")

    @property
    def lock(self) -> Path:
        return ROOT / "locks" / f"{self.engine}-{self.tag}.txt"

    @property
    def series(self) -> Path:
        return ROOT / "patches" / self.engine / self.version


@dataclass(frozen=True)
class Policy:
    """How far up the smoke ladder an image must have come for a registry: `HOST/PATH` prefixes, and for all others."""

    otherwise: str
    registries: tuple[tuple[str, str], ...]

    def level(self, place: str) -> str:
        """The rung for `HOST[/PATH]`: that of the longest prefix, cut at a slash."""
        fitting = [(prefix, rung) for prefix, rung in self.registries if f"{place}/".startswith(f"{prefix}/")]
        return max(fitting, key=lambda entry: len(entry[0]), default=("", self.otherwise))[1]


@dataclass(frozen=True)
class Pins:
    """All of pins.toml."""

    image_name: str
    source_date_epoch: int
    disk_gb: int
    debian: Debian
    python: str
    platform: str
    installer: str
    arch: str
    gpu_count: int
    gpu_name: str
    target: Model
    target_gb: int
    drafters: tuple[Drafter, ...]
    releases: tuple[Release, ...]
    push: Policy

    def release(self, engine: str, version: str | None = None, variant: str = "cuda") -> Release:
        """The release of `engine` at `version` (default: the one that is marked).

        Raises Stop, naming what there is.
        """
        of_engine = [r for r in self.releases if r.engine == engine and r.variant == variant]
        for release in of_engine:
            if release.version == version or (version is None and release.default):
                return release
        known = ", ".join(r.version for r in of_engine) or "none"
        asked = f"{engine} {version or '(default)'}, variant {variant}"
        raise Stop(f"pins.toml has no release {asked}; it has: {known} (patches/README.md tells how to add one)")

    def image(self, release: Release) -> str:
        """`NAME-ENGINE:TAG`, the reference of a release's image on this machine."""
        return f"{self.image_name}-{release.engine}:{release.tag}"


def _model(data: dict[str, Any], where: str) -> Model:
    model = Model(data["repo"], data.get("revision"), data.get("unpinned", ""))
    if model.revision is None and not model.unpinned:
        raise Stop(f"{where} has neither a revision nor the reason why it is unpinned")
    if model.revision is not None and not re.fullmatch(r"[0-9a-f]{40}", model.revision):
        raise Stop(f"{where}: revision {model.revision!r} is not a full commit (40 hex digits)")
    return model


def _drafter(name: str, data: dict[str, Any]) -> Drafter:
    published = tuple(Published(**entry) for entry in data.get("published", ()))
    k, floor = data["draft_tokens"], data.get("floor")
    for value, at, what in [(floor, k, "floor"), *((p.acceptance, p.k, f"published {p.prompts!r}") for p in published)]:
        if value is not None and not 1 < value <= at + 1:
            raise Stop(
                f"drafters.{name}: {what} is {value}, and {at} draft tokens give more than 1 and at most {at + 1}"
            )
    return Drafter(name, _model(data, f"drafters.{name}"), data["architecture"], k, floor, published)


def _policy(data: dict[str, Any]) -> Policy:
    policy = Policy(data["level"], tuple((entry["prefix"], entry["level"]) for entry in data.get("registry", ())))
    for prefix, rung in [("push", policy.otherwise), *policy.registries]:
        if rung not in LEVELS:
            raise Stop(f"{prefix}: level {rung!r} is none of {', '.join(LEVELS)}")
    return policy


def _parse(data: dict[str, Any]) -> Pins:
    torch = {v: Torch(v, t["cuda"], tuple(t["requirements"]), t["nvcc"]) for v, t in data["torch"].items()}
    drafters = {name: _drafter(name, d) for name, d in data["drafters"].items()}
    releases = []
    for r in data["release"]:
        common = data["serve"][r["engine"]]
        flags = {"tensor-parallel-size": data["gpu"]["count"], **common["flags"], **r.get("flags", {})}
        variants = {"cuda": r | {"package": r["engine"], "swapped": {}, "flags": flags}}
        variants["cuda"]["env"] = common["env"] | r.get("env", {})
        if "cpu" in r:
            # The twin serves small models on a CPU: its flags are its own, not those for GPUs.
            objects = [path for path in r["cpu"]["swapped"] if path.endswith(".so")]
            variants["cpu"] = r["cpu"] | {"serving_objects": objects}
        for variant, own in variants.items():
            releases.append(
                Release(
                    engine=r["engine"],
                    version=r["version"],
                    variant=variant,
                    package=own["package"],
                    torch=torch[r["torch"]],
                    drafter=drafters[r["drafter"]],
                    default=r.get("default", False),
                    serve=Serve(common["port"], own["flags"], common.get("drafter_flags", {}), own["env"]),
                    serving_objects=tuple(own["serving_objects"]),
                    swapped=dict(own["swapped"]),
                )
            )
    names = [(r.engine, r.version, r.variant) for r in releases]
    if twice := sorted({r for r in names if names.count(r) > 1}):
        raise Stop(f"{' '.join(twice[0])} is there twice")
    for engine in {r.engine for r in releases}:
        marked = [r.version for r in releases if r.engine == engine and r.variant == "cuda" and r.default]
        if len(marked) != 1:
            raise Stop(f"{engine} has {len(marked)} releases with `default = true` ({', '.join(marked)}): mark one")
    for key, value in (
        ("image.source_date_epoch", data["image"]["source_date_epoch"]),
        ("image.disk_gb", data["image"]["disk_gb"]),
    ):
        if type(value) is not int or value <= 0:
            raise Stop(f"{key} = {value!r} is no positive number")
    for release in releases:
        if not isinstance(release.version, str):
            raise Stop(f"the version {release.version!r} of a release is no text: write it in quotes")
    debian = data["debian"]
    if not re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", debian["image"]):
        raise Stop(f"debian.image {debian['image']!r} is not pinned: write NAME:TAG@sha256:<64 hex digits>")
    return Pins(
        data["image"]["name"],
        data["image"]["source_date_epoch"],
        data["image"]["disk_gb"],
        Debian(debian["suite"], debian["snapshot"], debian["image"], tuple(debian["packages"])),
        data["python"]["version"],
        data["python"]["platform"],
        data["python"]["installer"],
        data["gpu"]["arch"],
        data["gpu"]["count"],
        data["gpu"]["name"],
        _model(data["target"], "target"),
        data["target"]["size_gb"],
        tuple(drafters.values()),
        tuple(releases),
        _policy(data["push"]),
    )


def load(path: Path = PINS) -> Pins:
    """Read and check pins.toml.

    Raises Stop with the file and the key that is missing or wrong.
    """
    try:
        return _parse(tomllib.loads(path.read_text()))
    except KeyError as key:
        raise Stop(f"{path.name} lacks the key or the entry {key}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, TypeError, AttributeError) as error:
        raise Stop(f"{path.name}: {error}") from None
    except Stop as stop:
        raise Stop(f"{path.name}: {stop}") from None


def record(all_pins: Pins, release: Release) -> dict[str, Any]:
    """What the image of a release knows of pins.toml (release.json). Another release's entry changes nothing in it."""
    drafter = release.drafter
    return {
        "engine": release.engine,
        "version": release.version,
        "variant": release.variant,
        "python": all_pins.python,
        "torch": release.torch.version,
        "cuda": release.torch.cuda,
        "nvcc": release.torch.nvcc,
        "arch": all_pins.arch,
        "gpu": {"count": all_pins.gpu_count, "name": all_pins.gpu_name},
        "target": {**asdict(all_pins.target), "size_gb": all_pins.target_gb},
        "drafter": {
            **asdict(drafter.model),
            "name": drafter.name,
            "architecture": drafter.architecture,
            "draft_tokens": drafter.draft_tokens,
        },
        "serve": asdict(release.serve),
        "serving_objects": list(release.serving_objects),
    }
