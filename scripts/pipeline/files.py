"""Files of the build machine: the folder that keeps what is slow to make, and the hash that names a content."""

import hashlib
import os
from pathlib import Path


def cache() -> Path:
    """The folder of this machine that keeps what is slow to make or to fetch."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kimi-eagle3"


def sha256(path: Path) -> str:
    """The sha256 of a file, in hex, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree(folder: Path) -> str:
    """The sha256 of a folder's files by path and content, in hex: of the output of `sha256sum` over them, sorted."""
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    listing = "".join(f"{sha256(folder / path)}  {path}\n" for path in paths)
    return hashlib.sha256(listing.encode()).hexdigest()
