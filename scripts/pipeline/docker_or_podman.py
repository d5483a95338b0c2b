"""The container engine of this machine, Docker or podman, found by what works: it answers, and it can build."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.pipeline import builders
from scripts.pipeline.containers import ContainerEngine, ask, last_line, parsed
from scripts.pipeline.say import Stop, note

FORCE = "KIMI_EAGLE3_CONTAINER_ENGINE"
SETUP = "run `nox -s setup`"
DENIED = 3  # the rank of an engine that works, and that this user may not use
CONTAINERD_ROOT = Path("/var/lib/containerd")
# Only a builder with BuildKit's syntax and exporters gets through this. Nothing runs, nothing is fetched or kept.
PROBE = "FROM scratch AS unused\nRUN --mount=type=secret,id=probe /probe\nFROM scratch\nENV PROBE=1\n"
PROBE_PODMAN = "FROM scratch\nENV PROBE=1\n"  # buildah builds unused stages, too


class Unusable(Exception):
    """Why a client is passed over, and the cure. `rank` orders reasons: the highest is nearest to working."""

    def __init__(self, reason: str, cure: str, rank: int) -> None:
        super().__init__(reason)
        self.cure, self.rank = cure, rank


def find() -> ContainerEngine:
    """The first client on the PATH that works: all of docker's in the PATH's order, then all of podman's.

    The environment variable KIMI_EAGLE3_CONTAINER_ENGINE forces one: a path to a client, or `docker` or `podman`.
    Raises Stop where none works, with what to run.
    """
    forced = os.environ.get(FORCE, "")
    # A user who names a Docker engine wants that one, and no podman in its place.
    named = ["docker"] if os.environ.get("DOCKER_HOST") or os.environ.get("DOCKER_CONTEXT") else ["docker", "podman"]
    clients = [Path(forced)] if "/" in forced else _on_path([forced] if forced else named)
    if not clients:
        raise Stop(f"no {forced or 'docker or podman'} client on the PATH: {SETUP}, which installs Docker")
    passed: list[tuple[Path, Unusable]] = []
    for client in clients:
        try:
            engine = _probe(client)
        except Unusable as why:
            passed.append((client, why))
            if why.rank == DENIED and not forced:
                break  # there is an engine, and another in its place would be no choice of the user's
            continue
        over = "; ".join(f"{c}: {why}" for c, why in passed)
        note(f"container engine: {engine}" + (f"; passed over {over}" if over else ""))
        return engine
    nearest = max((why for _, why in passed), key=lambda why: why.rank)
    reasons = "; ".join(f"{client} {why}" for client, why in passed)
    raise Stop(f"no container engine that works: {reasons}: {nearest.cure}" + (f" ({FORCE} is set)" if forced else ""))


def with_builder(engine: ContainerEngine, builder: builders.Builder) -> ContainerEngine:
    """The same engine, with a builder of the user's own. Raises Stop where that isn't to be had."""
    if engine.kind != "docker":
        raise Stop(
            f"--builder {builder.name} is one of Docker's buildx, and the engine here is {engine}: {FORCE}=docker"
        )
    builders.require(engine.client, builder)
    return replace(engine, builder="buildx", own=builder)


def _on_path(names: Sequence[str]) -> list[Path]:
    """Executables called `names`, each file once, in the order of names, then of the PATH."""
    found: dict[Path, Path] = {}
    for name in names:
        for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
            if client := shutil.which(name, path=folder or "."):
                found.setdefault(Path(client).resolve(), Path(client))
    return list(found.values())


def _probe(client: Path) -> ContainerEngine:
    """The engine behind a client. Told by its answer: podman also goes by the name of docker. Raises Unusable."""
    code, version, error = ask([client, "--version"])
    if code:
        raise Unusable(f"doesn't work ({last_line(error)})", SETUP, 0)
    return _probe_podman(client) if "podman" in version.lower() else _probe_docker(client)


def _probe_docker(client: Path) -> ContainerEngine:
    _, text, _ = ask([client, "context", "inspect", "--format", "{{.Name}} {{.Endpoints.docker.Host}}"])
    context, _, endpoint = text.partition(" ")
    local = endpoint.startswith("unix://") or not endpoint
    _, text, error = ask([client, "info", "--format", "{{json .}}"])
    info = parsed(text)
    error = "; ".join(info.get("ServerErrors") or ()) or error
    if not info.get("ServerVersion"):
        if "permission denied" in error and local:
            cure = "join the group docker (`sudo usermod -aG docker $USER`, then log in again) or use sudo"
            raise Unusable(f"may not use the daemon's socket {endpoint} (permission denied)", cure, DENIED)
        if not local:
            cure = "check that host, and DOCKER_HOST or `docker context ls`"
            raise Unusable(f"gets no answer from the daemon at {endpoint} ({last_line(error)})", cure, 1)
        raise Unusable(f"finds no daemon at {endpoint} (is it down?)", f"{SETUP}, which starts it", 1)
    storage = docker_storage(info) if local else None
    build = ["build", "--output", "type=tar,dest=/dev/null", "-"]
    version = str(info["ServerVersion"])
    if ask([client, "buildx", *build], PROBE, BUILDX_BUILDER=buildx_builder(context))[0] == 0:
        return ContainerEngine(client, "docker", "buildx", version, endpoint, context, storage)
    if ask([client, *build], PROBE, DOCKER_BUILDKIT="1")[0] == 0:
        return ContainerEngine(client, "docker", "buildkit", version, endpoint, context, storage)
    cure = f"install the package docker-buildx (docker-buildx-plugin in Docker's own packages), or {SETUP}"
    raise Unusable("has no builder (neither buildx nor BuildKit)", cure, 2)


def _probe_podman(client: Path) -> ContainerEngine:
    code, text, error = ask([client, "info", "--format", "json"])
    info = parsed(text)
    if code or not info:
        raise Unusable(f"doesn't work ({last_line(error)})", f"see `{client} info`", 1)
    if info["store"].get("graphDriverName") == "vfs":
        cure = "set up fuse-overlayfs (see containers-storage.conf), or use Docker"
        raise Unusable("stores images with vfs, which copies the whole image for each layer", cure, 2)
    remote = bool(info["host"].get("serviceIsRemote"))
    with tempfile.TemporaryDirectory() as empty:
        options = ["--quiet", "--no-cache", "--secret", "id=probe,src=/dev/null", "--file", "-"]
        code, image, error = ask([client, "build", *options, empty], PROBE_PODMAN)
    if code:
        raise Unusable(f"can't build ({last_line(error)})", f"see `{client} info`; podman 4 or later is needed", 2)
    ask([client, "rmi", image])
    endpoint = os.environ.get("CONTAINER_HOST", "podman's remote connection") if remote else ""
    storage = None if remote else Path(info["store"]["graphRoot"])
    return ContainerEngine(client, "podman", "buildah", info["version"]["Version"], endpoint, "", storage)


def docker_storage(info: Mapping[str, Any]) -> Path | None:
    """The folder of images: Docker's own, or containerd's where Docker leaves images to it (Docker 29 does)."""
    root = Path(info.get("DockerRootDir") or "/nonexistent")
    address = str((info.get("Containerd") or {}).get("Address", ""))
    snapshotter = ["driver-type", "io.containerd.snapshotter.v1"] in (info.get("DriverStatus") or [])
    if snapshotter and "/docker/" not in address and CONTAINERD_ROOT.exists():
        return CONTAINERD_ROOT
    return root if root.exists() else None  # Docker Desktop: the folder is in its virtual machine


def buildx_builder(context: str) -> str:
    """The builder inside the daemon, which has the name of the context, unless the user chose one.

    A builder in a container of its own knows none of the daemon's images.
    """
    return os.environ.get("BUILDX_BUILDER") or context or "default"
