"""RECORD after patching, on a wheel that a real installer installed: what importlib.metadata tells is what is there."""

import base64
import hashlib
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from series_help import APPLY, apply, snapshot, write_series

sys.path.insert(0, str(APPLY.parent))

import contract_check
import wheel_record

BEFORE = {"vllm/__init__.py": b"", "vllm/a.py": b"one = 1\n", "vllm/sub/b.py": b"two = 2\n", "vllm/data.txt": b"x\n"}
AFTER = {"vllm/a.py": b"one = 11\n", "vllm/data.txt": b"y\n", "vllm/sub/new.py": b"three = 3\n"}


def install(folder: Path, name: str, files: dict[str, bytes]) -> None:
    """Make a wheel and have uv install it into a folder, as an image build does."""
    wheel = folder.parent / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [wheel_record.entry(path, data) for path, data in files.items()]
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,", ""]))
    command = ["uv", "pip", "install", "--quiet", "--offline", "--no-index", "--no-config", "--no-cache"]
    command += ["--no-installer-metadata"]  # as a build does: it would hold paths and times
    subprocess.run([*command, "--compile-bytecode", "--target", folder, wheel], check=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages"
    install(folder, "vllm", BEFORE)
    install(folder, "other", {"other/__init__.py": b"", "vllm_plugins/x.py": b""})
    return folder


@pytest.fixture
def series(tmp_path: Path) -> Path:
    return write_series(tmp_path / "series", BEFORE, AFTER)


def record(root: Path, name: str = "vllm") -> Path:
    return root / f"{name}-1.0.dist-info" / "RECORD"


def told(root: Path) -> dict[str, tuple[str, int]]:
    """What importlib.metadata says of the patched package: path to hash and size."""
    files = next(d for d in metadata.distributions(path=[str(root)]) if d.name == "vllm").files or []
    return {str(f): (f.hash.value, f.size or 0) for f in files if f.hash}


def test_after_patching_importlib_tells_the_hash_and_size_of_what_is_there(root: Path, series: Path) -> None:
    other = record(root, "other").read_bytes()
    assert apply(series, root).returncode == 0
    for path, data in AFTER.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert told(root)[path] == (digest, len(data))
    assert wheel_record.differences(record(root)) == []
    assert record(root, "other").read_bytes() == other


def test_lines_of_other_files_keep_their_bytes_and_their_place(root: Path, series: Path) -> None:
    before = record(root).read_text().splitlines()
    apply(series, root)
    after = record(root).read_text().splitlines()
    changed = [new.split(",")[0] for old, new in zip(before, after, strict=False) if old != new]
    assert sorted(changed) == ["vllm/a.py", "vllm/data.txt"]
    assert [line.split(",")[0] for line in after[len(before) :]] == ["vllm/sub/new.py"]


def test_the_same_record_comes_out_each_time(root: Path, series: Path, tmp_path: Path) -> None:
    second = tmp_path / "again" / "site-packages"
    second.parent.mkdir()
    install(second, "vllm", BEFORE)
    assert apply(series, root).returncode == apply(series, second).returncode == 0
    assert record(root).read_bytes() == record(second).read_bytes()


def test_a_checker_of_record_sees_a_patch_that_did_not_keep_it(root: Path) -> None:
    assert wheel_record.differences(record(root)) == []
    (root / "vllm/a.py").write_bytes(AFTER["vllm/a.py"])
    assert wheel_record.differences(record(root)) == ["vllm/a.py has 9 bytes, and 8 are recorded"]
    (root / "vllm/a.py").write_bytes(b"one = 2\n")
    (root / "vllm/sub/b.py").unlink()
    assert wheel_record.differences(record(root)) == [
        "vllm/a.py has another sha256 than is recorded",
        "vllm/sub/b.py is missing",
    ]


def test_check_alone_leaves_record_as_it_is(root: Path, series: Path) -> None:
    before = snapshot(root)
    assert apply(series, root, "--check").returncode == 0
    assert snapshot(root) == before


def test_a_new_file_in_nobodys_folder_is_refused_and_nothing_is_written(root: Path, tmp_path: Path) -> None:
    series = write_series(tmp_path / "series", BEFORE, {"stray/new.py": b"x = 1\n"})
    before = snapshot(root)
    done = apply(series, root)
    assert done.returncode == 1 and "stray/new.py: no installed package has files" in done.stderr
    assert snapshot(root) == before


def test_a_file_that_no_record_lists_is_refused(root: Path, series: Path) -> None:
    lines = record(root).read_text().splitlines(keepends=True)
    record(root).write_text("".join(line for line in lines if not line.startswith("vllm/a.py")))
    before = snapshot(root)
    done = apply(series, root)
    assert done.returncode == 1 and "a.py: is listed in no RECORD" in done.stderr and done.stderr.count("\n") == 1
    assert snapshot(root) == before


def test_a_broken_record_is_refused_at_its_line(root: Path, series: Path) -> None:
    record(root).write_text("vllm/a.py\n")
    done = apply(series, root)
    assert done.returncode == 1 and "RECORD:1: has 1 fields instead of 3" in done.stderr


def test_the_contract_holds_record_against_the_files(
    root: Path, series: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(root))
    context = contract_check.Context({"engine": "vllm"}, series, tmp_path)
    with pytest.raises(contract_check.Unmet, match=r"vllm/sub/new\.py is not listed"):
        contract_check.record(context)
    apply(series, root)
    assert contract_check.record(context).endswith(" files of vllm")
    (root / "vllm/a.py").write_bytes(b"x")
    with pytest.raises(contract_check.Unmet, match=r"1 files are not as RECORD says: vllm/a\.py has 1 bytes"):
        contract_check.record(context)
