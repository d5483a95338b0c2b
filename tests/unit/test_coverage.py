"""coverage.py and fatbin.py on small ELF files that are made here, byte by byte."""

import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

IN_IMAGE = Path(__file__).resolve().parents[2] / "scripts" / "in_image"
CUBIN, PTX, LTO = 2, 1, 8
A, F = 0x100000, 0x200000


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fatbin", IN_IMAGE / "fatbin.py")
    assert spec and spec.loader
    module = sys.modules["fatbin"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fatbin = _load()


def entry(kind: int, number: int, flags: int = 0, isa: tuple[int, int] = (9, 0)) -> bytes:
    """One entry with a payload of 24 bytes."""
    payload, minor = b"\x7fELF".ljust(24, b"x"), isa[1]
    head = struct.pack("<HHIQIIHHIIIQ", kind, 0x101, 64, len(payload), 0, 0, minor, isa[0], number, 0, 0, flags | 0x11)
    return head.ljust(64, b"\0") + payload


def fat(*entries: bytes) -> bytes:
    """A fat binary."""
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, entries))) + b"".join(entries)


def elf(*sections: tuple[str, bytes], size: int = 0, kind: int = 3, flags: int = 2) -> bytes:
    """A 64-bit ELF file with the sections given and its section table before them, so that cutting hits a section."""
    named = [("", b""), *sections, (".shstrtab", b"")]
    names = b"".join(name.encode() + b"\0" for name, _ in named)
    named[-1] = (".shstrtab", names)
    offset, rows, body = 64 + 64 * len(named), b"", b""
    for index, (name, data) in enumerate(named):
        start = names.index(name.encode() + b"\0")
        at = offset + len(body)
        rows += struct.pack("<IIQQQQIIQQ", start, 1 if index else 0, flags, 0, at, len(data), 0, 0, 1, 0)
        body += data + b"\0" * (-len(data) % 8)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head = struct.pack("<16sHHIQQQIHHHHHH", ident, kind, 62, 1, 0, 0, 64, 0, 64, 0, 0, 64, len(named), len(named) - 1)
    return (head + rows + body).ljust(size, b"\0")


def run(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(IN_IMAGE / "coverage.py"), *map(str, args)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    """The single line of a failure."""
    assert result.returncode == 1
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def put(root: Path, name: str, data: bytes) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.ljust(1_000_000, b"\0") if data.startswith(b"\x7fELF") else data)
    return path


def measured(root: Path, *args: object) -> dict[str, dict[str, object]]:
    result = run(root, "--json", *args)
    assert result.returncode == 0, result.stderr
    return {item["path"]: item for item in json.loads(result.stdout)["objects"]}


RULES = [
    (CUBIN, 120, 0, "native"),
    (CUBIN, 120, A, "native"),
    (CUBIN, 120, F, "native"),
    (CUBIN, 121, 0, "none"),
    (CUBIN, 121, F, "none"),
    (CUBIN, 100, F, "none"),
    (CUBIN, 90, A, "none"),
    (CUBIN, 80, 0, "none"),
    (PTX, 120, 0, "ptx"),
    (PTX, 120, A, "ptx"),
    (PTX, 120, F, "ptx"),
    (PTX, 121, 0, "none"),
    (PTX, 100, F, "none"),
    (PTX, 100, A, "none"),
    (PTX, 90, A, "none"),
    (PTX, 52, 0, "ptx"),
    (LTO, 80, 0, "none"),
]


@pytest.mark.parametrize(("kind", "number", "flags", "expected"), RULES)
def test_status_follows_the_kind_the_number_and_the_suffix(
    tmp_path: Path, kind: int, number: int, flags: int, expected: str
) -> None:
    path = put(tmp_path, "x.so", elf((".nv_fatbin", fat(entry(kind, number, flags)))))
    (binary,) = fatbin.read(path)
    assert fatbin.status(binary.codes, 120) == expected


def test_a_cubin_runs_on_later_minor_versions_of_its_major_version_only() -> None:
    code = fatbin.Code("cubin", "sm_80")
    assert [target for target in (75, 80, 86, 89, 90, 120) if fatbin.usable(code, target)] == [80, 86, 89]
    exact, family = fatbin.Code("cubin", "sm_120a"), fatbin.Code("cubin", "sm_120f")
    assert (fatbin.usable(exact, 121), fatbin.usable(family, 121)) == (False, True)


