"""Read the GPU code that a shared object holds: which architectures, as machine code (cubin) or as PTX.

Standard library alone; headers are read in place (mmap), never the code itself, and nothing is decompressed.

Where GPU code lies in an ELF file. `nvcc` writes it to the sections `.nv_fatbin` and `__nv_relfatbin` (named in
the CUDA toolkit's fatbinary_section.h), as a row of fat binaries. NVIDIA's libraries also keep fat binaries in data
sections of their own (`.ldata` of libcufft, `.cask_resource` of libcublasLt and libcudnn, `.rodata` of libcusparse),
which cuobjdump doesn't list; they are found here by their magic.

What a fat binary is (little-endian; not documented by NVIDIA, checked here against what its `fatbinary` writes and
its `cuobjdump` lists, CUDA 12.8 to 13.5):

    header  u32 magic 0xBA55ED50, u16 version 1, u16 header size 16, u64 size of all entries
    entry   u16 kind (1 PTX, 2 cubin, 8 LTO-IR), u16, u32 header size, u64 size of the payload with its padding,
            u32 compressed size, u32, u16 minor and u16 major version (of the PTX ISA, where the kind is PTX),
            u32 architecture (120), u32, u32, u64 flags
    flags   0x2000 LZ4 and 0x8000 zstd (payload compressed), 0x100000 suffix `a`, 0x200000 suffix `f`

The suffix is taken from these flags. The cubin's own e_flags don't settle it: a cubin for sm_120a and one for sm_120
can carry the same ones, and cuobjdump lists an sm_120f cubin as sm_120.
"""

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0xBA55ED50
MAGIC_BYTES = struct.pack("<I", MAGIC)
HEADER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQIIHHIIIQ")
KINDS = {1: "ptx", 2: "cubin"}
ARCH_SPECIFIC, FAMILY_SPECIFIC = 0x100000, 0x200000
CODE_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
PADDING = 4096  # The most that a linker puts between two fat binaries to align them.

ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
ELF_SECTION = struct.Struct("<IIQQQQIIQQ")
ELF64_LITTLE = b"\x7fELF\x02\x01"
ET_DYN = 3
SHT_NOBITS = 8
SHF_ALLOC, SHF_EXECINSTR = 2, 4

CURE = "install the package that owns it again"


class Malformed(Exception):
    """A file that can't be read for what it claims to be. The message is one line: file, place, what, cure."""


@dataclass(frozen=True)
class Code:
    """One piece of GPU code: kind `cubin`, `ptx` or `other`; arch as in `sm_90a`; isa is the PTX version, or ()."""

    kind: str
    arch: str
    isa: tuple[int, ...] = ()


@dataclass(frozen=True)
class FatBinary:
    """The pieces of one fat binary (usually one source file), and the section that holds it."""

    section: str
    codes: tuple[Code, ...]


@dataclass(frozen=True)
class Section:
    """A section of an ELF file: offset and size in bytes."""

    name: str
    kind: int
    flags: int
    offset: int
    size: int


def arch_number(arch: str) -> tuple[int, str]:
    """`sm_90a` as (90, "a"). Raises ValueError for anything else than sm_<digits> and an optional a or f."""
    match = re.fullmatch(r"sm_(\d{2,4})([af]?)", arch)
    if not match:
        raise ValueError(f"{arch!r} is not an architecture like sm_120 or sm_90a")
    return int(match[1]), match[2]


def usable(code: Code, target: int) -> bool:
    """Whether a GPU of architecture `target` (120 for capability 12.0) can run `code`.

    The rules are those of the CUDA programming guide: a cubin runs on its own major version, from its own minor
    version up; PTX is compiled by the driver for any later architecture; the suffix `a` binds both to exactly that
    architecture, and `f` to its family, that is the major version, from its own minor version up.
    """
    number, suffix = arch_number(code.arch)
    same_major = number // 10 == target // 10 and number <= target
    if suffix == "a":
        return code.kind in ("cubin", "ptx") and number == target
    if code.kind == "ptx" and not suffix:
        return number <= target
    return code.kind in ("cubin", "ptx") and same_major


def status(codes: tuple[Code, ...], target: int) -> str:
    """The best that a GPU of `target` finds: `native` machine code, `ptx` for the driver to compile, or `none`."""
    kinds = {code.kind for code in codes if usable(code, target)}
    return "native" if "cubin" in kinds else "ptx" if "ptx" in kinds else "none"


