"""A buildx builder of the user's own, in a container, on Kubernetes or elsewhere; and its cache in a registry.

Such a builder knows no image of the local engine. So each image that it builds goes to two places: to the engine, as
with any builder, and to a folder (an OCI layout), from where the next build's FROM reads it. The builder asks only for
layers that it doesn't have. Files in layers get SOURCE_DATE_EPOCH as their time from the builder itself, too.
"""

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.pipeline import files
from scripts.pipeline.say import Stop

PROBE_S = 60.0  # a builder on a cluster may have to be started first, seconds


@dataclass(frozen=True)
class Builder:
    """The name that `docker buildx ls` shows; HOST/PATH of the caches that it reads and writes, or empty."""

    name: str
    cache_from: tuple[str, ...] = ()
    cache_to: str = ""


def require(client: Path, builder: Builder) -> None:
    """Raises Stop where there is no such builder, or it can't be reached."""
    try:
        version, done = (
            subprocess.run([str(client), "buildx", *words], capture_output=True, text=True, timeout=PROBE_S)
            for words in (["version"], ["inspect", "--bootstrap", builder.name])
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Stop(f"--builder {builder.name}: {client} buildx gives no answer: {error}") from None
    if version.returncode:
        raise Stop(f"--builder {builder.name}: {client} has no buildx: install docker-buildx")
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1].removeprefix("ERROR: ")
        raise Stop(f"--builder {builder.name} can't be used ({said}): `{client} buildx ls` shows those there are")
    if re.search(r"^Driver:\s+docker$", done.stdout, re.MULTILINE):
        raise Stop(
            f"--builder {builder.name} is the one inside Docker, which is used without --builder, too: leave it out"
        )


def layout(image: str) -> Path:
    """The folder that an image goes to, so that a later build can start from it."""
    return files.cache() / "layouts" / re.sub(r"[^\w.-]", "_", image)


def digest(folder: Path) -> str | None:
    """The digest (`sha256:...`) of the only manifest in an OCI layout; None where there's none, or not one."""
    try:
        manifests = json.loads((folder / "index.json").read_text())["manifests"]
    except (OSError, ValueError, KeyError):
        return None
    return str(manifests[0]["digest"]) if len(manifests) == 1 else None


def outputs(image: str) -> list[str]:
    """Where a build's result goes: to the engine of this machine, and to the image's folder."""
    rewrite = "rewrite-timestamp=true"
    return ["--output", f"type=docker,{rewrite}", "--output", f"type=oci,tar=false,dest={layout(image)},{rewrite}"]


def contexts(args: Mapping[str, str]) -> list[str]:
    """For each build argument that names an image in a folder: that FROM reads it there."""
    found = {image: layout(image) for image in args.values()}
    return [
        f"--build-context={image}=oci-layout://{folder}@{manifest}"
        for image, folder in found.items()
        if (manifest := digest(folder))
    ]


def caches(builder: Builder, image: str, target: str) -> list[str]:
    """The caches of one stage of one image. Each has a tag of its own: an export replaces what its tag had."""
    tag = re.sub(r"[^\w.-]", "-", f"{image.rpartition('/')[2]}-{target}")[-128:]
    where = [f"--cache-from=type=registry,ref={place}:{tag}" for place in builder.cache_from]
    to = builder.cache_to
    return where + ([f"--cache-to=type=registry,ref={to}:{tag},mode=max,ignore-error=true"] if to else [])