def test_every_status_and_its_architectures_are_told(tmp_path: Path) -> None:
    put(tmp_path, "a/native.so", elf((".nv_fatbin", fat(entry(CUBIN, 90, A), entry(CUBIN, 120, F)))))
    put(tmp_path, "b/ptx.so.9", elf((".nv_fatbin", fat(entry(CUBIN, 80), entry(PTX, 80, isa=(8, 8))))))
    put(tmp_path, "none", elf((".nv_fatbin", fat(entry(CUBIN, 90, A)))))
    put(tmp_path, "host.so", elf((".text", b"code")))
    objects = measured(tmp_path)
    assert {path: item["status"] for path, item in objects.items()} == {
        "a/native.so": "native",
        "b/ptx.so.9": "ptx",
        "none": "none",
        "host.so": "no GPU code",
    }
    assert objects["a/native.so"]["cubins"] == ["sm_90a", "sm_120f"]
    assert (objects["b/ptx.so.9"]["ptx"], objects["b/ptx.so.9"]["ptx_isa"]) == (["sm_80"], "8.8")


def test_fat_binaries_in_a_row_are_all_read_and_counted(tmp_path: Path) -> None:
    rows = fat(entry(CUBIN, 120)) + b"\0" * 8 + fat(entry(PTX, 80)) + fat(entry(CUBIN, 75)) + b"\0" * 16
    put(tmp_path, "x.so", elf((".nv_fatbin", rows), ("__nv_relfatbin", fat(entry(CUBIN, 120)))))
    assert measured(tmp_path)["x.so"]["fat_binaries"] == {"native": 2, "ptx": 1, "none": 1}


def test_fat_binaries_inside_other_data_are_found_and_a_stray_magic_is_not_one(tmp_path: Path) -> None:
    data = b"table" + fat(entry(CUBIN, 120)) + b"\x50\xed\x55\xba" + b"rest" * 9
    put(tmp_path, "x.so", elf((".ldata", data)))
    put(tmp_path, "stray.so", elf((".rodata", b"\x50\xed\x55\xba" * 3)))
    put(tmp_path, "code.so", elf((".text", data), flags=6))
    objects = measured(tmp_path)
    statuses = {name: item["status"] for name, item in objects.items()}
    assert statuses == {"x.so": "native", "stray.so": "no GPU code", "code.so": "no GPU code"}