def is_shared_object(path: Path) -> bool:
    """Whether the file is a 64-bit little-endian ELF shared object, whatever its name. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(18)
    return head.startswith(ELF64_LITTLE) and head[16:18] == struct.pack("<H", ET_DYN)


def read(path: Path) -> tuple[FatBinary, ...]:
    """All fat binaries of a shared object, in file order; empty where it holds no GPU code.

    Raises Malformed where the file is truncated or what it holds is broken, OSError where it can't be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        try:
            return tuple(found for section in _sections(view) for found in _of_section(view, section))
        except struct.error:
            raise Malformed(f"{path}: truncated inside its headers; {CURE}") from None
        except Malformed as error:
            raise Malformed(f"{path}: {error}; {CURE}") from None


def _sections(view: mmap.mmap) -> list[Section]:
    """The section table; a file without one is a single section, to be searched."""
    fields = ELF_HEADER.unpack_from(view)
    table, entry_size, count, names = fields[6], fields[11], fields[12], fields[13]
    if table == 0:
        return [Section("the file", 0, SHF_ALLOC, 0, len(view))]
    if entry_size != ELF_SECTION.size or names >= count or table + count * entry_size > len(view):
        raise Malformed("its section table is broken or cut off")
    rows = [ELF_SECTION.unpack_from(view, table + i * entry_size) for i in range(count)]
    sections = []
    for name, kind, flags, _, offset, size, *_ in rows:
        if kind != SHT_NOBITS and offset + size > len(view):
            raise Malformed("a section ends beyond the end of the file, which is cut off")
        start = rows[names][4] + name
        text = view[start : view.find(b"\0", start)].decode("ascii", "replace")
        sections.append(Section(text, kind, flags, offset, size))
    return sections


def _of_section(view: mmap.mmap, section: Section) -> list[FatBinary]:
    if section.kind == SHT_NOBITS or not section.size:
        return []
    if section.name in CODE_SECTIONS:
        return _row(view, section)
    data = section.flags & SHF_ALLOC and not section.flags & SHF_EXECINSTR
    return _embedded(view, section) if data else []


def _row(view: mmap.mmap, section: Section) -> list[FatBinary]:
    """The fat binaries of a section that holds nothing else."""
    at, end = section.offset, section.offset + section.size
    found = []
    while at < end:
        if view[at : at + 4] == MAGIC_BYTES:
            codes, at = _fat_binary(view, at, end, section)
            found.append(FatBinary(section.name, codes))
            continue
        following = view.find(MAGIC_BYTES, at, min(end, at + PADDING))
        gap_end = following if following >= 0 else end
        if not found or gap_end - at > PADDING or view[at:gap_end].strip(b"\0"):
            raise Malformed(f"no fat binary at byte {at - section.offset} of {section.name}")
        at = gap_end
    return found


def _embedded(view: mmap.mmap, section: Section) -> list[FatBinary]:
    """Fat binaries between other data. The magic alone proves nothing here, so what doesn't parse is passed over."""
    end = section.offset + section.size
    found = []
    at = view.find(MAGIC_BYTES, section.offset, end)
    while at >= 0:
        try:
            codes, following = _fat_binary(view, at, end, section)
            found.append(FatBinary(section.name, codes))
        except Malformed:
            following = at + len(MAGIC_BYTES)
        at = view.find(MAGIC_BYTES, following, end)
    return found


def _fat_binary(view: mmap.mmap, start: int, limit: int, section: Section) -> tuple[tuple[Code, ...], int]:
    """The codes of the fat binary at `start`, and the offset after it. Raises Malformed."""
    where = f"the fat binary at byte {start - section.offset} of {section.name}"
    if start + HEADER.size > limit:
        raise Malformed(f"{where} is cut off in its header")
    _, version, header_size, size = HEADER.unpack_from(view, start)
    if version != 1 or header_size != HEADER.size:
        raise Malformed(f"{where} has version {version} and a header of {header_size} bytes, not 1 and {HEADER.size}")
    at, end = start + header_size, start + header_size + size
    if end > limit or not size:
        raise Malformed(f"{where} claims {size} bytes, where {limit - at} are left")
    codes = []
    while at < end:
        if at + ENTRY.size > end:
            raise Malformed(f"{where} is cut off inside an entry")
        kind, _, entry_header, payload, _, _, minor, major, number, _, _, flags = ENTRY.unpack_from(view, at)
        following = at + entry_header + payload
        if entry_header < ENTRY.size or following > end or not 10 <= number < 1000:
            raise Malformed(f"{where} has a broken entry at byte {at - start}")
        suffix = "a" if flags & ARCH_SPECIFIC else "f" if flags & FAMILY_SPECIFIC else ""
        name = KINDS.get(kind, "other")
        codes.append(Code(name, f"sm_{number}{suffix}", (major, minor) if name == "ptx" else ()))
        at = following
    return tuple(codes), end
