"""What goes with an image: its bill of materials (CycloneDX) and its provenance (SLSA in an in-toto statement).

Pure functions of the checkout and the image's labels: the same image gives the same bytes.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.pipeline import base, files, lockfile, oci, pins, series
from scripts.pipeline.say import Stop

SBOM_TYPE = "application/vnd.cyclonedx+json"
STATEMENT_TYPE = "application/vnd.in-toto+json"
RECEIPT_TYPE = "application/vnd.kimi-eagle3.receipt+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:kimi-eagle3:dockerfile:1"
BUILDER = "urn:kimi-eagle3:a-users-machine"
LOCKS = ("torch", "engine", "tools", "debian")
STACK, DOCKERFILE, CONTEXT = "kimi-eagle3.stack", "kimi-eagle3.dockerfile", "kimi-eagle3.context"
REVISION = "org.opencontainers.image.revision"
BASE = "org.opencontainers.image.base.digest"
SERIES = "kimi-eagle3.series"
# The labels that name an input of the build by its digest.
INPUTS = (BASE, SERIES, STACK, DOCKERFILE, CONTEXT, REVISION, *(f"kimi-eagle3.lock.{name}" for name in LOCKS))
# A wheel's requirement with its hashes: one for each platform that it is published for.
_WHEEL = re.compile(
    r"^([A-Za-z0-9][A-Za-z0-9.+_-]*)==([^\s;\\=]+)((?: *\\\n +--hash=sha256:[0-9a-f]{64})+)", re.MULTILINE
)
Json = dict[str, Any]


def locks(release: pins.Release) -> dict[str, Path]:
    """The four locks of an image, by the names that it knows them under."""
    paths = (release.torch.lock, release.lock, pins.ROOT / "locks" / "tools.txt", base.LOCK)
    return dict(zip(LOCKS, paths, strict=True))


def dockerfiles(release: pins.Release) -> dict[str, Path]:
    """The two Dockerfiles that an image is made of, in the order of their stages, by the labels that name them."""
    return {STACK: pins.ROOT / "Dockerfile.stack", DOCKERFILE: pins.ROOT / f"Dockerfile.{release.engine}"}


def input_labels(release: pins.Release, context: Path) -> dict[str, str]:
    """The labels that name every input of a build by its sha256. `context` is the folder that the builder gets."""
    return {
        SERIES: series.digest(series.load(release.series)),
        **{f"kimi-eagle3.lock.{name}": files.sha256(path) for name, path in locks(release).items()},
        **{label: files.sha256(path) for label, path in dockerfiles(release).items()},
        CONTEXT: files.tree(context),
    }


def inputs(labels: Mapping[str, str]) -> str:
    """The sha256 of all that goes into an image, in hex. The revision is left out: a commit may touch no input.

    It is that of a line `LABEL=VALUE` for each other label of INPUTS, sorted by label, each ended by a newline.
    """
    lines = (f"{name}={labels.get(name, '')}\n" for name in sorted(set(INPUTS) - {REVISION}))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_labels(release: pins.Release, labels: Mapping[str, str]) -> None:
    """Hold an image's labels against this checkout, of which its attestations are made. Raises Stop."""
    again = f"`nox -s build-{release.engine} -- --version {release.version}` builds it anew"
    if missing := [name for name in INPUTS if not labels.get(name)]:
        raise Stop(f"the image of {release.name} doesn't say what went in ({', '.join(missing)}): {again}")
    here = {f"kimi-eagle3.lock.{name}": files.sha256(path) for name, path in locks(release).items()}
    here[SERIES] = series.digest(series.load(release.series))
    here["org.opencontainers.image.version"] = release.tag
    if other := [name for name, value in here.items() if labels.get(name) != value]:
        cure = f"check out {labels[REVISION][:12]}, or {again}"
        raise Stop(f"the image of {release.name} was built from others than are here ({', '.join(other)}): {cure}")


def sbom(release: pins.Release, suite: str) -> Json:
    """The bill of materials: every wheel by name, version and hash, every Debian package by version.

    It names no image, since all with the same locks share it: the referrer that holds it does. A wheel that is
    published for several platforms has several hashes in the lock, and any one of them may be the file. `suite` is
    Debian's.
    """
    components: list[Json] = []
    for name, path in locks(release).items():
        lockfile.packages(path)  # whole, or Stop
        text = path.read_text()
        if name == "debian":
            for package, version in sorted(lockfile.packages(path).items()):
                ref = f"pkg:deb/debian/{package.replace('+', '%2B')}@{version.replace('+', '%2B')}?distro={suite}"
                components.append(_component(package, version, ref, ()))
            continue
        found = _WHEEL.findall(text)
        if len(found) != len(lockfile.packages(path)):
            raise Stop(f"locks/{path.name} has packages without a hash: run `nox -s lock`")
        for package, version, hashes in found:
            ref = f"pkg:pypi/{re.sub(r'[-_.]+', '-', package).lower()}@{version.replace('+', '%2B')}"
            components.append(_component(package, version, ref, re.findall(r"sha256:([0-9a-f]{64})", hashes)))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {"type": "container", "name": f"kimi-eagle3 {release.engine}", "version": release.tag},
            "properties": [
                {"name": f"kimi-eagle3.lock.{name}", "value": files.sha256(path)}
                for name, path in locks(release).items()
            ],
        },
        "components": components,
    }


def _component(name: str, version: str, ref: str, hashes: Sequence[str]) -> Json:
    entry: Json = {"type": "library", "bom-ref": ref, "name": name, "version": version, "purl": ref}
    return entry | ({"hashes": [{"alg": "SHA-256", "content": one} for one in hashes]} if hashes else {})


def provenance(
    release: pins.Release, labels: Mapping[str, str], name: str, image: str, sbom: bytes, epoch: int
) -> Json:
    """The statement of how an image came to be: every input by its digest.

    `image` is the manifest's digest, `sbom` the bill's bytes: it has the wheels' hashes, and the locks bind them.
    """
    needed: list[Json] = [
        _input(labels.get("org.opencontainers.image.base.name", "base"), labels[BASE]),
        *(_input(f"locks/{path.name}", labels[f"kimi-eagle3.lock.{lock}"]) for lock, path in locks(release).items()),
        _input("sbom", oci.digest(sbom), mediaType=SBOM_TYPE),
        *(_input(path.name, labels[label]) for label, path in dockerfiles(release).items()),
        _input("context", labels[CONTEXT]),
        _input(f"patches/{release.engine}/{release.version}", labels[SERIES]),
    ]
    folder = series.load(release.series)
    needed += [
        _input(f"patches/{release.engine}/{release.version}/{patch}", oci.digest(folder[patch]))
        for patch in series.entries(folder["series"])
    ]
    dirty = labels[REVISION].endswith("-dirty")
    revision = {"name": "revision", "digest": {"gitCommit": bare(labels[REVISION])}}
    needed.append({**revision, "annotations": {"uncommitted changes": dirty}})
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": image.removeprefix("sha256:")}}],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"engine": release.engine, "tag": release.tag},
                "internalParameters": {"SOURCE_DATE_EPOCH": epoch},
                "resolvedDependencies": needed,
            },
            "runDetails": {"builder": {"id": BUILDER}},
        },
    }


def bare(label: str) -> str:
    """A digest as a label has it, without what is around the hex digits."""
    return label.removeprefix("sha256:").removesuffix("-dirty")


def _input(name: str, digest: str, **more: Any) -> Json:
    return {"name": name, "digest": {"sha256": bare(digest)}, **more}