GOOD = fat(entry(CUBIN, 120), entry(PTX, 120))
BROKEN = {
    "magic": b"\0\0\0\0" + GOOD[4:],
    "second magic": GOOD + b"junk" + GOOD[4:],
    "version": GOOD[:4] + b"\x02" + GOOD[5:],
    "size": GOOD[:8] + struct.pack("<Q", 1 << 40) + GOOD[16:],
    "no entries": GOOD[:8] + bytes(8) + GOOD[16:],
    "entry size": GOOD[:24] + struct.pack("<Q", 1 << 40) + GOOD[32:],
    "architecture": GOOD[:44] + struct.pack("<I", 0) + GOOD[48:],
    "cut": GOOD[:60],
    "zeros": bytes(4096),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_fat_binary_is_an_error_that_names_the_file_and_never_a_status(tmp_path: Path, data: bytes) -> None:
    put(tmp_path, "fine.so", elf((".nv_fatbin", GOOD)))
    put(tmp_path, "broken.so", elf((".nv_fatbin", data)))
    result = run(tmp_path)
    assert "broken.so: " in one_line(result) and "install the package" in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("left", [40, 100, 1_000_100])
def test_a_file_that_is_cut_off_is_an_error(tmp_path: Path, left: int) -> None:
    path = tmp_path / "cut.so"
    path.write_bytes(elf((".nv_fatbin", GOOD), (".data", bytes(1_000_000)))[:left])
    assert "cut.so: " in one_line(run(tmp_path, "--require", "cut.so"))


def test_nothing_measured_is_an_error(tmp_path: Path) -> None:
    put(tmp_path, "notes.so", b"text " * 300_000)
    (tmp_path / "small.so").write_bytes(elf((".nv_fatbin", GOOD)))
    assert "nothing was measured" in one_line(run(tmp_path))
    assert "is no folder" in one_line(run(tmp_path / "nowhere"))


def test_links_count_once_and_other_elf_files_are_not_objects(tmp_path: Path) -> None:
    real = put(tmp_path, "lib.so.2", elf((".nv_fatbin", GOOD)))
    (tmp_path / "lib.so").symlink_to(real)
    put(tmp_path, "kernel.cubin", elf((".nv_fatbin", GOOD), kind=2))
    assert list(measured(tmp_path, "--require", "lib.so")) == ["lib.so.2"]


def test_required_objects_must_be_there_and_must_run(tmp_path: Path) -> None:
    put(tmp_path, "vllm/good_C.so", elf((".nv_fatbin", GOOD)))
    put(tmp_path, "vllm/old_C.so", elf((".nv_fatbin", fat(entry(CUBIN, 80), entry(PTX, 90, A)))))
    put(tmp_path, "vllm/host.so", elf((".text", b"code")))
    (tmp_path / "vllm/small_C.so").write_bytes(elf((".nv_fatbin", GOOD)))
    passed = run(tmp_path, "--require", "vllm/good_*.so", "vllm/small_*", "--json")
    assert passed.returncode == 0
    assert [row["path"] for row in json.loads(passed.stdout)["serving"]] == ["vllm/good_C.so", "vllm/small_C.so"]
    assert "vllm/old_C.so: nothing in it runs on sm_120 (it holds: sm_80, PTX sm_90a)" in one_line(
        run(tmp_path, "--require", "vllm/old*")
    )
    assert "vllm/host.so: " in one_line(run(tmp_path, "--require", "vllm/host.so"))
    failed = run(tmp_path, "--require", "good_C.so", "--json")
    assert "good_C.so: no shared object matches" in one_line(failed)
    assert json.loads(failed.stdout)["ok"] is False


def test_the_release_gives_architecture_and_serving_objects(tmp_path: Path) -> None:
    put(tmp_path, "site/a.so", elf((".nv_fatbin", fat(entry(CUBIN, 80)))))
    put(tmp_path, "site/host.so", elf((".text", b"code")))
    release = tmp_path / "release.json"

    def with_release(**data: object) -> subprocess.CompletedProcess[str]:
        release.write_text(json.dumps(data))
        return run(tmp_path / "site", "--release", release, "--json")

    assert with_release(arch="sm_86", serving_objects=["a.so"]).returncode == 0
    assert "a.so" in one_line(with_release(arch="sm_120", serving_objects=["a.so"]))
    assert "host.so" in one_line(with_release(arch="sm_86", serving_objects=["host.so"]))
    assert with_release(arch="sm_120", variant="cpu", serving_objects=["host.so"]).returncode == 0
    assert "gone.so" in one_line(with_release(arch="sm_120", variant="cpu", serving_objects=["gone.so"]))
    assert "lacks 'arch'" in one_line(with_release(serving_objects=[]))
    assert "'sm_120a'" in one_line(with_release(arch="sm_120a", serving_objects=[]))


def test_the_record_is_the_same_for_the_same_files(tmp_path: Path) -> None:
    for name in ("b.so", "a.so", "c/d.so"):
        put(tmp_path, name, elf((".nv_fatbin", GOOD)))
    first, second = run(tmp_path, "--json").stdout, run(tmp_path, "--json").stdout
    assert first == second
    assert [item["path"] for item in json.loads(first)["objects"]] == ["a.so", "b.so", "c/d.so"]


def test_the_table_tells_how_much_of_an_object_runs(tmp_path: Path) -> None:
    rows = fat(entry(CUBIN, 120)) + fat(entry(PTX, 80, isa=(8, 8))) + fat(entry(CUBIN, 90, A))
    put(tmp_path, "x.so", elf((".nv_fatbin", rows)))
    result = run(tmp_path, "--require", "x.so")
    assert "*x.so  [1 native, 1 PTX 8.8, 1 neither of 3; cubins 90a 120; PTX 80]" in result.stdout


def test_a_library_that_looks_for_the_coverage_package_goes_on_without_it() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1])\ntry:\n import coverage\nexcept ImportError:\n print('none')"
    result = subprocess.run([sys.executable, "-c", code, str(IN_IMAGE)], check=False, capture_output=True, text=True)
    assert result.stdout == "none\n"
