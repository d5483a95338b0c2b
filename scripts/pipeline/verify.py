"""Check an image from its registry alone: that it is whole, and what is attached to it true of it.

Give HOST/NAME@DIGEST, or a tag, which is looked up and said. Nothing is pulled but manifests and small documents.
"""

import argparse
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scripts.pipeline import attached, attest, evidence, oci, pins, push, receipt, smoke
from scripts.pipeline.say import Stop, main, step

AGAIN = "push it again (`nox -s push-ENGINE`), or don't use it"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: `true` None where it can't be told here."""

    name: str
    true: bool | None
    detail: str
    cure: str = AGAIN


@dataclass(frozen=True)
class Image:
    """An image as its registry has it. `labels` are those of its config."""

    registry: oci.Registry
    name: str
    manifest: oci.Manifest
    config: Mapping[str, Any]

    @property
    def labels(self) -> dict[str, str]:
        return dict((self.config.get("config") or {}).get("Labels") or {})

    @property
    def ids(self) -> tuple[str, str]:
        """What an engine may know it by: its config's digest, and its own."""
        return str((self.manifest.json().get("config") or {}).get("digest")), self.manifest.digest


def parse(reference: str) -> tuple[str, str, str]:
    """Host, repository, and digest or tag of `HOST/NAME@DIGEST`, `HOST/NAME:TAG`. Raises Stop where it is none."""
    place, _, digest = reference.partition("@")
    match = re.fullmatch(r"(.+?/[^:]+?)(?::([A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?", place)
    if not match or (digest and not oci.DIGEST.fullmatch(digest)) or not (digest or match[2]):
        raise Stop(f"{reference!r} is no image in a registry: write HOST/NAME@sha256:<64 hex digits> or HOST/NAME:TAG")
    host, name = oci.split(match[1])
    return host, name, digest or match[2]


def manifest_and_config(image: Image) -> Check:
    """The config and the layers that the manifest names are there, with their sizes, and as many as the config has."""
    content = image.manifest.json()
    layers = content.get("layers") or []
    wanted = (image.config.get("rootfs") or {}).get("diff_ids") or []
    if len(layers) != len(wanted):
        return Check("manifest", False, f"{len(layers)} layers, and its config has {len(wanted)}")
    for layer in [content["config"], *layers]:
        size = image.registry.has(image.name, str(layer["digest"]))
        if size != layer["size"]:
            return Check("manifest", False, f"{layer['digest']} is {'missing' if size is None else f'of {size} bytes'}")
    total = sum(int(layer["size"]) for layer in layers)
    return Check("manifest", True, f"config {image.ids[0]}, {len(layers)} layers, {total} bytes")


def labels(image: Image) -> Check:
    """The labels that name what went in are there."""
    if missing := [name for name in (smoke.VERSION_LABEL, *attest.INPUTS) if not image.labels.get(name)]:
        return Check("labels", False, f"{', '.join(missing)} missing", "build it anew and push that")
    dirty = "; built with uncommitted changes" if image.labels[attest.REVISION].endswith("-dirty") else ""
    return Check(
        "labels", True, f"{image.labels[smoke.VERSION_LABEL]}, revision {image.labels[attest.REVISION]}{dirty}"
    )


def tags(image: Image) -> Check:
    """The tag that never moves is on this digest; where the moving one is, is said."""
    version = image.labels.get(smoke.VERSION_LABEL, "")
    fixed = push.fixed_tag(version, image.labels)
    at = {name: image.registry.manifest(image.name, name) for name in (fixed, version)} if version else {}
    found = {name: manifest.digest if manifest else "nothing" for name, manifest in at.items()}
    if found.get(fixed) != image.manifest.digest:
        return Check("tags", False, f"{fixed or 'its tag'} is on {found.get(fixed, 'nothing')}")
    if found[version] == "nothing":
        return Check("tags", False, f"{fixed} is here, and {version} on nothing: a push was not finished")
    here = "here" if found[version] == image.manifest.digest else f"on another image, {found[version]}"
    return Check("tags", True, f"{fixed} is here, {version} is {here}")


def _documents(image: Image, kind: str) -> list[dict[str, Any]]:
    found = attached.read(image.registry, image.name, image.manifest.digest, kind)
    return [oci.Manifest(data, kind).json() for data in found]


def receipts(image: Image, asked: str) -> Check:
    """A receipt is attached that fits the schema, speaks for this image, and reached what is asked for."""
    made = _documents(image, attest.RECEIPT_TYPE)
    if not made:
        return Check("receipt", False, "none is attached")
    reached = []
    for one in made:
        try:
            receipt.check(one)
        except (Stop, ValueError, KeyError, TypeError) as error:
            return Check("receipt", False, f"it doesn't fit: {str(error)[:200]}")
        if why := evidence.stranger(one, image.ids, image.labels):
            return Check("receipt", False, why)
        reached.append((evidence.level(one), str(one["when"])))
    got, when = max(reached, key=lambda entry: (entry[0].rung, entry[1]))
    cure = f"test it up to {asked}, and push it again"
    return Check("receipt", got.reaches(asked), f"{got}, {when}; asked is {asked}", cure)


