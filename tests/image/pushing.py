"""Small images with the labels of a release, and receipts for them: what the tests push."""

import json
import random
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.pipeline import attest, containers, image_build, ladder, oci, pins, push, receipt

PINS = pins.load()
RELEASE = PINS.release("vllm", "0.16.0")
NAME = "team/kimi-k2.5-eagle3-vllm"
MOVING = "0.16.0"
LAYERS = [random.Random(0).randbytes(3 << 20), random.Random(1).randbytes(20000)]
RUNGS = ladder.whole(
    [
        ladder.passed("S0", "the engine is 0.16.0", pinned="0.16.0", installed="0.16.0", served="0.16.0"),
        ladder.passed("S1", "healthy after 1 s", seconds=1.0),
        ladder.passed("S2", "24 drafts", drafts=24.0),
        ladder.passed("S3", "acceptance length 4", acceptance=4.0),
        ladder.not_climbed("S4", "nothing is published for the oracle"),
    ]
)


def labels(context: Path, **other: str) -> dict[str, str]:
    """The labels that a build of the release gives its image."""
    found = {
        "org.opencontainers.image.version": RELEASE.tag,
        "org.opencontainers.image.revision": "a" * 40,
        "org.opencontainers.image.base.name": "base:1",
        "org.opencontainers.image.base.digest": f"sha256:{'b' * 64}",
        **attest.input_labels(RELEASE, context),
    }
    return found | {key.replace("_", "."): value for key, value in other.items()}


@contextmanager
def image(
    engine: containers.ContainerEngine, folder: Path, layers: list[bytes], labels: Mapping[str, str]
) -> Iterator[receipt.Image]:
    """An image of this machine, for the time of a `with` block: one file in each layer."""
    folder.mkdir()
    lines = ["FROM scratch"]
    for number, content in enumerate(layers):
        (folder / f"file{number}").write_bytes(content)
        lines.append(f"COPY file{number} /")
    (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
    tag = f"kimi-eagle3-test-{uuid.uuid4().hex[:8]}:1"
    args = {"SOURCE_DATE_EPOCH": "1700000000"}
    built = image_build.build(
        engine, dockerfile=folder / "Dockerfile", context=folder, tag=tag, args=args, labels=labels
    )
    try:
        yield receipt.Image(tag, built, (), dict(labels))
    finally:
        subprocess.run([engine.client, "rmi", "--force", tag], capture_output=True)


def receipt_of(image: receipt.Image, release: pins.Release = RELEASE, **more: Any) -> dict[str, Any]:
    """A receipt that reached S3 with the oracle."""
    run = receipt.Run("oracle", "/t", "/d", 3, "docker run image", "a GPU", RUNGS)
    about = {
        "series": {"patches": [{"name": "0001-a.patch"}]},
        "locks": {"engine.txt": "f" * 64, "torch.txt": image.labels["kimi-eagle3.lock.torch"]},
        "base": {"kind": "registry", "reference": "base:1", "sha256": "b" * 64},
        "contract": {"checks": [{"name": "version", "ok": True, "detail": "0.16.0", "cure": ""}], "ok": True},
        "coverage": {"arch": "sm_120", "statuses": {"native": 35}, "serving": {"a.so": "native"}},
    }
    return receipt.make(release, image, None, about, [run], **more)


def written(path: Path, made: Mapping[str, Any]) -> Path:
    receipt.write(path, made)
    return path


def fixed(image: receipt.Image) -> str:
    return push.fixed_tag("0.16.0", image.labels)


def state(address: str) -> tuple[dict[str, str], list[str]]:
    """The digest at each tag of the repository that isn't a list of referrers, and what is attached to their images."""
    import registries

    from scripts.pipeline import attached

    registry = oci.connect(address)
    found, kinds = {}, []
    for tag in registries.tags(address, NAME):
        manifest = registry.manifest(NAME, tag)
        assert manifest, tag
        if tag.startswith("sha256-"):
            continue
        found[tag] = manifest.digest
        for layer in [manifest.json()["config"], *manifest.json()["layers"]]:
            assert registry.has(NAME, layer["digest"]) == layer["size"], "a tag points to what isn't whole"
        kinds = sorted(str(e["artifactType"]) for e in attached.find(registry, NAME, manifest.digest))
    return found, kinds


def put_other(address: str, tag: str, words: str = "other") -> str:
    """Move a tag to another image, as somebody else would; its digest."""
    registry = oci.connect(address)
    config = json.dumps({"config": {"Labels": {"who": words}}, "rootfs": {"diff_ids": []}}).encode()
    registry.upload(NAME, oci.digest(config), config)
    content = {
        "schemaVersion": 2,
        "mediaType": oci.DOCKER_MANIFEST,
        "config": {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            "digest": oci.digest(config),
            "size": len(config),
        },
        "layers": [],
    }
    manifest = oci.Manifest(oci.canonical(content), oci.DOCKER_MANIFEST)
    registry.put(NAME, tag, manifest)
    return manifest.digest


def pushed(address: str, image: receipt.Image, *more: str | Path) -> None:
    arguments = ["vllm", "--version", "0.16.0", "--registry", f"{address}/team", "--image", image.reference]
    push.job([*arguments, *map(str, more)])
