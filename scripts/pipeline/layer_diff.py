"""Layers as lists of files, and in what two of them differ: which file, and in which respect. Reads archives only."""

import gzip
import hashlib
import io
import tarfile
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, cast

# What a pax header holds beside what a member of an archive tells anyway.
OWN = ("path", "linkpath", "size", "mtime", "uid", "gid", "uname", "gname", "atime", "ctime")
KINDS = {
    tarfile.REGTYPE: "file", tarfile.DIRTYPE: "folder", tarfile.SYMTYPE: "symbolic link", tarfile.LNKTYPE: "hard link",
    tarfile.CHRTYPE: "character device", tarfile.BLKTYPE: "block device", tarfile.FIFOTYPE: "pipe",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One file of a layer: its path, and what else there is to say of it, by name (`mode`: `0644`)."""

    path: str
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Difference:
    """A file that isn't the same in two layers: in what, and how it is in the first and in the second."""

    path: str
    what: str
    first: str = ""
    second: str = ""

    def __str__(self) -> str:
        return f"/{self.path}: {self.what}" + (f": {self.first} / {self.second}" if self.first or self.second else "")


class _Hashed(io.RawIOBase):
    """A stream that hashes what is read from it."""

    def __init__(self, source: IO[bytes]) -> None:
        self.source, self.hash = source, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        data = self.source.read(len(buffer))
        self.hash.update(data)
        buffer[: len(data)] = data
        return len(data)


class Stream(io.RawIOBase):
    """The pieces of an iterator as a file."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces, self.rest = iter(pieces), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        while not self.rest:
            try:
                self.rest = next(self.pieces)
            except StopIteration:
                return 0
        piece, self.rest = self.rest[: len(buffer)], self.rest[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)


def _entry(layer: tarfile.TarFile, member: tarfile.TarInfo) -> Entry:
    facts = {
        "kind": KINDS.get(member.type, f"type {member.type!r}"),
        "mode": f"{member.mode:04o}",
        "owner": f"{member.uid}:{member.gid} ({member.uname}:{member.gname})",
        "time": datetime.fromtimestamp(member.mtime, UTC).isoformat(),
        "link": member.linkname,
    }
    if member.isdev():
        facts["device"] = f"{member.devmajor}:{member.devminor}"
    if file := layer.extractfile(member) if member.isreg() else None:
        digest = hashlib.sha256()
        while piece := file.read(2**20):
            digest.update(piece)
        facts["content"] = f"{member.size} bytes, sha256 {digest.hexdigest()[:12]}"
    facts |= {key: repr(value) for key, value in member.pax_headers.items() if key not in OWN}
    return Entry(member.name.removeprefix("./").rstrip("/"), tuple(facts.items()))


def _layer(stream: IO[bytes]) -> tuple[str, list[Entry]] | None:
    """The diff id (`sha256:...`) of a layer and its files, in the layer's order; None where it is no layer."""
    start = stream.read(2)
    whole = cast(IO[bytes], io.BufferedReader(Stream(_joined(start, stream))))
    hashed = _Hashed(cast(IO[bytes], gzip.GzipFile(fileobj=whole)) if start == b"\x1f\x8b" else whole)
    try:
        with tarfile.open(fileobj=cast(IO[bytes], hashed), mode="r|", bufsize=2**16) as layer:
            entries = [_entry(layer, member) for member in layer]
    except tarfile.TarError:
        return None
    while hashed.read(2**20):
        pass
    return f"sha256:{hashed.hash.hexdigest()}", entries


def _joined(start: bytes, stream: IO[bytes]) -> Iterator[bytes]:
    yield start
    while piece := stream.read(2**20):
        yield piece


def layers(image: IO[bytes], wanted: Container[str]) -> dict[str, list[Entry]]:
    """The files of each layer of an image in an archive (`docker save`, `podman save`), by diff id, where `wanted`.

    The archive is read once, as a stream.
    """
    found = {}
    with tarfile.open(fileobj=image, mode="r|") as archive:
        for member in archive:
            is_layer = member.name.endswith(".tar") or member.name.startswith("blobs/")
            if member.isreg() and is_layer and (file := archive.extractfile(member)) and (layer := _layer(file)):
                found[layer[0]] = layer[1]
    return {diff_id: entries for diff_id, entries in found.items() if diff_id in wanted}


def compare(first: Sequence[Entry], second: Sequence[Entry]) -> list[Difference]:
    """In what two layers differ, by path. The order of the files counts where nothing else differs."""
    one, two = ({entry.path: dict(entry.facts) for entry in entries} for entries in (first, second))
    differences = []
    for path in sorted(one.keys() | two.keys()):
        if path not in one or path not in two:
            differences.append(Difference(path, f"missing in the {'first' if path not in one else 'second'}"))
            continue
        for what in dict.fromkeys([*one[path], *two[path]]):
            a, b = one[path].get(what, "none"), two[path].get(what, "none")
            if a != b:
                differences.append(Difference(path, what, a, b))
    if not differences:
        moved = [(a.path, b.path) for a, b in zip(first, second, strict=False) if a.path != b.path]
        differences += [Difference(a, "order", f"/{a}", f"/{b}") for a, b in moved[:1]]
    return differences
