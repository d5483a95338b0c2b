"""Push an image: only one that has a receipt, by its digest first, then what belongs to it, and the tags at last.

The tags are `VERSION-eagle3-SERIES-INPUTS`, which never moves, and `VERSION`, which does. Stopped at any point, nothing
is tagged that isn't whole; run it again and it goes on. A commit that touches no input (documentation, tests) makes the
image that was released before, but for the revision in its labels: that is said, nothing is pushed, and no tag moves;
only where `VERSION` is on nothing, it is set. The Docker login of this user is used, and shown nowhere.
"""

import argparse
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.pipeline import attached, attest, containers, docker_or_podman, evidence, oci, pins, receipt, sink, smoke
from scripts.pipeline.say import Stop, main, note, step, timed

# With one of these, cosign has an identity to sign with and asks nobody.
IDENTITIES = ("SIGSTORE_ID_TOKEN", "ACTIONS_ID_TOKEN_REQUEST_TOKEN")


@dataclass(frozen=True)
class Place:
    """Where an image goes: a registry, a repository, and its two tags."""

    registry: oci.Registry
    name: str
    fixed: str
    moving: str

    def __str__(self) -> str:
        return f"{self.registry.host}/{self.name}"


def fixed_tag(version: str, labels: Mapping[str, str]) -> str:
    """The tag that never moves: version, series, all inputs (attest.inputs): `0.16.0-eagle3-0123456789ab-01234567`."""
    return f"{version}-eagle3-{labels.get(attest.SERIES, '')[:12]}-{attest.inputs(labels)[:8]}"


def repository(all_pins: pins.Pins, path: str, engine: str) -> str:
    """The repository of an engine's images below a path, which may be empty."""
    return f"{path}/{all_pins.image_name}-{engine}".lstrip("/")


def config_of(registry: oci.Registry, name: str, manifest: oci.Manifest) -> str:
    """The digest of an image's config. Raises Stop where the manifest is no image's."""
    config = manifest.json().get("config") or {}
    if not oci.DIGEST.fullmatch(str(config.get("digest"))):
        raise Stop(f"{registry.host}/{name}@{manifest.digest} is no image ({manifest.media_type})")
    return str(config["digest"])


def same_image(registry: oci.Registry, name: str, manifest: oci.Manifest, image_id: str) -> bool:
    """Whether a manifest is that of an image of this machine: engines know it by its config's digest, or by its own."""
    return image_id in (manifest.digest, config_of(registry, name, manifest))


def held(place: Place, image: receipt.Image) -> oci.Manifest | None:
    """The manifest at the tag that never moves, or None. Raises Stop where it is another image's."""
    manifest = place.registry.manifest(place.name, place.fixed)
    if manifest is None or same_image(place.registry, place.name, manifest, image.id):
        return manifest
    theirs = config_of(place.registry, place.name, manifest)
    labels, _ = labels_and_layers(place, manifest)
    differ = sorted(key for key in labels.keys() | image.labels.keys() if labels.get(key) != image.labels.get(key))
    raise Stop(
        f"{place}:{place.fixed} is taken by another image, {theirs[:19]} (this one is {image.id[:19]}; "
        f"{', '.join(differ) or 'no label'} differ), and it never moves: push the image that was released, or delete "
        "that tag in the registry yourself"
    )


def labels_and_layers(place: Place, manifest: oci.Manifest) -> tuple[dict[str, str], list[str]]:
    """The labels of an image in the registry, and the digests of the content of its layers, the lowest first."""
    config = _json(place.registry.blob(place.name, config_of(place.registry, place.name, manifest)))
    return (config.get("config") or {}).get("Labels") or {}, (config.get("rootfs") or {}).get("diff_ids") or []


def released(place: Place, image: receipt.Image, layers: Sequence[str]) -> oci.Manifest | None:
    """What holds the tag that never moves, where that isn't the image, but of the same inputs and layers; or None.

    `layers` are the image's, as `labels_and_layers` has them. Raises Stop where they alone differ.
    """
    manifest = place.registry.manifest(place.name, place.fixed)
    if manifest is None or same_image(place.registry, place.name, manifest, image.id):
        return None
    labels, theirs = labels_and_layers(place, manifest)
    if any(labels.get(name) != image.labels.get(name) for name in attest.INPUTS if name != attest.REVISION):
        return None
    if theirs != list(layers):
        raise Stop(
            f"{place}:{place.fixed} is taken by an image of the same inputs with other layers, {manifest.digest}, and "
            "it never moves: build with what made that one (docker or podman, its version, image.source_date_epoch)"
        )
    return manifest


