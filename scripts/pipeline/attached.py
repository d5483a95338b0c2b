"""What is attached to an image in a registry: OCI referrers, or the tag `sha256-DIGEST` where a registry has none."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.pipeline import oci

EMPTY = b"{}"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"


@dataclass(frozen=True)
class Artifact:
    """A document to attach: its media type and its bytes."""

    kind: str
    data: bytes
    annotations: dict[str, str] = field(default_factory=dict)

    def manifest(self, subject: oci.Manifest) -> oci.Manifest:
        """The manifest that binds it to its subject."""
        empty = {"mediaType": EMPTY_TYPE, "digest": oci.digest(EMPTY), "size": len(EMPTY)}
        content = {
            "schemaVersion": 2,
            "mediaType": oci.MANIFEST,
            "artifactType": self.kind,
            "config": empty,
            "layers": [{"mediaType": self.kind, "digest": oci.digest(self.data), "size": len(self.data)}],
            "subject": subject.descriptor(),
            **({"annotations": self.annotations} if self.annotations else {}),
        }
        return oci.Manifest(oci.canonical(content), oci.MANIFEST)

    def entry(self, subject: oci.Manifest) -> dict[str, Any]:
        """Its line in a list of referrers."""
        more = {"annotations": self.annotations} if self.annotations else {}
        return self.manifest(subject).descriptor(artifactType=self.kind, **more)


def fallback(subject: str) -> str:
    """The tag that lists the referrers of a digest where a registry doesn't (distribution spec 1.1)."""
    return subject.replace(":", "-")


def attach(registry: oci.Registry, name: str, subject: oci.Manifest, artifacts: Sequence[Artifact]) -> None:
    """Attach documents to an image. What is attached already stays, and is not sent again. Raises Stop."""
    for artifact in artifacts:
        for blob in (EMPTY, artifact.data):
            if registry.has(name, oci.digest(blob)) is None:
                registry.upload(name, oci.digest(blob), blob)
        made = artifact.manifest(subject)
        registry.put(name, made.digest, made)
    listed = {entry["digest"] for entry in find(registry, name, subject.digest)}
    missing = [entry for one in artifacts if (entry := one.entry(subject))["digest"] not in listed]
    if missing:
        entries = sorted([*_by_tag(registry, name, subject.digest), *missing], key=lambda entry: str(entry["digest"]))
        index = {"schemaVersion": 2, "mediaType": oci.INDEX, "manifests": entries}
        registry.put(name, fallback(subject.digest), oci.Manifest(oci.canonical(index), oci.INDEX))


def find(registry: oci.Registry, name: str, subject: str) -> list[dict[str, Any]]:
    """The descriptors of what is attached to a digest, each once, sorted by digest."""
    entries = [*(registry.referrers(name, subject) or []), *_by_tag(registry, name, subject)]
    return [entry for _, entry in sorted({str(entry.get("digest")): entry for entry in entries}.items())]


def _by_tag(registry: oci.Registry, name: str, subject: str) -> list[dict[str, Any]]:
    index = registry.manifest(name, fallback(subject))
    return list(index.json().get("manifests") or []) if index else []


def read(registry: oci.Registry, name: str, subject: str, kind: str) -> list[bytes]:
    """The documents of a kind that are attached to a digest. Raises Stop where one isn't what its digest says."""
    found = []
    for entry in find(registry, name, subject):
        manifest = registry.manifest(name, str(entry.get("digest")))
        content = manifest.json() if manifest else {}
        if content.get("artifactType") == kind and (content.get("subject") or {}).get("digest") == subject:
            found += [registry.blob(name, str(layer["digest"])) for layer in content["layers"]]
    return found
