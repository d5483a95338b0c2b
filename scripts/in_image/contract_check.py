"""What a check of the contract is, and the checks that are the same for each engine: version, tree, compiler."""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wheel_record


class Unmet(Exception):
    """The engine doesn't satisfy a check. The message is one line: what is wrong, and where."""


@dataclass(frozen=True)
class Context:
    """What a check may look at: the release that the image says it is, its series, and a folder to write in."""

    release: dict[str, Any]
    series: Path
    work: Path


@dataclass(frozen=True)
class Check:
    """A named check. `run` returns one line on what it saw, or raises Unmet; `cure` says what to do then."""

    name: str
    run: Callable[[Context], str]
    cure: str


def require(condition: object, problem: str) -> None:
    """Raise Unmet with `problem` unless `condition` holds."""
    if not condition:
        raise Unmet(problem)


# Where engines and their libraries would write.
FOLDERS = (
    "FLASHINFER_WORKSPACE_BASE",
    "HF_HOME",
    "HOME",
    "NUMBA_CACHE_DIR",
    "TMPDIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
)


def isolate(context: Context, *prefixes: str, folders: Sequence[str] = (), **settings: str) -> None:
    """Set what must be set before an engine is imported: caches under the work folder, no network, no GPU, few threads.

    Whatever else the environment tells the engine, in names that begin with `prefixes`, is dropped: the contract is
    about what is installed. `folders` are further names of folders, `settings` are the engine's own.
    """
    home = context.work / "home"
    home.mkdir()
    tempfile.tempdir = str(home)
    for name in [name for name in os.environ if name.startswith(prefixes)]:
        del os.environ[name]
    os.environ.update({name: str(home) for name in (*FOLDERS, *folders)})
    os.environ.update(
        CUDA_VISIBLE_DEVICES="",
        DO_NOT_TRACK="1",
        GLOO_SOCKET_IFNAME="lo",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        TRANSFORMERS_OFFLINE="1",
        **settings,
    )


def installed(distribution: str) -> str:
    """The installed version of `distribution`, without a local part (`0.16.0`, not `0.16.0+cu128`)."""
    try:
        return importlib.metadata.version(distribution).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        raise Unmet(f"{distribution} is not installed") from None


def package_root(package: str) -> Path:
    """The folder that holds the importable `package`, found without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise Unmet(f"no package {package} can be imported")
    return Path(spec.origin).parent.parent


def version(context: Context) -> str:
    """The installed engine is the pinned one."""
    pinned = context.release["version"]
    distribution = context.release["engine"]
    found = installed(distribution)
    require(found == pinned, f"{distribution} {found} is installed, {pinned} is pinned")
    return f"{distribution} {found}"


def tree(context: Context) -> str:
    """Each file that the series touches is, byte for byte, what the series left behind."""
    path = context.series / "tree"
    require(path.is_file(), f"{path} is missing")
    lines = [line.split() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    bad = [len(fields) for fields in lines if len(fields) != 3]
    require(not bad, f"{path}: a line has {bad[:1]} fields instead of 3 (PATH BEFORE AFTER)")
    listed = [line for line in (context.series / "series").read_text().splitlines() if line.strip() and line[0] != "#"]
    require(bool(listed) == bool(lines), f"series lists {len(listed)} patches, and tree {len(lines)} files")
    root = package_root(context.release["engine"])
    for name, _, after in lines:
        file = root / name
        if after == "-":
            require(not file.exists(), f"{name} is there, the series removes it")
            continue
        require(file.is_file(), f"{name} is missing")
        require(hashlib.sha256(file.read_bytes()).hexdigest() == after, f"{name} is not what the series makes of it")
    return f"{len(lines)} files as the series leaves them" if lines else "the series touches no file"


def record(context: Context) -> str:
    """Each file of the engine's package has the sha256 and the size that its RECORD says, the patched ones, too."""
    name = context.release["engine"]
    try:
        files = importlib.metadata.files(name)
    except importlib.metadata.PackageNotFoundError:
        raise Unmet(f"{name} is not installed") from None
    path = next((Path(str(file.locate())) for file in files or () if file.name == "RECORD"), None)
    if path is None:
        raise Unmet(f"{name} has no RECORD")
    try:
        wrong = wheel_record.differences(path)
        listed = {fields[0] for _, fields in wheel_record.read(path)}
    except wheel_record.Untrue as untrue:
        raise Unmet(str(untrue)) from None
    lines = [line.split()[0] for line in (context.series / "tree").read_text().splitlines() if line.strip()]
    wrong += [f"{file} is not listed" for file in lines if file[0] != "#" and file not in listed]
    require(not wrong, f"{len(wrong)} files are not as RECORD says: {'; '.join(wrong[:3])}")
    require(len(listed) > 1, f"RECORD of {name} lists no file")
    return f"{len(listed)} files of {name}"


