"""Pushing to a real registry: what is there afterwards, and that nothing half-made ever has a tag."""

import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pushing
import pytest
import registries
from pushing import MOVING, NAME, pushed

from scripts.pipeline import attest, containers, docker_or_podman, files, oci, pins, push, receipt, sink, verify
from scripts.pipeline.say import Stop

ALL = sorted([attest.SBOM_TYPE, attest.STATEMENT_TYPE, attest.RECEIPT_TYPE])
MB = 1 << 20
pytestmark = [pytest.mark.image, pytest.mark.usefixtures("quick")]


def whole(address: str, image: receipt.Image) -> bool:
    """Whether both tags are on the image, and all is attached."""
    tags, kinds = pushing.state(address)
    return tags.keys() == {MOVING, pushing.fixed(image)} and len(set(tags.values())) == 1 and kinds == ALL


def never_half(address: str, image: receipt.Image) -> None:
    """The moving tag is only where the fixed one is, and a tag only where all is attached."""
    tags, kinds = pushing.state(address)
    assert set(tags) in (set(), {pushing.fixed(image)}, {pushing.fixed(image), MOVING}), tags
    assert not tags or kinds == ALL, kinds


def test_an_image_is_pushed_tagged_read_back_and_verified(
    address: str, image: receipt.Image, proof: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pushed(address, image, "--receipt", proof)
    assert whole(address, image)
    registry = oci.connect(address)
    manifest = registry.manifest(NAME, MOVING)
    assert manifest and manifest.json()["config"]["digest"] == image.id
    said = capsys.readouterr().out
    assert f"{address}/{NAME}@{manifest.digest}" in said
    assert "not signed: cosign isn't installed" in said
    for reference in (f"@{manifest.digest}", f":{MOVING}", f":{pushing.fixed(image)}"):
        verify.job([f"{address}/{NAME}{reference}"])
    assert "FALSE" not in capsys.readouterr().out
    with pytest.raises(Stop, match=r"receipt: S3 .* asked is S4: test it up to S4"):
        verify.job([f"{address}/{NAME}:{MOVING}", "--level", "S4"])


def test_the_image_that_was_pushed_is_pulled_as_the_same(
    engine: containers.ContainerEngine, address: str, image: receipt.Image, proof: Path
) -> None:
    pushed(address, image, "--receipt", proof)
    reference = f"{address}/{NAME}:{MOVING}"
    subprocess.run([engine.client, "pull", "--quiet", reference], check=True, capture_output=True)
    try:
        assert containers.image_id(engine, reference) == image.id
    finally:
        subprocess.run([engine.client, "rmi", reference], capture_output=True)


def test_pushing_again_sends_nothing_and_gives_the_same_digests(
    address: str, image: receipt.Image, proof: Path
) -> None:
    with registries.proxied(address) as proxy:
        pushed(proxy.address, image, "--receipt", proof)
        before, first = pushing.state(address), proxy.received
        pushed(proxy.address, image, "--receipt", proof)
        assert pushing.state(address) == before
        assert first > 3 * MB
        assert proxy.received - first < 20000


def test_two_registries_get_the_same_digest(address: str, registry: str, image: receipt.Image, proof: Path) -> None:
    pushed(address, image, "--receipt", proof)
    pushed(registry, image, "--receipt", proof)
    assert pushing.state(address)[0] == pushing.state(registry)[0]


def test_no_name_of_the_way_stays_in_the_engine(
    engine: containers.ContainerEngine, address: str, image: receipt.Image, proof: Path
) -> None:
    pushed(address, image, "--receipt", proof)
    assert containers.names(engine, image.id) == [image.reference]


@pytest.mark.slow
def test_podman_hands_its_image_over_too_and_leaves_out_what_is_there(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which("podman"):
        pytest.skip("this machine has no podman")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(docker_or_podman.FORCE, "podman")
    engine = docker_or_podman.find()
    layers = [random.Random(3).randbytes(MB), random.Random(4).randbytes(20000)]
    (tmp_path / "context").mkdir()
    labels = pushing.labels(tmp_path / "context")
    with registries.proxied(address) as proxy, pushing.image(engine, tmp_path / "image", layers, labels) as built:
        proof = pushing.written(tmp_path / "receipt.json", pushing.receipt_of(built))
        pushed(proxy.address, built, "--receipt", proof)
        assert whole(address, built)
        before = proxy.received
        edited = [layers[0], random.Random(5).randbytes(20000)]
        other = labels | {"kimi-eagle3.series": "1" * 64}
        with pushing.image(engine, tmp_path / "edited", edited, other) as again:
            place = push.Place(oci.connect(proxy.address), NAME, pushing.fixed(again), MOVING)
            push.push(engine, pushing.PINS, pushing.RELEASE, again, place, pushing.receipt_of(again))
            assert len(containers.names(engine, again.id)) == 1
        assert 20000 < proxy.received - before < 60000


# --- what is refused


def refused(address: str, image: receipt.Image, match: str, *more: str | Path) -> None:
    before = pushing.state(address)
    with pytest.raises(Stop, match=match) as stop:
        pushed(address, image, *more)
    assert "\n" not in str(stop.value)
    assert pushing.state(address) == before


def test_without_a_receipt_nothing_is_pushed(address: str, image: receipt.Image) -> None:
    refused(address, image, r"there is no receipt for vllm 0\.16\.0, image sha256:.*`nox -s build-vllm")
    assert oci.connect(address).tags(NAME) == []


def test_the_receipt_of_another_image_is_refused(address: str, image: receipt.Image, tmp_path: Path) -> None:
    made = pushing.receipt_of(receipt.Image(image.reference, f"sha256:{'1' * 64}", (), image.labels))
    path = pushing.written(tmp_path / "other.json", made)
    refused(address, image, r"doesn't speak for sha256:.*it is of another image, sha256:1111", "--receipt", path)


def test_a_receipt_that_is_too_low_for_the_registry_is_refused(
    address: str, image: receipt.Image, proof: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stricter = tmp_path / "pins.toml"
    entry = f'[[push.registry]]\nprefix = "{address}/team"\nlevel = "S4"\n'
    stricter.write_text(pins.PINS.read_text() + entry)
    monkeypatch.setattr(pins.load, "__defaults__", (stricter,))
    refused(address, image, r"reached S3 .*, and the registry asks for S4: .*--gpus", "--receipt", proof)
    stricter.write_text(pins.PINS.read_text() + entry.replace("/team", "/teams"))
    pushed(address, image, "--receipt", proof)


def test_a_fixed_tag_that_is_taken_is_never_moved(address: str, image: receipt.Image, proof: Path) -> None:
    pushing.put_other(address, pushing.fixed(image))
    refused(address, image, r"is taken by another image, .* and it never moves", "--receipt", proof)


def test_an_image_of_other_sources_is_refused(
    engine: containers.ContainerEngine, address: str, image: receipt.Image, tmp_path: Path
) -> None:
    labels = image.labels | {"kimi-eagle3.series": "0" * 64}
    with pushing.image(engine, tmp_path / "other", [b"x"], labels) as other:
        path = pushing.written(tmp_path / "r.json", pushing.receipt_of(other))
        refused(address, other, r"built from others than are here \(kimi-eagle3\.series\)", "--receipt", path)


def test_an_image_that_is_not_the_tested_one_gets_no_tag(
    address: str, image: receipt.Image, proof: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = oci.connect(address)
    other = registry.manifest(NAME, pushing.put_other(address, "theirs"))
    assert other
    end = sink.Sink(registry, NAME, (), "", Path())
    monkeypatch.setattr(sink, "hand_over", lambda *_: (other, end))
    refused(address, image, r"handed over another image than sha256:", "--receipt", proof)


def test_a_fixed_tag_on_the_same_image_in_other_words_stays_and_the_moving_one_follows(
    address: str, image: receipt.Image, proof: Path
) -> None:
    """As another machine's compression leaves it: the same config, another manifest."""
    pushed(address, image, "--receipt", proof)
    registry = oci.connect(address)
    manifest = registry.manifest(NAME, MOVING)
    assert manifest
    other = oci.Manifest(oci.canonical(manifest.json()), manifest.media_type)
    assert other.digest != manifest.digest
    registry.put(NAME, pushing.fixed(image), other)
    pushed(address, image, "--receipt", proof)
    assert set(pushing.state(address)[0].values()) == {other.digest}
    place = push.Place(registry, NAME, pushing.fixed(image), MOVING)
    with pytest.raises(Stop, match="was set by somebody else meanwhile, to the same image: run it again"):
        push.tag(place, manifest, image, other)
    assert set(pushing.state(address)[0].values()) == {other.digest}


# --- the next commit


@contextmanager
def another(
    engine: containers.ContainerEngine, image: receipt.Image, folder: Path, layers: list[bytes] = pushing.LAYERS,
    **labels: str,
) -> Iterator[tuple[receipt.Image, Path]]:  # fmt: skip
    """An image like the first but for these layers and labels, and its receipt, for the time of a `with` block."""
    with pushing.image(engine, folder / "another", layers, {**image.labels, **labels}) as built:
        assert built.id != image.id
        yield built, pushing.written(folder / "another.json", pushing.receipt_of(built))


def test_an_image_that_differs_in_its_revision_alone_is_released_already_and_nothing_is_pushed(
    engine: containers.ContainerEngine, address: str, image: receipt.Image, proof: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """As a commit makes it that touches the documentation alone."""
    pushed(address, image, "--receipt", proof)
    before = pushing.state(address)
    with (
        registries.proxied(address) as proxy,
        another(engine, image, tmp_path, **{attest.REVISION: "c" * 40}) as (built, its),
    ):
        capsys.readouterr()
        pushed(proxy.address, built, "--receipt", its)
        assert not [line for line in proxy.requests if not line.startswith(("GET ", "HEAD "))]
    said = capsys.readouterr().out
    place = f"{proxy.address}/{NAME}@{before[0][MOVING]}"
    assert f"released already, from revision aaaaaaaaaaaa and the same inputs: {place}; nothing is pushed" in said
    assert "another image" not in said and "pushed: " not in said
    assert pushing.state(address) == before
    verify.job([f"{address}/{NAME}:{MOVING}"])


def test_of_an_image_that_is_released_already_the_moving_tag_is_set_only_where_it_is_on_nothing(
    engine: containers.ContainerEngine, address: str, image: receipt.Image, proof: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pushed(address, image, "--receipt", proof)
    repository = tmp_path / "data/docker/registry/v2/repositories" / NAME / "_manifests/tags"
    with another(engine, image, tmp_path, **{attest.REVISION: "c" * 40}) as (built, its):
        shutil.rmtree(repository / MOVING)
        pushed(address, built, "--receipt", its)
        assert f"{MOVING} was on nothing, and is on it now" in capsys.readouterr().out
        assert whole(address, image)
        theirs = pushing.put_other(address, MOVING, "a later release")
        pushed(address, built, "--receipt", its)
        says = f"{MOVING} is on another image, {theirs}, and stays there: to move it, push the image of aaaaaaaaaaaa"
        assert says in capsys.readouterr().out
        assert pushing.state(address)[0][MOVING] == theirs
        shutil.rmtree(repository / MOVING)
        listed = next(repository.glob("sha256-*"))
        shutil.rmtree(listed)
        refused(address, built, rf"has no receipt, so {MOVING} isn't set: push the image of aaaa", "--receipt", its)


def test_another_input_makes_another_fixed_tag_and_the_moving_one_follows(
    engine: containers.ContainerEngine, address: str, image: receipt.Image, proof: Path, tmp_path: Path
) -> None:
    """As a commit makes it that touches a script of the image, and not the series."""
    pushed(address, image, "--receipt", proof)
    before = pushing.state(address)[0]
    with another(engine, image, tmp_path, **{attest.REVISION: "c" * 40, attest.CONTEXT: "2" * 64}) as (built, its):
        pushed(address, built, "--receipt", its)
        fixed = pushing.fixed(built)
        tags = pushing.state(address)[0]
        assert fixed.rpartition("-")[0] == pushing.fixed(image).rpartition("-")[0] and fixed not in before
        assert tags == before | {fixed: tags[fixed], MOVING: tags[fixed]} and tags[fixed] not in before.values()
        verify.job([f"{address}/{NAME}:{fixed}"])


def test_an_image_of_other_inputs_or_other_layers_under_the_fixed_tag_is_refused(
    engine: containers.ContainerEngine, address: str, image: receipt.Image, proof: Path, tmp_path: Path
) -> None:
    edited, inputs = [pushing.LAYERS[0], b"other"], tmp_path / "inputs"
    inputs.mkdir()
    with another(engine, image, tmp_path, edited, **{attest.REVISION: "c" * 40}) as (built, its):
        pushed(address, image, "--receipt", proof)
        refused(address, built, "of the same inputs with other layers, sha256:.*, and it never moves", "--receipt", its)
    with another(engine, image, inputs, **{attest.CONTEXT: "2" * 64}) as (built, its):
        registry = oci.connect(address)
        theirs = registry.manifest(NAME, MOVING)
        assert theirs
        registry.put(NAME, pushing.fixed(built), theirs)
        match = rf"is taken by another image, .*; {re.escape(attest.CONTEXT)} differ\), and it never moves"
        refused(address, built, match, "--receipt", its)


# --- what goes wrong on the way


def test_wherever_a_push_breaks_off_nothing_is_half_tagged_and_the_next_one_finishes(
    address: str, image: receipt.Image, proof: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci, "WAITS", ())
    with registries.proxied(address) as proxy:
        broke = 0
        for allowed in range(60):
            left = allowed

            def fault(method: str, path: str) -> str | None:
                nonlocal left
                left -= method in ("PUT", "POST")
                return "cut" if left < 0 else None

            proxy.fault = fault
            try:
                pushed(proxy.address, image, "--receipt", proof)
            except Stop as stop:
                assert "run it again" in str(stop)
                broke += 1
                never_half(address, image)
            else:
                break
        assert broke > 4, "it was hardly ever broken off: this shows nothing"
        assert whole(address, image)


@pytest.mark.parametrize("way", [500, 503, "cut", "lost"])
def test_a_registry_that_fails_now_and_then_is_tried_again(
    address: str, image: receipt.Image, proof: Path, way: int | str
) -> None:
    with registries.proxied(address) as proxy:
        count, failed = 0, []

        def fault(method: str, path: str) -> int | str | None:
            nonlocal count
            count += 1
            if count % 3:
                return None
            failed.append(f"{method} {path}")
            return way

        proxy.fault = fault
        pushed(proxy.address, image, "--receipt", proof)
        assert len(failed) > 5
    assert whole(address, image)


def test_a_registry_that_keeps_failing_is_one_line(address: str, image: receipt.Image, proof: Path) -> None:
    with registries.proxied(address) as proxy:
        proxy.fault = lambda method, path: 500 if method == "PUT" and "/blobs/" in path else None
        with pytest.raises(Stop, match=r"sending sha256:\S+ \(\d+ bytes\): 500, 6 times: run it again") as stop:
            pushed(proxy.address, image, "--receipt", proof)
        assert "\n" not in str(stop.value)
        assert "?" not in str(stop.value)
    never_half(address, image)


def test_a_tag_that_somebody_else_moves_meanwhile_is_noticed_and_left(
    address: str, image: receipt.Image, proof: Path
) -> None:
    pushing.put_other(address, MOVING, "before")
    with registries.proxied(address) as proxy:
        theirs = []

        def fault(method: str, path: str) -> None:
            if method == "PUT" and path.endswith(pushing.fixed(image)) and not theirs:
                theirs.append(pushing.put_other(address, MOVING, "meanwhile"))

        proxy.fault = fault
        with pytest.raises(Stop, match=r"was moved by somebody else meanwhile, from sha256:.* to sha256:"):
            pushed(proxy.address, image, "--receipt", proof)
        registry = oci.connect(address)
        assert (found := registry.manifest(NAME, MOVING)) and found.digest == theirs[0]
        pushed(proxy.address, image, "--receipt", proof)
    assert whole(address, image)


def test_a_tag_that_somebody_else_moves_at_the_very_end_is_noticed(
    address: str, image: receipt.Image, proof: Path
) -> None:
    with registries.proxied(address) as proxy:
        written = False

        def fault(method: str, path: str) -> None:
            nonlocal written
            if path.endswith(f"/manifests/{MOVING}"):
                if written:
                    pushing.put_other(address, MOVING)
                written = written or method == "PUT"

        proxy.fault = fault
        with pytest.raises(Stop, match=r"0\.16\.0 holds sha256:\w+ and not sha256:\w+: somebody else pushes"):
            pushed(proxy.address, image, "--receipt", proof)


def test_a_killed_push_leaves_no_tag_and_the_next_one_goes_on(
    engine: containers.ContainerEngine, address: str, image: receipt.Image, proof: Path
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    with registries.proxied(address) as proxy:

        def fault(method: str, path: str) -> str | None:
            if method == "PUT" and "/blobs/" in path and not reached.is_set():
                reached.set()
                go_on.wait(30)
                return "cut"
            return None

        proxy.fault = fault
        command = [sys.executable, "-m", "scripts.pipeline.push", "vllm", "--version", "0.16.0", "--image"]
        command += [image.reference, "--registry", f"{proxy.address}/team", "--receipt", str(proof)]
        child = subprocess.Popen(command, cwd=pins.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            assert reached.wait(60)
        finally:
            child.send_signal(signal.SIGKILL)
            child.communicate()
        go_on.set()
        assert oci.connect(address).tags(NAME) == []
        left = files.cache() / "push" / sink.address(proxy.address)
        assert list(left.iterdir()), "it was killed before it had a layer: this shows nothing"
        pushed(proxy.address, image, "--receipt", proof)
        assert not left.exists()
    assert whole(address, image)
    assert containers.names(engine, image.id) == [image.reference]


def test_a_full_registry_is_one_line_and_room_lets_it_go_on(
    registry_program: Path, image: receipt.Image, proof: Path, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", storage], capture_output=True)
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here: it needs root")
    try:
        with registries.serve(registry_program, tmp_path, storage) as address:
            with pytest.raises(Stop, match=r"the registry is full or has a limit") as stop:
                pushed(address, image, "--receipt", proof)
            assert "\n" not in str(stop.value)
            assert oci.connect(address).tags(NAME) == []
            subprocess.run(["mount", "-o", "remount,size=40m", storage], check=True)
            pushed(address, image, "--receipt", proof)
            assert whole(address, image)
    finally:
        subprocess.run(["umount", "--lazy", storage], check=True)


def test_a_full_disk_here_is_one_line_and_the_engine_does_not_try_again(
    address: str, image: receipt.Image, proof: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sink.Sink, "begin", full)
    began = time.monotonic()
    with pytest.raises(Stop, match=r"cache/kimi-eagle3/push/127\.\S+: No space left on device: make room there"):
        pushed(address, image, "--receipt", proof)
    assert time.monotonic() - began < 5, "Docker waits 5 seconds before it tries again"
    never_half(address, image)


def test_what_others_of_this_machine_send_to_the_sink_is_no_image(address: str, tmp_path: Path) -> None:
    """It listens on a loopback address, which everybody here can reach."""
    end = sink.Sink(oci.connect(address), NAME, (), "secret", tmp_path)
    with sink.serving(end) as where:
        stranger = oci.Registry(where, plain=True)
        manifest = oci.Manifest(b"{}", oci.DOCKER_MANIFEST)
        stranger.put(NAME, "latest", manifest)
        assert end.manifest is None
        stranger.put(NAME, "secret", manifest)
        assert end.manifest == manifest
        with pytest.raises(Stop, match=r"400 \(DIGEST_INVALID"):
            stranger.upload(NAME, f"sha256:{'0' * 64}", b"other bytes")
        with pytest.raises(Stop, match=r"another push to .* runs on this machine"), sink.serving(end):
            pass


def test_an_engine_that_knows_images_by_their_manifest_and_sends_blobs_in_one_piece_is_served_too(
    address: str, tmp_path: Path
) -> None:
    """As containerd does it, which newer Docker leaves its images to."""
    registry = oci.connect(address)
    end = sink.Sink(registry, NAME, (), "secret", tmp_path)
    config, layer = b'{"config": {}}', random.Random(6).randbytes(5000)
    parts = [{"mediaType": "x", "digest": oci.digest(data), "size": len(data)} for data in (config, layer)]
    content = {"schemaVersion": 2, "mediaType": oci.MANIFEST, "config": parts[0], "layers": [parts[1]]}
    manifest = oci.Manifest(oci.canonical(content), oci.MANIFEST)
    with sink.serving(end) as where:
        engine = oci.Registry(where, plain=True)
        for data in (config, layer):
            assert engine.has(NAME, oci.digest(data)) is None
            engine.upload(NAME, oci.digest(data), data)
            assert engine.has(NAME, oci.digest(data)) == registry.has(NAME, oci.digest(data)) == len(data)
        engine.put(NAME, manifest.digest, manifest)
        engine.put(NAME, "secret", manifest)
    assert end.manifest == manifest
    assert registry.tags(NAME) == [] and registry.manifest(NAME, manifest.digest) is None
    registry.put(NAME, manifest.digest, manifest)
    assert push.same_image(registry, NAME, manifest, manifest.digest)
    assert push.same_image(registry, NAME, manifest, oci.digest(config))
    assert not push.same_image(registry, NAME, manifest, oci.digest(layer))


# --- what is sent


def test_after_a_patch_edit_only_the_last_layer_is_sent(
    engine: containers.ContainerEngine, address: str, image: receipt.Image, proof: Path, tmp_path: Path
) -> None:
    layers = [random.Random(0).randbytes(3 * MB), random.Random(2).randbytes(20000)]
    labels = image.labels | {"kimi-eagle3.series": "1" * 64}
    with (
        registries.proxied(address) as proxy,
        pushing.image(engine, tmp_path / "edited", layers, labels) as edited,
    ):
        pushed(proxy.address, image, "--receipt", proof)
        before = proxy.received
        made = pushing.receipt_of(edited)
        place = push.Place(oci.connect(proxy.address), NAME, pushing.fixed(edited), MOVING)
        push.push(engine, pushing.PINS, pushing.RELEASE, edited, place, made)
        assert 20000 < proxy.received - before < 60000, (
            "the layer, and what is attached but the SBOM, which is the same"
        )


def test_another_engine_takes_over_the_layers_of_the_first(
    engine: containers.ContainerEngine, address: str, image: receipt.Image, proof: Path
) -> None:
    with registries.proxied(address) as proxy:
        pushed(proxy.address, image, "--receipt", proof)
        before = proxy.received
        registry = oci.connect(proxy.address)
        manifest, sent = sink.hand_over(engine, image.id, registry, "team/another", [NAME])
        registry.put("team/another", manifest.digest, manifest)
        assert not sent.sent
        assert proxy.received - before < 20000
        assert [r for r in proxy.requests if "mount=" in r]