def leave(place: Place, manifest: oci.Manifest) -> None:
    """Say that an image was released before, as this manifest, and where the moving tag is; set that only if absent.

    The moving tag stays on a later release: a commit of documentation on an earlier one's sources would set it back.
    Raises Stop where it is on nothing, and no receipt is attached.
    """
    revision = labels_and_layers(place, manifest)[0][attest.REVISION]
    done = f"{place}@{manifest.digest}"
    step(f"released already, from revision {revision[:12]} and the same inputs: {done}; nothing is pushed")
    now = place.registry.manifest(place.name, place.moving)
    if now is None:
        kinds = {entry["artifactType"] for entry in attached.find(place.registry, place.name, manifest.digest)}
        if attest.RECEIPT_TYPE not in kinds:
            raise Stop(f"{done} has no receipt, so {place.moving} isn't set: push the image of {revision[:12]} again")
        place.registry.put(place.name, place.moving, manifest)
        _read_back(place, place.moving, manifest)
        note(f"{place.moving} was on nothing, and is on it now")
    elif now.digest != manifest.digest:
        cure = f"to move it, push the image of {revision[:12]} itself"
        note(f"{place.moving} is on another image, {now.digest}, and stays there: {cure}")


def bring(engine: containers.ContainerEngine, all_pins: pins.Pins, place: Place, image: receipt.Image) -> oci.Manifest:
    """Store an image under its digest alone, and return its manifest, read back. Raises Stop."""
    path = place.name.rpartition("/")[0]
    others = {repository(all_pins, path, release.engine) for release in all_pins.releases} - {place.name}
    with timed(f"{place}: layers"):
        manifest, sent = sink.hand_over(engine, image.id, place.registry, place.name, sorted(others))
    total = sum(sent.sent.values()) + sum(sent.there.values())
    note(f"{len(sent.sent)} blobs sent, {len(sent.there)} were there: {sum(sent.sent.values())} of {total} bytes sent")
    if not same_image(place.registry, place.name, manifest, image.id):
        raise Stop(f"{engine} handed over another image than {image.id[:19]}: build it again, then push")
    place.registry.put(place.name, manifest.digest, manifest)
    _read_back(place, manifest.digest, manifest)
    return manifest


def _read_back(place: Place, reference: str, manifest: oci.Manifest) -> None:
    found = place.registry.manifest(place.name, reference)
    if found is None or found.digest != manifest.digest:
        has = found.digest if found else "nothing"
        raise Stop(
            f"{place}: {reference} holds {has} and not {manifest.digest}: somebody else pushes; look, then again"
        )


