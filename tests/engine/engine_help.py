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
from pathlib import Path
from typing import Any

import pytest

from scripts.pipeline import pins

REPO = Path(__file__).parents[2]
SCRIPTS = REPO / "scripts/in_image"
MODEL = "vllm/model_executor/models/deepseek_v2.py"
VERSIONS = [release.version for release in pins.load().releases if release.variant == "cuda"]


def interpreter(version: str) -> Path:
    """The interpreter of a release. Skips where none is named, fails where the named one is missing."""
    name = f"KIMI_EAGLE3_VENV_{version.replace('.', '_')}"
    if not os.environ.get(name):
        pytest.skip(f"{name} names no environment with vllm {version}")
    path = Path(os.environ[name])
    path = path / "bin/python" if path.is_dir() else path
    if not path.is_file():
        pytest.fail(f"{name}: {path} doesn't exist; make the environment, or unset the variable")
    return path


class Engine:
    """A tree of symbolic links to a pristine release, with files of its own where they are written."""

    def __init__(self, version: str, folder: Path) -> None:
        self.version, self.python, self.root = version, interpreter(version), folder / "site-packages"
        self.series, self.work = folder / "series", folder / "tmp"
        (folder / "tmp").mkdir(parents=True)
        self.series.mkdir()
        (self.series / "tree").write_text("# no file is touched\n")
        (self.series / "series").write_text("# no patch\n")
        self.release: dict[str, Any] = {"engine": "vllm", "version": version, "nvcc": False}
        find = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
        source = subprocess.run([self.python, "-c", find], capture_output=True, text=True, check=True).stdout.strip()
        shutil.copytree(source, self.root / "vllm", copy_function=os.symlink)

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
        """Apply the series of the release, exactly; or without one patch, and those that don't fit without it."""
        series = REPO / "patches/vllm" / self.version
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
        assert any(name.startswith(without) for name in names)
        for name in names:
            command = ["patch", "-p1", "--no-backup-if-mismatch", "-i", series / name]
            trial = subprocess.run([*command, "--dry-run", "--force"], cwd=self.root, capture_output=True)
            if trial.returncode == 0 and not name.startswith(without):
                subprocess.run(command, cwd=self.root, check=True, capture_output=True)

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
