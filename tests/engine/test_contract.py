"""The contract on real engines: what each gap makes false, and nothing else.

KIMI_EAGLE3_VENV_<version with underscores> names the environment (or the interpreter) with the pristine release. The
engine runs in a process of its own, from a tree of symbolic links; the environment is never written to.

What each gap of 0.16.0 makes false (gaps as patches/README.md and the patches number them):
1 allow-list; 2 placeholder-token; 3 and 4 their own interface check, delegation and both hidden-states checks, which go
through the wrapper into the language model; 5 drafter-architectures and drafter-mla; 6 config-type and drafter-mla, as
MLA drafters are of model type kimi_k2.
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
CONTRACT = REPO / "scripts/in_image/contract.py"
STATES = {"hidden-states-default", "hidden-states-explicit"}
GAPS = {
    1: {"allow-list"},
    2: {"placeholder-token"},
    3: {"supports-eagle3-language-model", "delegation", *STATES},
    4: {"supports-eagle3", "delegation", *STATES},
    5: {"drafter-architectures", "drafter-mla"},
    6: {"config-type", "drafter-mla"},
}
MODEL = "vllm/model_executor/models/deepseek_v2.py"

VERSIONS = [release.version for release in pins.load().releases if release.variant == "cuda"]

pytestmark = pytest.mark.engine


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
        self.release: dict[str, Any] = {"engine": "vllm", "version": version, "package": "vllm", "nvcc": False}
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

    def contract(self, *arguments: str, before: tuple[str, ...] = (), **options: Any) -> str:
        """Run the contract, by the command `before` if there is one; returns its JSON text."""
        file = self.work.parent / "release.json"
        file.write_text(json.dumps(self.release))
        file.chmod(0o644)
        command = [*before, self.python, CONTRACT, "--json", "--release", file, "--series", self.series, *arguments]
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(self.root), "TMPDIR": str(self.work)}
        done = subprocess.run(command, env=env, stdout=-1, text=True, timeout=600, **{"stderr": -1, **options})
        assert done.stdout, done.stderr
        assert done.returncode == (0 if json.loads(done.stdout)["ok"] else 1)
        return done.stdout

    def false(self, *arguments: str) -> set[str]:
        """The names of the checks that don't hold."""
        checks = json.loads(self.contract(*arguments))["checks"]
        for check in checks:
            if not check["ok"]:
                print(f"{check['name']}: {check['detail']}")
                assert check["detail"].splitlines() == [check["detail"]]
                assert check["cure"].splitlines() == [check["cure"]]
        return {check["name"] for check in checks if not check["ok"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_patched_release_satisfies_the_contract(version: str, tmp_path: Path) -> None:
    engine = Engine(version, tmp_path)
    engine.apply()
    assert engine.false() == set()


def test_unpatched_0_16_0_fails_what_its_gaps_explain_and_nothing_else(tmp_path: Path) -> None:
    assert Engine("0.16.0", tmp_path).false() == set().union(*GAPS.values())


def test_unpatched_0_32_0_has_none_of_the_gaps_but_refuses_mla_drafters_typed_like_a_target(tmp_path: Path) -> None:
    assert Engine("0.32.0", tmp_path).false() == {"drafter-mla"}


@pytest.mark.slow
@pytest.mark.parametrize("gap", GAPS)
def test_each_gap_alone_makes_false_what_is_written_here(gap: int, tmp_path: Path) -> None:
    engine = Engine("0.16.0", tmp_path)
    engine.apply(without=f"{gap:04}")
    assert engine.false() == GAPS[gap]


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


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mutation", [after_the_layer, without_residual, next_id, previous_id, by_reference])
def test_a_wrong_capture_makes_the_hidden_states_checks_false_alone(
    version: str, mutation: Callable[[str], str], tmp_path: Path
) -> None:
    engine = Engine(version, tmp_path)
    engine.apply()
    engine.edit(MODEL, mutation)
    assert engine.false() - {"tree"} == STATES


def test_one_byte_changed_in_a_patched_file_fails_the_tree(tmp_path: Path) -> None:
    engine = Engine("0.16.0", tmp_path)
    engine.apply()
    assert engine.false("--only", "tree") == set()
    engine.edit(MODEL, lambda text: text.replace("a", "b", 1))
    assert engine.false("--only", "tree") == {"tree"}


def test_another_version_than_the_pinned_one_fails(tmp_path: Path) -> None:
    engine = Engine("0.32.0", tmp_path)
    engine.release["version"] = "0.32.1"
    assert engine.false("--only", "version,tree") == {"version"}


def test_an_old_method_name_that_the_runner_never_calls_is_seen(tmp_path: Path) -> None:
    """The trap of 0.18 and later: default layers answered under the old name are ignored."""
    engine = Engine("0.32.0", tmp_path)
    runner = "vllm/v1/worker/gpu_model_runner.py"
    engine.edit(runner, lambda text: text.replace("get_eagle3_default_aux", "get_eagle3_newer_aux"))
    assert "delegation" in engine.false("--only", "delegation")


def test_the_engine_finds_no_module_of_ours(tmp_path: Path) -> None:
    """There is a coverage.py beside the contract, and numba asks for a module of that name."""
    engine = Engine("0.32.0", tmp_path)
    with (tmp_path / "noise").open("w") as noise:
        engine.contract("--only", "allow-list", "--verbose", stderr=noise)
    assert "coverage" not in (tmp_path / "noise").read_text()


# A network without anything in it but the loopback device, as a build has it.
NO_NETWORK = ("unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run it as somebody else, and without a network")
@pytest.mark.skipif(not all(map(shutil.which, ("unshare", "ip", "setpriv"))), reason="needs util-linux and iproute2")
def test_any_user_gets_the_same_bytes_without_a_network_and_leaves_nothing(tmp_path: Path) -> None:
    engine = Engine("0.32.0", tmp_path)
    mine = engine.contract()
    assert list(engine.work.iterdir()) == []
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == 0 and folder.stat().st_mode & 0o005 != 0o005:
            folder.chmod(folder.stat().st_mode | 0o005)
    os.chown(engine.work, 65534, 65534)
    theirs = engine.contract(before=(*NO_NETWORK, *NOBODY))
    assert theirs == mine
    assert list(engine.work.iterdir()) == []
    assert str(tmp_path) not in mine
