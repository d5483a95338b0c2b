"""Verifying from the registry alone: what is false about an image is found, each kind of it."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pushing
import pytest
import registries
from pushing import MOVING, NAME, pushed

from scripts.pipeline import attached, attest, lockfile, oci, receipt, verify
from scripts.pipeline.say import Stop

pytestmark = [pytest.mark.image, pytest.mark.usefixtures("quick")]
REPOSITORY = Path("data/docker/registry/v2/repositories", NAME)


@pytest.fixture
def place(address: str, image: receipt.Image, proof: Path) -> Iterator[tuple[oci.Registry, oci.Manifest]]:
    """A registry with the image, and its manifest."""
    pushed(address, image, "--receipt", proof)
    registry = oci.connect(address)
    manifest = registry.manifest(NAME, MOVING)
    assert manifest
    yield registry, manifest


def false(registry: oci.Registry, reference: str) -> list[str]:
    return [check.name for check in verify.verify(registry, NAME, reference, "S3")[1] if check.true is False]


def again(
    registry: oci.Registry, manifest: oci.Manifest, kind: str, change: Callable[[dict[str, object]], None]
) -> None:
    """Attach a document like the one that is there, but for a change."""
    content = json.loads(attached.read(registry, NAME, manifest.digest, kind)[0])
    change(content)
    attached.attach(registry, NAME, manifest, [attached.Artifact(kind, oci.canonical(content))])


def test_a_whole_image_is_true_in_every_check(place: tuple[oci.Registry, oci.Manifest]) -> None:
    registry, manifest = place
    digest, checks = verify.verify(registry, NAME, MOVING, "S3")
    assert digest == manifest.digest
    assert {check.name: check.true for check in checks} == {
        "manifest": True, "labels": True, "tags": True, "receipt": True, "provenance": True, "SBOM": True,
        "signature": None,
    }  # fmt: skip
    wheels, debian = (
        sum(
            len(lockfile.packages(path))
            for name, path in attest.locks(pushing.RELEASE).items()
            if (name == "debian") == kind
        )
        for kind in (False, True)
    )
    assert checks[5].detail == f"{wheels} wheels by hash, {debian} Debian packages"


DOCUMENTS = {
    "a receipt of another image": (
        "receipt",
        attest.RECEIPT_TYPE,
        lambda r: r["image"].update(id=f"sha256:{'1' * 64}"),
    ),
    "a receipt that doesn't fit its schema": ("receipt", attest.RECEIPT_TYPE, lambda r: r.update(extra=1)),
    "a receipt whose verdict isn't that of its rungs": ("receipt", attest.RECEIPT_TYPE, lambda r: r.update(ok=False)),
    "a provenance of another digest": (
        "provenance",
        attest.STATEMENT_TYPE,
        lambda s: s["subject"][0]["digest"].update(sha256="1" * 64),
    ),
    "a provenance that lacks an input": (
        "provenance",
        attest.STATEMENT_TYPE,
        lambda s: s["predicate"]["buildDefinition"]["resolvedDependencies"].pop(1),
    ),
    "a provenance without the Dockerfile of the stack": (
        "provenance",
        attest.STATEMENT_TYPE,
        lambda s: s["predicate"]["buildDefinition"].update(
            resolvedDependencies=[
                entry
                for entry in s["predicate"]["buildDefinition"]["resolvedDependencies"]
                if entry["name"] != "Dockerfile.stack"
            ]
        ),
    ),
    "a provenance of another shape": ("provenance", attest.STATEMENT_TYPE, lambda s: s.update(predicate=[])),
    "an SBOM of other locks": (
        "SBOM",
        attest.SBOM_TYPE,
        lambda b: b["metadata"]["properties"][0].update(value="1" * 64),
    ),
    "an SBOM without wheels": (
        "SBOM",
        attest.SBOM_TYPE,
        lambda b: b.update(components=[c for c in b["components"] if "pypi" not in c["purl"]]),
    ),
    "an SBOM with a wheel without hashes": ("SBOM", attest.SBOM_TYPE, lambda b: b["components"][0].pop("hashes")),
}


@pytest.mark.parametrize("case", DOCUMENTS)
def test_a_document_that_is_false_is_found(place: tuple[oci.Registry, oci.Manifest], case: str) -> None:
    check, kind, change = DOCUMENTS[case]
    again(*place, kind, change)
    assert false(*(place[0], place[1].digest)) == [check]


def test_what_is_missing_is_found(place: tuple[oci.Registry, oci.Manifest], tmp_path: Path) -> None:
    registry, manifest = place
    moving = tmp_path / REPOSITORY / "_manifests/tags" / MOVING
    shutil.move(moving, tmp_path / "kept")
    assert false(registry, manifest.digest) == ["tags"]
    shutil.move(tmp_path / "kept", moving)
    listed = tmp_path / REPOSITORY / "_manifests/tags" / attached.fallback(manifest.digest)
    shutil.move(listed, tmp_path / "kept")
    assert false(registry, manifest.digest) == ["receipt", "provenance", "SBOM"]
    shutil.move(tmp_path / "kept", listed)
    layer = manifest.json()["layers"][0]["digest"]
    shutil.rmtree(tmp_path / REPOSITORY / "_layers/sha256" / layer.removeprefix("sha256:"))
    assert false(registry, manifest.digest) == ["manifest"]


def test_a_fixed_tag_that_was_moved_is_found_and_a_moving_one_may(
    place: tuple[oci.Registry, oci.Manifest], image: receipt.Image, capsys: pytest.CaptureFixture[str]
) -> None:
    registry, manifest = place
    other = pushing.put_other(registry.host, MOVING)
    assert false(registry, manifest.digest) == []
    verify.job([f"{registry.host}/{NAME}@{manifest.digest}"])
    assert f"{MOVING} is on another image, {other}" in capsys.readouterr().out
    pushing.put_other(registry.host, pushing.fixed(image))
    with pytest.raises(Stop, match=rf"{manifest.digest}: tags: {pushing.fixed(image)} is on {other}") as stop:
        verify.job([f"{registry.host}/{NAME}@{manifest.digest}"])
    assert "\n" not in str(stop.value)
    assert "tags        FALSE" in capsys.readouterr().out


def test_an_image_of_other_labels_is_not_what_is_attached_to_it(
    place: tuple[oci.Registry, oci.Manifest], image: receipt.Image
) -> None:
    """The same documents on an image whose labels name another context."""
    registry, manifest = place
    config = json.loads(registry.blob(NAME, image.id))
    config["config"]["Labels"][attest.CONTEXT] = "2" * 64
    data = oci.canonical(config)
    registry.upload(NAME, oci.digest(data), data)
    content = manifest.json()
    content["config"] |= {"digest": oci.digest(data), "size": len(data)}
    forged = oci.Manifest(oci.canonical(content), manifest.media_type)
    registry.put(NAME, forged.digest, forged)
    for kind in (attest.SBOM_TYPE, attest.STATEMENT_TYPE, attest.RECEIPT_TYPE):
        document = attached.read(registry, NAME, manifest.digest, kind)[0]
        attached.attach(registry, NAME, forged, [attached.Artifact(kind, document)])
    assert false(registry, forged.digest) == ["tags", "receipt", "provenance"]


def test_an_image_that_is_not_there_or_no_image_is_one_line(place: tuple[oci.Registry, oci.Manifest]) -> None:
    registry, manifest = place
    for reference, match in (
        (f"{NAME}:absent", "has no absent"),
        (f"{NAME}@sha256:{'0' * 64}", "has no sha256:0000"),
        (f"{NAME}:{attached.fallback(manifest.digest)}", "is no image"),
        (NAME, "is no image in a registry: write HOST/NAME@sha256"),
    ):
        with pytest.raises(Stop, match=match) as stop:
            verify.job([f"{registry.host}/{reference}"])
        assert "\n" not in str(stop.value)


def test_a_registry_with_the_referrers_api_lists_what_is_attached_and_gets_no_tag_for_it(
    address: str, image: receipt.Image, proof: Path
) -> None:
    with registries.proxied(address) as proxy:
        proxy.referrers = True
        pushed(proxy.address, image, "--receipt", proof)
        assert registries.tags(address, NAME) == [MOVING, pushing.fixed(image)]
        registry = oci.connect(proxy.address)
        assert false(registry, MOVING) == []
        proxy.listed.clear()
        assert false(registry, MOVING) == ["receipt", "provenance", "SBOM"]


def test_with_cosign_and_a_key_an_image_is_signed_before_it_is_tagged_and_the_signature_is_checked(
    address: str, image: receipt.Image, proof: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A stand-in for cosign, which notes how it is called."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/cosign"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\necho it says no >&2\nexit $(cat {tmp_path}/exit)\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    pushed(address, image, "--receipt", proof)
    assert "not signed: cosign is installed, and has neither a key" in capsys.readouterr().out
    monkeypatch.setenv("COSIGN_KEY", "my.key")
    (tmp_path / "exit").write_text("1")
    shutil.rmtree(tmp_path / REPOSITORY / "_manifests/tags")
    with pytest.raises(Stop, match=r"cosign can't sign .*: it says no"):
        pushed(address, image, "--receipt", proof)
    assert set(pushing.state(address)[0]) == set()
    (tmp_path / "exit").write_text("0")
    pushed(address, image, "--receipt", proof)
    registry = oci.connect(address)
    manifest = registry.manifest(NAME, MOVING)
    assert manifest
    called = (tmp_path / "called").read_text().splitlines()
    assert called[-1] == f"sign --yes --key my.key --allow-http-registry {address}/{NAME}@{manifest.digest}"
    monkeypatch.setenv("COSIGN_PUBLIC_KEY", "my.pub")
    assert false(registry, MOVING) == []
    (tmp_path / "exit").write_text("1")
    assert false(registry, MOVING) == ["signature"]
