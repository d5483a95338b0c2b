"""The bill of materials and the provenance: what is in them, and that the same image gives the same bytes."""

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from scripts.pipeline import attest, files, lockfile, oci, pins, series
from scripts.pipeline.say import Stop

PINS = pins.load()
RELEASE = PINS.release("vllm", "0.16.0")
SCHEMA = JsonStrictValidator(SchemaVersion.V1_6)


def labels(context: Path, revision: str = "a" * 40) -> dict[str, str]:
    return {
        attest.REVISION: revision,
        attest.BASE: f"sha256:{'b' * 64}",
        "org.opencontainers.image.version": RELEASE.tag,
        **attest.input_labels(RELEASE, context),
    }


def bill(release: pins.Release = RELEASE) -> dict[str, Any]:
    return attest.sbom(release, PINS.debian.suite)


@pytest.mark.parametrize("release", PINS.releases, ids=lambda release: release.name)
def test_the_bill_of_materials_fits_cyclonedx_and_its_purls_are_canonical(release: pins.Release) -> None:
    assert SCHEMA.validate_str(oci.canonical(bill(release)).decode()) is None
    for part in bill(release)["components"]:
        assert PackageURL.from_string(part["purl"]).to_string() == part["purl"]


def test_a_bill_that_does_not_fit_is_found() -> None:
    """The negative control of the validator."""
    assert SCHEMA.validate_str(oci.canonical(bill() | {"components": [{"name": "a"}]}).decode()) is not None


def test_every_package_of_every_lock_is_in_the_bill_and_every_wheel_with_all_hashes_of_its_lock() -> None:
    parts = {part["purl"]: part for part in bill()["components"]}
    assert len(parts) == sum(len(lockfile.packages(path)) for path in attest.locks(RELEASE).values())
    listed = [h["content"] for part in parts.values() for h in part.get("hashes", ())]
    text = "".join(path.read_text() for path in attest.locks(RELEASE).values())
    assert sorted(listed) == sorted(re.findall(r"--hash=sha256:([0-9a-f]{64})", text))
    assert {part["version"] for part in parts.values() if part["name"] == "vllm"} == {"0.16.0"}


def test_a_lock_with_a_package_without_hash_makes_no_bill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "vllm.txt"
    lock.write_text("")
    lockfile.write(lock, f"a==1 \\\n    --hash=sha256:{'0' * 64}\nb==2")
    monkeypatch.setattr(attest, "locks", lambda release: {"engine": lock})
    with pytest.raises(Stop, match=r"locks/vllm\.txt has packages without a hash"):
        bill()


def test_the_provenance_names_every_input_by_digest(tmp_path: Path) -> None:
    made = attest.provenance(RELEASE, labels(tmp_path), "kimi", f"sha256:{'d' * 64}", b"sbom", 1)
    assert made["_type"] == "https://in-toto.io/Statement/v1"
    assert made["predicateType"] == "https://slsa.dev/provenance/v1"
    assert made["subject"] == [{"name": "kimi", "digest": {"sha256": "d" * 64}}]
    held = {entry["name"]: entry["digest"] for entry in made["predicate"]["buildDefinition"]["resolvedDependencies"]}
    assert all(held.values())
    for path in attest.locks(RELEASE).values():
        assert held[f"locks/{path.name}"] == {"sha256": files.sha256(path)}
    assert held["sbom"] == {"sha256": hashlib.sha256(b"sbom").hexdigest()}
    for name in ("Dockerfile.stack", "Dockerfile.vllm"):
        assert held[name] == {"sha256": files.sha256(pins.ROOT / name)}
    assert held["revision"] == {"gitCommit": "a" * 40}
    for name in series.entries((RELEASE.series / "series").read_bytes()):
        assert held[f"patches/vllm/0.16.0/{name}"] == {"sha256": files.sha256(RELEASE.series / name)}


def test_uncommitted_changes_are_said_in_the_provenance(tmp_path: Path) -> None:
    def said(revision: str) -> Any:
        made = attest.provenance(RELEASE, labels(tmp_path, revision), "kimi", f"sha256:{'d' * 64}", b"sbom", 1)
        return made["predicate"]["buildDefinition"]["resolvedDependencies"][-1]

    assert said("a" * 40)["annotations"] == {"uncommitted changes": False}
    assert said("a" * 40 + "-dirty")["annotations"] == {"uncommitted changes": True}
    assert said("a" * 40 + "-dirty")["digest"] == {"gitCommit": "a" * 40}


def test_the_same_image_gives_the_same_bytes(tmp_path: Path) -> None:
    def both() -> tuple[bytes, bytes]:
        made = oci.canonical(bill())
        return made, oci.canonical(attest.provenance(RELEASE, labels(tmp_path), "kimi", "sha256:d", made, 1))

    assert both() == both()


def test_an_image_of_this_checkout_passes_and_others_are_named(tmp_path: Path) -> None:
    good = labels(tmp_path)
    attest.check_labels(RELEASE, good)
    with pytest.raises(
        Stop, match=r"built from others than are here \(kimi-eagle3\.lock\.tools\): check out aaaaaaaaaaaa"
    ):
        attest.check_labels(RELEASE, good | {"kimi-eagle3.lock.tools": "0" * 64})
    with pytest.raises(Stop, match=r"built from others than are here \(org\.opencontainers\.image\.version\)"):
        attest.check_labels(RELEASE, good | {"org.opencontainers.image.version": "0.16.1"})
    with pytest.raises(Stop, match=r"doesn't say what went in \(kimi-eagle3\.context\): `nox -s build-vllm"):
        attest.check_labels(RELEASE, {key: value for key, value in good.items() if key != attest.CONTEXT})


def test_the_hash_of_the_inputs_is_that_of_their_sorted_labels_without_the_revision(tmp_path: Path) -> None:
    good = labels(tmp_path)
    listing = "".join(f"{key}={good[key]}\n" for key in sorted(good) if "base.digest" in key or "kimi-eagle3." in key)
    assert listing.count("\n") == 9
    assert attest.inputs(good) == hashlib.sha256(listing.encode()).hexdigest()
    changed = {name: attest.inputs(good | {name: "0" * 64}) != attest.inputs(good) for name in attest.INPUTS}
    assert changed == {name: name != attest.REVISION for name in attest.INPUTS}
    assert attest.inputs(good | {"org.opencontainers.image.title": "another"}) == attest.inputs(good)


def test_a_folders_hash_is_that_of_its_sorted_listing(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_text("1")
    (tmp_path / "a").write_text("2")
    listing = f"{hashlib.sha256(b'2').hexdigest()}  a\n{hashlib.sha256(b'1').hexdigest()}  b/c\n"
    assert files.tree(tmp_path) == hashlib.sha256(listing.encode()).hexdigest()
