"""The config of an image without what differs from build to build: times, and the names that a builder makes up.

An image's id is the hash of its config, so the same layers get the same id only with the same config. Modern BuildKit
writes SOURCE_DATE_EPOCH into it; the BuildKit in Docker 20.10 writes the time of the build, and podman, in Docker's
format, the id of its working container. Here the config is written anew, from what the engine tells of the image, and
given back to it without the layers, which it has. Nothing here talks to an engine.
"""

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Steps of a Dockerfile that make a layer, also where it holds nothing.
LAYER_STEPS = ("RUN", "COPY", "ADD", "WORKDIR")
DOCKER = "application/vnd.docker."


def docker_steps(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The steps that made an image, oldest first, from Docker's history (newest first, without `empty_layer`)."""
    return [
        {"created_by": step["CreatedBy"], "comment": step["Comment"]}
        | ({} if step["Size"] or step["CreatedBy"].split(" ")[0] in LAYER_STEPS else {"empty_layer": True})
        for step in reversed(history)
    ]


def podman_steps(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same from podman's `image inspect`. Ids of working images and hashes that hold a file's time are left out."""
    return [
        {
            "created_by": re.sub(r"\b(file|dir|multi):[0-9a-f]{64}\b", r"\1", step.get("created_by", "")),
            "comment": re.sub(r"^FROM [0-9a-f]+$", "", step.get("comment", "")),
        }
        | ({"empty_layer": True} if step.get("empty_layer") else {})
        for step in history
    ]


def normal(image: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], epoch: int) -> bytes | None:
    """The config (JSON) of an image that `inspect` tells of; each of its times is `epoch`, seconds since 1970.

    None where the steps don't account for the layers, so that nothing is made up.
    """
    layers = image["RootFS"].get("Layers") or []
    if sum("empty_layer" not in step for step in steps) != len(layers):
        return None
    created = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    config = dict(image["Config"])
    config |= {"Healthcheck": image["Healthcheck"]} if "Healthcheck" in image else {}  # podman has it beside the rest
    data: dict[str, Any] = {
        "architecture": image["Architecture"],
        "os": image["Os"],
        "created": created,
        "config": {key: value for key, value in config.items() if value not in (None, "", False, [], {})},
        "history": [{"created": created} | {k: v for k, v in step.items() if v} for step in steps],
        "rootfs": {"type": "layers", "diff_ids": layers},
    }
    data |= {"variant": image["Variant"]} if image.get("Variant") else {}  # of the processor
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def image_id(config: bytes) -> str:
    """The id of the image that has this config."""
    return f"sha256:{hashlib.sha256(config).hexdigest()}"


def docker_archive(config: bytes, tag: str) -> bytes:
    """What `docker load` reads: a config, and layers that are named and not there, since the daemon has them."""
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    layers = [f"{layer.removeprefix('sha256:')}.tar" for layer in json.loads(config)["rootfs"]["diff_ids"]]
    manifest = json.dumps([{"Config": name, "RepoTags": [tag], "Layers": layers}]).encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path, data in ((name, config), ("manifest.json", manifest)):
            member = tarfile.TarInfo(path)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def podman_folder(config: bytes, folder: Path) -> None:
    """What `podman pull dir:FOLDER` reads: a config, and layers by the digest under which podman's storage has them."""
    (folder / hashlib.sha256(config).hexdigest()).write_bytes(config)
    (folder / "version").write_text("Directory Transport Version: 1.1\n")
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{DOCKER}distribution.manifest.v2+json",
        "config": {
            "mediaType": f"{DOCKER}container.image.v1+json",
            "size": len(config),
            "digest": image_id(config),
        },
        "layers": [
            {"mediaType": f"{DOCKER}image.rootfs.diff.tar", "size": 1, "digest": layer}
            for layer in json.loads(config)["rootfs"]["diff_ids"]
        ],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