def bill(image: Image) -> Check:
    """A bill of materials is attached: wheels by hash and Debian packages, of the locks that the labels name."""
    made = _documents(image, attest.SBOM_TYPE)
    for one in made:
        properties = {p.get("name"): p.get("value") for p in (one.get("metadata") or {}).get("properties") or []}
        for lock in (f"kimi-eagle3.lock.{name}" for name in attest.LOCKS):
            if properties.get(lock) != image.labels.get(lock):
                return Check("SBOM", False, f"it is of another {lock} than the image's label says")
        parts = [str(part.get("purl")) for part in one.get("components") or [] if isinstance(part, dict)]
        counted = {kind: sum(part.startswith(f"pkg:{kind}/") for part in parts) for kind in ("pypi", "deb")}
        if one.get("bomFormat") != "CycloneDX" or not all(counted.values()):
            return Check("SBOM", False, f"it has {counted['pypi']} wheels and {counted['deb']} Debian packages")
        bare = [p["name"] for p in one["components"] if p["purl"].startswith("pkg:pypi/") and not p.get("hashes")]
        if bare:
            return Check("SBOM", False, f"{bare[0]} has no hash")
    if not made:
        return Check("SBOM", False, "none is attached")
    return Check("SBOM", True, f"{counted['pypi']} wheels by hash, {counted['deb']} Debian packages")


def provenance(image: Image) -> Check:
    """A statement is attached whose subject is this digest, and whose inputs are those that the labels name."""
    made = [one for one in _documents(image, attest.STATEMENT_TYPE) if one.get("predicateType") == attest.PREDICATE]
    bills = {oci.digest(d) for d in attached.read(image.registry, image.name, image.manifest.digest, attest.SBOM_TYPE)}
    for one in made:
        subjects = [str((s.get("digest") or {}).get("sha256")) for s in one.get("subject") or []]
        if subjects != [image.manifest.digest.removeprefix("sha256:")]:
            return Check("provenance", False, f"its subject is {', '.join(subjects) or 'nothing'}, not this digest")
        needed = one["predicate"]["buildDefinition"]["resolvedDependencies"]
        held = {value for entry in needed for value in (entry.get("digest") or {}).values()}
        if bare := [str(entry.get("name")) for entry in needed if not entry.get("digest")]:
            return Check("provenance", False, f"its input {bare[0]} has no digest")
        says = {name: image.labels.get(name, "") for name in attest.INPUTS}
        if wrong := [name for name, value in says.items() if attest.bare(value) not in held]:
            return Check("provenance", False, f"it lacks what the label {wrong[0]} names")
        if not any(digest.removeprefix("sha256:") in held for digest in bills):
            return Check("provenance", False, "it names another SBOM than the one that is attached")
    if not made:
        return Check("provenance", False, "none is attached")
    return Check("provenance", True, f"{len(needed)} inputs by digest, as the labels say")


def signature(image: Image) -> Check:
    """A signature holds, where there is one, and cosign and a public key (COSIGN_PUBLIC_KEY) to check it with."""
    place = f"{image.registry.host}/{image.name}@{image.manifest.digest}"
    signed = f"{attached.fallback(image.manifest.digest)}.sig" in image.registry.tags(image.name) or any(
        "sigstore" in str(entry.get("artifactType"))
        for entry in attached.find(image.registry, image.name, image.manifest.digest)
    )
    program, key = shutil.which("cosign"), os.environ.get("COSIGN_PUBLIC_KEY", "")
    if key and not program:
        return Check("signature", False, "COSIGN_PUBLIC_KEY is set, and cosign isn't installed", "install cosign")
    if key and program:
        plain = ["--allow-http-registry"] if image.registry.plain else []
        command = [program, "verify", "--key", key, *plain, place]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        return Check("signature", done.returncode == 0, f"cosign and {key}: {last[:200]}", "don't use it")
    return Check("signature", None, "signed; not checked: set COSIGN_PUBLIC_KEY" if signed else "not signed")


def verify(registry: oci.Registry, name: str, reference: str, asked: str) -> tuple[str, list[Check]]:
    """The digest behind a reference, and every check of it. Raises Stop where there is no image."""
    manifest = registry.manifest(name, reference)
    if manifest is None:
        raise Stop(f"{registry.host}/{name} has no {reference}: `nox -s push-ENGINE` puts it there")
    config = push.config_of(registry, name, manifest)
    image = Image(registry, name, manifest, oci.Manifest(registry.blob(name, config), "").json())
    checks: dict[str, Callable[[], Check]] = {
        "manifest": lambda: manifest_and_config(image),
        "labels": lambda: labels(image),
        "tags": lambda: tags(image),
        "receipt": lambda: receipts(image, asked),
        "provenance": lambda: provenance(image),
        "SBOM": lambda: bill(image),
        "signature": lambda: signature(image),
    }
    return manifest.digest, [_guarded(name, check) for name, check in checks.items()]


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """A check, which is false where what it reads has another shape than its type."""
    try:
        return check()
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return Check(name, False, f"it has another shape than its type ({type(error).__name__}: {error})")


def job(argv: list[str]) -> None:
    """Verify the image that the arguments name, and print a table."""
    parser = argparse.ArgumentParser(
        prog="nox -s verify --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("image", metavar="IMAGE", help="HOST/NAME@sha256:..., or HOST/NAME:TAG")
    parser.add_argument("--level", choices=pins.LEVELS, help="default: what pins.toml asks for of that registry")
    parser.add_argument("--plain-http", action="store_true", help="no TLS, to a registry that isn't this machine's own")
    options = parser.parse_args(argv)
    host, name, reference = parse(options.image)
    asked = options.level or pins.load().push.level(f"{host}/{name}")
    digest, checks = verify(oci.connect(host, options.plain_http), name, reference, asked)
    step(f"{host}/{name}@{digest}" + (f" (from the tag {reference})" if reference != digest else ""))
    for check in checks:
        word = {True: "true", False: "FALSE", None: "-"}[check.true]
        print(f"{check.name:<11} {word:<5}  {check.detail}")
    if false := [check for check in checks if check.true is False]:
        raise Stop(f"{host}/{name}@{digest}: {false[0].name}: {false[0].detail}: {false[0].cure}")
    step("all of it holds")


if __name__ == "__main__":
    main(job)
