"""coverage.py against NVIDIA's own cuobjdump, on the shared objects of released wheels.

Needs KIMI_EAGLE3_VENV_<version with underscores>, of one release or more: the Python interpreter of an environment that
holds it. cuobjdump is the one that comes with Triton, or that of KIMI_EAGLE3_CUOBJDUMP. Files are read only.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
IN_IMAGE = REPO / "scripts" / "in_image"
OBJECTS = {
    "0.16.0": [
        "vllm/_C.abi3.so",
        "vllm/_moe_C.abi3.so",
        "vllm/_flashmla_C.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
        "nvidia/cublas/lib/libcublas.so.12",
        "nvidia/nccl/lib/libnccl.so.2",
    ],
    "0.32.0": [
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/_moe_C_stable_libtorch.abi3.so",
        "vllm/_flashmla_C.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "nvidia/cu13/lib/libcublasLt.so.13",
        "nvidia/nccl/lib/libnccl.so.2",
        "nvidia/nvshmem/lib/libnvshmem_host.so.3",
        "torch/lib/libtorch_cuda_linalg.so",
    ],
}
OBJECTS["0.33.0"] = OBJECTS["0.32.0"]
# SGLang.
OBJECTS["0.5.9"] = [
    "sgl_kernel/sm100/common_ops.abi3.so",
    "sgl_kernel/flash_ops.abi3.so",
    "sgl_kernel/flashmla_ops.abi3.so",
]
OBJECTS["0.5.23"] = OBJECTS["0.5.9"]
KINDS = ("native", "ptx", "none")
# What the serving path finds on sm_120, and what must not be taken for it: path -> (status, *KINDS).
KNOWN = {
    "0.16.0": {
        "vllm/_C.abi3.so": ("native", 51, 21, 34),
        "vllm/_moe_C.abi3.so": ("native", 11, 15, 7),
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": ("ptx", 0, 60, 0),
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": ("none", 0, 0, 222),
        "vllm/_flashmla_C.abi3.so": ("none", 0, 0, 22),
    },
    "0.32.0": {
        "vllm/_C_stable_libtorch.abi3.so": ("native", 82, 6, 26),
        "vllm/_moe_C_stable_libtorch.abi3.so": ("native", 26, 1, 7),
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": ("ptx", 0, 76, 0),
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": ("none", 0, 0, 192),
        "vllm/_flashmla_C.abi3.so": ("none", 0, 0, 51),
    },
    "0.33.0": {
        "vllm/_C_stable_libtorch.abi3.so": ("native", 85, 6, 27),
        "vllm/_moe_C_stable_libtorch.abi3.so": ("native", 27, 1, 7),
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": ("ptx", 0, 76, 0),
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": ("none", 0, 0, 192),
        "vllm/_flashmla_C.abi3.so": ("none", 0, 0, 53),
    },
    "0.5.9": {
        "sgl_kernel/sm100/common_ops.abi3.so": ("native", 74, 0, 0),
        "sgl_kernel/flash_ops.abi3.so": ("none", 0, 0, 182),
        "sgl_kernel/flashmla_ops.abi3.so": ("none", 0, 0, 11),
    },
    "0.5.23": {
        "sgl_kernel/sm100/common_ops.abi3.so": ("native", 35, 0, 0),
        "sgl_kernel/flash_ops.abi3.so": ("none", 0, 0, 372),
        "sgl_kernel/flashmla_ops.abi3.so": ("none", 0, 0, 57),
    },
}


def _site(version: str) -> Path | None:
    """The site-packages of the environment that holds a release, or None where no variable names one."""
    interpreter = os.environ.get(f"KIMI_EAGLE3_VENV_{version.replace('.', '_')}")
    if not interpreter:
        return None
    command = [interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


SITES = {version: site for version in OBJECTS if (site := _site(version))}
CASES = [(version, name) for version in SITES for name in OBJECTS[version]]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not SITES, reason="no KIMI_EAGLE3_VENV_* names an interpreter"),
]


def _fatbin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fatbin", IN_IMAGE / "fatbin.py")
    assert spec and spec.loader
    module = sys.modules["fatbin"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fatbin = _fatbin()


def _cuobjdump() -> str:
    """cuobjdump: the one that is named, or the newest among the environments' Tritons (the last release's)."""
    tools = [site / "triton/backends/nvidia/bin/cuobjdump" for site in SITES.values()]
    return os.environ.get("KIMI_EAGLE3_CUOBJDUMP") or str(tools[-1])


def _listed(path: Path, kind: str) -> Counter[str]:
    """How often cuobjdump lists each architecture: kind is `elf` or `ptx`."""
    command = [_cuobjdump(), f"--list-{kind}", "--all-fatbin", str(path)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0 or "No PTX file" in result.stderr, result.stderr
    return Counter(re.findall(r"\.(sm_\d+[af]?)\.(?:cubin|ptx)$", result.stdout, re.MULTILINE))


def _read(path: Path, kind: str) -> Counter[str]:
    """The same from fatbin.py, from the sections that cuobjdump reads. It lists a cubin of a family without the f."""
    binaries = [b for b in fatbin.read(path) if b.section in fatbin.CODE_SECTIONS]
    archs = [code.arch for binary in binaries for code in binary.codes if code.kind == kind]
    return Counter(arch.removesuffix("f") if kind == "cubin" else arch for arch in archs)


@pytest.mark.parametrize(("version", "name"), CASES)
def test_architectures_and_their_numbers_are_those_of_cuobjdump(version: str, name: str) -> None:
    path = SITES[version] / name
    cubins = _read(path, "cubin")
    assert cubins, "nothing was compared"
    assert cubins == _listed(path, "elf")
    assert _read(path, "ptx") == _listed(path, "ptx")


@pytest.mark.parametrize(("version", "name"), CASES)
def test_the_runtime_registers_as_many_fat_binaries_as_are_read(version: str, name: str) -> None:
    """nvcc writes one 24-byte wrapper for each fat binary (fatbinary_section.h): an independent count."""
    path = SITES[version] / name
    with path.open("rb") as file, fatbin.mmap.mmap(file.fileno(), 0, access=fatbin.mmap.ACCESS_READ) as view:
        (segment,) = (s for s in fatbin._sections(view) if s.name == ".nvFatBinSegment")
    assert segment.size / 24 == sum(binary.section in fatbin.CODE_SECTIONS for binary in fatbin.read(path))


@pytest.mark.parametrize("version", SITES)
def test_a_whole_release_passes_with_its_serving_objects_and_fails_with_one_too_many(
    version: str, tmp_path: Path
) -> None:
    pins = tomllib.loads((REPO / "pins.toml").read_text())
    (entry,) = (r for r in pins["release"] if r["version"] == version)
    release = tmp_path / "release.json"
    release.write_text(json.dumps({"arch": pins["gpu"]["arch"], "serving_objects": entry["serving_objects"]}))

    def run(*more: str) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, IN_IMAGE / "coverage.py", SITES[version], "--release", release, "--json", *more]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        return result.returncode, json.loads(result.stdout)

    status, record = run()
    assert (status, record["errors"]) == (0, [])
    objects = {item["path"]: item for item in record["objects"]}
    found = {path: (objects[path]["status"], *map(objects[path]["fat_binaries"].get, KINDS)) for path in KNOWN[version]}
    assert found == KNOWN[version]
    idle = next(path for path, (status, *_) in KNOWN[version].items() if status == "none")
    assert idle not in entry["serving_objects"]
    status, record = run("--require", idle)
    assert status == 1 and f"{idle}: nothing in it runs on sm_120" in record["errors"][0]
