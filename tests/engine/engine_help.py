"""What tests of real engines share: a release in a tree of its own, which can be patched and broken.

KIMI_EAGLE3_VENV_<version with underscores> names the environment (or the interpreter) with the pristine release. The
engine runs in a process of its own, from a tree of symbolic links; the environment is never written to.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.pipeline import diffs, pins

REPO = Path(__file__).parents[2]
SCRIPTS = REPO / "scripts/in_image"
MODEL = "vllm/model_executor/models/deepseek_v2.py"
ENGINES = {r.version: r.engine for r in pins.load().releases if r.variant == "cuda"}
VERSIONS, SGLANG = ([v for v, engine in ENGINES.items() if engine == name] for name in ("vllm", "sglang"))


def interpreter(version: str) -> Path:
    """The interpreter of a release. Skips where none is named, fails where the named one is missing."""
    name = f"KIMI_EAGLE3_VENV_{version.replace('.', '_')}"
    if not os.environ.get(name):
        pytest.skip(f"{name} names no environment with {ENGINES[version]} {version}")
    path = Path(os.environ[name])
    path = path / "bin/python" if path.is_dir() else path
    if not path.is_file():
        pytest.fail(f"{name}: {path} doesn't exist; make the environment, or unset the variable")
    return path


def loosely(patch: diffs.Patch, root: Path) -> dict[str, bytes] | None:
    """The files under `root` that a patch changes, as GNU patch does it, which no image has: None where it doesn't fit.

    A hunk goes where its lines are, nearest to its own place, with up to two lines of its context left out at each end.
    """
    changed = {}
    for change in patch.changes:
        file = root / change.path
        lines = [] if change.new else diffs.split(file.read_bytes()) if file.exists() else None
        for hunk in reversed(change.hunks):
            for fuzz in range(3):
                marks = [mark for mark, _ in hunk.lines]
                head = min(fuzz, next(n for n, mark in enumerate(marks) if mark != b" "))
                tail = min(fuzz, next(n for n, mark in enumerate(reversed(marks)) if mark != b" "))
                core = replace(hunk, start=hunk.start + head, lines=hunk.lines[head : len(marks) - tail])
                found = [0] if change.new else diffs.places(lines or [], core.old)
                if lines is not None and found:
                    start = min(found, key=lambda at, near=core.start: abs(at - near))  # type: ignore[misc]
                    lines = diffs.splice(lines, [replace(core, start=start)])
                    break
            else:
                return None
        changed[change.path] = b"".join(lines or [])
    return changed


class Engine:
    """A tree of symbolic links to a pristine release, with files of its own where they are written."""

    def __init__(self, version: str, folder: Path) -> None:
        self.version, self.python = version, interpreter(version)
        self.root = folder / "lib/python/site-packages"  # at the depth that RECORD's paths to bin/ count on
        self.name = ENGINES[version]
        self.series, self.work = folder / "series", folder / "tmp"
        (folder / "tmp").mkdir(parents=True)
        self.series.mkdir()
        (self.series / "tree").write_text("# no file is touched\n")
        (self.series / "series").write_text("# no patch\n")
        self.release: dict[str, Any] = {"engine": self.name, "version": version, "nvcc": False}
        find = f"import importlib.util as u; print(u.find_spec('{self.name}').submodule_search_locations[0])"
        source = subprocess.run([self.python, "-c", find], capture_output=True, text=True, check=True).stdout.strip()
        shutil.copytree(source, self.root / self.name, copy_function=os.symlink)
        info = next(Path(source).parent.glob(f"{self.name}-*.dist-info"))
        shutil.copytree(info, self.root / info.name, copy_function=os.symlink)
        (folder / "bin").symlink_to(self.python.parent)

    def write(self, path: str, data: bytes) -> None:
        """Make a file of the tree's own, without touching the release's."""
        file = self.root / path
        file.unlink(missing_ok=True)
        for bytecode in file.parent.glob(f"__pycache__/{file.stem}.*"):
            bytecode.unlink()
        file.write_bytes(data)

    def edit(self, path: str, change: Callable[[str], str]) -> None:
        """Change the text of a file, which must have an effect."""
        before = (self.root / path).read_text()
        after = change(before)
        assert after != before, f"the change finds nothing in {path}: fit it to the release"
        self.write(path, after.encode())

    def apply(self, without: str = "") -> None:
        """Apply the series of the release, exactly; or without one patch, and those that don't fit without it.

        `without` is what the patch's name begins with; `001` leaves out 0010 to 0019.
        """
        series = REPO / "patches" / self.name / self.version
        for line in (series / "tree").read_text().splitlines():
            path = line.split()[0]
            if not line.startswith("#") and (self.root / path).exists():
                self.write(path, (self.root / path).read_bytes())
        if not without:
            command = [sys.executable, REPO / "scripts/in_image/apply_series.py", series, self.root]
            subprocess.run(command, check=True, capture_output=True)
            self.series = series
            return
        names = [line for line in (series / "series").read_text().splitlines() if line.endswith(".patch")]
        assert any(name.startswith(without) for name in names), f"no patch is named {without}..."
        for name in (name for name in names if not name.startswith(without)):
            changed = loosely(diffs.parse((series / name).read_bytes()), self.root)
            for path, data in (changed or {}).items():
                self.write(path, data)

    def run(
        self, script: str, *arguments: str | Path, before: tuple[str, ...] = (), **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a script of in_image that prints JSON with `ok`, which its exit status must agree with."""
        file = self.work.parent / "release.json"
        file.write_text(json.dumps(self.release))
        file.chmod(0o644)
        command = [*before, self.python, SCRIPTS / script, "--json", "--release", file, *arguments]
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(self.root), "TMPDIR": str(self.work)}
        done = subprocess.run(command, env=env, stdout=-1, text=True, timeout=600, **{"stderr": -1, **options})
        assert done.stdout, done.stderr
        assert done.returncode == (0 if json.loads(done.stdout)["ok"] else 1)
        return done

    def measure(self, script: str, *arguments: str | Path) -> Any:
        """Run a script of this folder with the engine's interpreter; its last line is JSON, which is returned."""
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.root),
            "TMPDIR": str(self.work),
            "HOME": str(self.work),
        }
        env |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [self.python, Path(__file__).with_name(script), *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    def contract(self, *arguments: str, before: tuple[str, ...] = (), **options: Any) -> str:
        """Run the contract, by the command `before` if there is one; returns its JSON text."""
        return self.run("contract.py", "--series", self.series, *arguments, before=before, **options).stdout

    def false(self, *arguments: str) -> set[str]:
        """The names of the checks that don't hold."""
        checks = json.loads(self.contract(*arguments))["checks"]
        for check in checks:
            if not check["ok"]:
                print(f"{check['name']}: {check['detail']}")
                assert check["detail"].splitlines() == [check["detail"]]
                assert check["cure"].splitlines() == [check["cure"]]
        return {check["name"] for check in checks if not check["ok"]}


# Ways to capture wrong states: each changes the text of MODEL.
CAPTURE = re.compile(r" {12}if idx in self\.aux_hidden_state_layers:\n(?: {16}.*\n)+")
LAYER = re.compile(r" {12}hidden_states, residual = layer\(\n(?: {16}.*\n)+ {12}\)\n")


def after_the_layer(text: str) -> str:
    """The state is taken after the layer instead of before."""
    capture, layer = CAPTURE.findall(text)[0], LAYER.findall(text)[0]
    return text.replace(layer, "").replace(capture, layer + capture)


def without_residual(text: str) -> str:
    """The residual is left out."""
    return CAPTURE.sub(lambda m: m[0].replace("hidden_states + residual", "hidden_states.clone()"), text)


def next_id(text: str) -> str:
    """The ids are off by one."""
    return CAPTURE.sub(lambda m: m[0].replace("if idx in", "if idx - 1 in"), text)


def previous_id(text: str) -> str:
    """The ids are off by one, the other way."""
    return CAPTURE.sub(lambda m: m[0].replace("if idx in", "if idx + 1 in"), text)


def by_reference(text: str) -> str:
    """The state is kept by reference, and added up when the layers have written over it."""
    keep = "            if idx in self.aux_hidden_state_layers:\n"
    keep += "                aux_hidden_states.append((hidden_states, residual))\n"
    late = "return hidden_states, [h + r for h, r in aux_hidden_states]"
    return CAPTURE.sub(keep, text).replace("return hidden_states, aux_hidden_states", late)