def sign(place: Place, manifest: oci.Manifest) -> str:
    """Sign a digest where cosign is installed and has a key or an identity. Says what was done. Raises Stop."""
    program = shutil.which("cosign")
    key = os.environ.get("COSIGN_KEY", "")
    if not program:
        return "not signed: cosign isn't installed"
    if not key and not any(os.environ.get(name) for name in IDENTITIES):
        return "not signed: cosign is installed, and has neither a key (COSIGN_KEY) nor an identity here"
    if f"{attached.fallback(manifest.digest)}.sig" in place.registry.tags(place.name):
        return "signed before"
    command = [program, "sign", "--yes", *(["--key", key] if key else [])]
    command += ["--allow-http-registry"] if place.registry.plain else []
    done = subprocess.run(
        [*command, f"{place}@{manifest.digest}"], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise Stop(f"cosign can't sign {place}@{manifest.digest}: {last[:300]}: see `cosign sign --help`")
    return f"signed with cosign ({'key' if key else 'identity'})"


def tag(place: Place, manifest: oci.Manifest, image: receipt.Image, before: oci.Manifest | None) -> None:
    """Set both tags, the fixed one first. `before` is what the moving one held when the push began. Raises Stop."""
    there = held(place, image)
    if there and there.digest != manifest.digest:
        raise Stop(f"{place}:{place.fixed} was set by somebody else meanwhile, to the same image: run it again")
    place.registry.put(place.name, place.fixed, manifest)
    _read_back(place, place.fixed, manifest)
    now = place.registry.manifest(place.name, place.moving)
    was, found = (one.digest if one else "nothing" for one in (before, now))
    if found not in (was, manifest.digest):
        raise Stop(
            f"{place}:{place.moving} was moved by somebody else meanwhile, from {was} to {found}: it stays there, and "
            f"{place.fixed} is set; run it again to move {place.moving} all the same"
        )
    if found != manifest.digest:
        place.registry.put(place.name, place.moving, manifest)
    _read_back(place, place.moving, manifest)


def push(
    engine: containers.ContainerEngine, all_pins: pins.Pins, release: pins.Release, image: receipt.Image, place: Place,
    speaks: evidence.Json,
) -> str:  # fmt: skip
    """Push an image for which a receipt speaks. Returns `HOST/NAME@DIGEST`. Raises Stop; run again, it goes on."""
    registry, name = place.registry, place.name
    step(f"{place}: {place.fixed}, {place.moving}")
    before = registry.manifest(name, place.moving)
    manifest = held(place, image)
    if manifest:
        note(f"{place.fixed} is there already: {manifest.digest}")
    else:
        manifest = bring(engine, all_pins, place, image)
    bill = oci.canonical(attest.sbom(release, all_pins.debian.suite))
    local = repository(all_pins, "", release.engine)
    epoch = all_pins.source_date_epoch
    statement = oci.canonical(attest.provenance(release, image.labels, local, manifest.digest, bill, epoch))
    documents = (
        attached.Artifact(attest.SBOM_TYPE, bill),
        attached.Artifact(attest.STATEMENT_TYPE, statement, {"in-toto.io/predicate-type": attest.PREDICATE}),
        attached.Artifact(attest.RECEIPT_TYPE, oci.canonical(speaks)),
    )
    step("attach: SBOM, provenance, receipt")
    attached.attach(registry, name, manifest, documents)
    note(sign(place, manifest))
    step(f"tag: {place.fixed}, {place.moving}")
    tag(place, manifest, image, before)
    confirm(place, manifest, image, documents)
    return f"{place}@{manifest.digest}"


def confirm(place: Place, manifest: oci.Manifest, image: receipt.Image, documents: Sequence[attached.Artifact]) -> None:
    """Read the registry's final state back: both tags, the config, what is attached. Raises Stop where it differs."""
    for name in (place.fixed, place.moving):
        _read_back(place, name, manifest)
    config = config_of(place.registry, place.name, manifest)
    place.registry.blob(place.name, config)
    listed = {entry["digest"] for entry in attached.find(place.registry, place.name, manifest.digest)}
    if missing := [one.kind for one in documents if one.manifest(manifest).digest not in listed]:
        raise Stop(f"{place}@{manifest.digest}: {missing[0]} isn't attached any more: somebody else pushes; run again")
    note(f"read back: both tags are on {manifest.digest}, its config is {config}, and the image tested is {image.id}")


def _json(data: bytes) -> dict[str, Any]:
    return oci.Manifest(data, "").json()


def job(argv: list[str]) -> None:
    """Push what the arguments choose."""
    parser = argparse.ArgumentParser(
        prog="nox -s push-ENGINE --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", metavar="ENGINE", help="given by the session: vllm or sglang")
    parser.add_argument("--registry", required=True, metavar="HOST/PATH", help="the repository comes below PATH")
    parser.add_argument("--version", help="the engine's version (default: the release that pins.toml marks)")
    parser.add_argument("--image", metavar="REF", help="another image of the release (default: its own name)")
    parser.add_argument("--receipt", type=Path, metavar="FILE", help="default: the best that this machine has for it")
    parser.add_argument("--plain-http", action="store_true", help="no TLS, to a registry that isn't this machine's own")
    options = parser.parse_args(argv)
    all_pins = pins.load()
    release = all_pins.release(options.engine, options.version)
    host, path = oci.split(options.registry)
    name = repository(all_pins, path, release.engine)
    asked = all_pins.push.level(f"{host}/{name}")
    engine = docker_or_podman.find()
    image = smoke.inspect(engine, options.image or all_pins.image(release))
    attest.check_labels(release, image.labels)
    twin = any((r.engine, r.version, r.variant) == (release.engine, release.version, "cpu") for r in all_pins.releases)
    speaks = evidence.find(image.id, image.labels, release, asked, twin, options.receipt)
    step(f"{image.reference} ({image.id[:19]}): its receipt reached {evidence.level(speaks, twin)}; asked is {asked}")
    registry = oci.connect(host, options.plain_http)
    place = Place(registry, name, fixed_tag(release.version, image.labels), release.version)
    if there := released(place, image, containers.layers(engine, image.id)):
        leave(place, there)
        return
    done = push(engine, all_pins, release, image, place, speaks)
    step(f"pushed: {done}\n    check:  nox -s verify -- {done}")


if __name__ == "__main__":
    main(job)