def kimi_k2_config(drafter: Path, get_config: Callable[..., Any]) -> str:
    """A drafter's folder whose config.json says kimi_k2 has a config, by the engine's own `get_config`."""
    try:
        config = get_config(str(drafter), trust_remote_code=False)
    except ValueError as error:
        raise Unmet(f"a drafter of model type kimi_k2 has no config: {error}") from None
    require(config.architectures == ["LlamaForCausalLMEagle3"], f"its architectures become {config.architectures}")
    return f"kimi_k2 loads as {type(config).__name__}"


def mla_drafter(registered: Collection[str], deepseek_v3: Callable[[], str], kimi_k2: Callable[[], str]) -> str:
    """An MLA drafter has a class, and runs under either model type that training tools export it under.

    deepseek_v3 is also the type of targets with MTP layers, which is what an engine may take it for.
    """
    name = "Eagle3DeepseekV2ForCausalLM"
    require(name in registered, f"no model class is registered for {name}")
    deepseek_v3()
    return f"{kimi_k2()}, model types kimi_k2 and deepseek_v3"


# What nearly each gap wants.
PATCH = "apply the patch of the series that closes it (patches/README.md), or use a release that has closed it"

_C = '#include <Python.h>\nstatic struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "probe", 0, -1, 0};\n'
_C += "PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&def); }\n"
_CU = "__global__ void probe(int *x) { *x = 1; }\nvoid run() { int *p = 0; cudaMalloc(&p, 4); probe<<<1, 1>>>(p); }\n"


def _compile(command: list[str], work: Path) -> None:
    try:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        raise Unmet(f"{command[0]} is not there") from None
    said = (done.stderr + done.stdout).strip().splitlines() or ["no message"]
    error = next((line for line in said if re.search("error|cannot", line)), said[-1])
    require(done.returncode == 0, f"{command[0]} fails: {error.strip()}")


def compiler(context: Context) -> str:
    """What kernels that are built at run time need: a C compiler with Python.h; nvcc where the release has one."""
    work = context.work / "compiler"
    work.mkdir()
    (work / "probe.c").write_text(_C)
    cc = os.environ.get("CC", "gcc")
    include = sysconfig.get_path("include")
    _compile([cc, "-shared", "-fPIC", f"-I{include}", "probe.c", "-o", "probe.so"], work)
    spec = importlib.util.spec_from_file_location("probe", work / "probe.so")
    if spec is None or spec.loader is None:
        raise Unmet("the extension that was built can't be imported")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    if not context.release.get("nvcc"):
        return "C with Python.h"
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"  # where FlashInfer and torch look, too
    (work / "probe.cu").write_text(_CU)
    arch = context.release.get("arch")
    require(arch, "release.json names no GPU architecture (arch)")
    # As FlashInfer does it: a library, linked with the driver's, for which the toolkit has a stub.
    flags = ["-shared", "-Xcompiler", "-fPIC", f"-L{home}/lib64", f"-L{home}/lib64/stubs", "-lcudart", "-lcuda"]
    _compile([f"{home}/bin/nvcc", f"-arch={arch}", "probe.cu", *flags, "-o", "probe_cuda.so"], work)
    return f"C with Python.h; nvcc for {arch}"


FIRST = (
    Check("version", version, "build the image again from pins.toml; nothing may be installed over the engine"),
    Check("tree", tree, "apply the series to the pristine wheel again (or write `tree` again after a patch changed)"),
    Check("record", record, "apply the series to a fresh install, with apply_series.py, which keeps RECORD true"),
)
LAST = (Check("compiler", compiler, "put gcc, libc6-dev, Python's headers (and nvcc, under CUDA_HOME) in the image"),)
