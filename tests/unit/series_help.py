"""Small invented releases and series for the tests: files under vllm/, patches made with difflib."""

import difflib
import hashlib
import subprocess
import sys
from pathlib import Path

APPLY = Path(__file__).resolve().parents[2] / "scripts" / "in_image" / "apply_series.py"
HEADER = """\
Description: Make the example say something else
 It said the wrong thing.
Origin: other, written for the tests
Bug: none
Forwarded: not-needed
Applied-Upstream: no
Last-Update: 2026-11-30
---
"""


def sha256(data: bytes | None) -> str:
    return "-" if data is None else hashlib.sha256(data).hexdigest()


def diff(path: str, old: bytes | None, new: bytes, context: int = 3) -> bytes:
    """A unified diff by difflib, with the mark for a missing last line feed that difflib leaves out."""
    lines = [(data or b"").decode("latin-1").split("\n") for data in (old, new)]
    ended = [[line + "\n" for line in text[:-1]] + ([text[-1]] if text[-1] else []) for text in lines]
    name = "/dev/null" if old is None else f"a/{path}"
    out = []
    for line in difflib.unified_diff(ended[0], ended[1], name, f"b/{path}", n=context):
        out.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(out).encode("latin-1")


def write_root(root: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def write_series(folder: Path, before: dict[str, bytes], *steps: dict[str, bytes], header: str = HEADER) -> Path:
    """A series with one patch a step; a step gives the new content of each file that it changes."""
    folder.mkdir(parents=True)
    now: dict[str, bytes] = dict(before)
    names = []
    for number, step in enumerate(steps, 1):
        names.append(f"{number:04}-step.patch")
        body = b"".join(diff(path, now.get(path), data) for path, data in step.items())
        (folder / names[-1]).write_bytes(header.encode() + body)
        now |= step
    (folder / "series").write_text("# A series for the tests.\n" + "".join(f"{name}\n" for name in names))
    touched = sorted({path for step in steps for path in step})
    lines = [f"{path} {sha256(before.get(path))} {sha256(now[path])}\n" for path in touched]
    (folder / "tree").write_text("".join(lines))
    return folder


def apply(series: Path, root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run apply_series.py as an image build does."""
    command = [sys.executable, "-I", "-S", str(APPLY), str(series), str(root), *options]  # -S: no installed package
    return subprocess.run(command, capture_output=True, text=True)


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file under a folder, hidden ones and bytecode too."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
