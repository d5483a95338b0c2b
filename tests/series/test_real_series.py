"""The repository's own series on the pristine wheels that they were made for, and on those they weren't."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.pipeline import check_patches, diffs, files, new_series, pins, series, wheels
from scripts.pipeline.say import Stop

PINS = pins.load()
RELEASES = [release for release in PINS.releases if not release.swapped]
each_release = pytest.mark.parametrize("release", RELEASES, ids=[release.name for release in RELEASES])


def copy(release: pins.Release, to: Path) -> Path:
    return Path(shutil.copytree(release.series, to / "series"))


def first_patch(folder: Path) -> Path:
    names = series.entries((folder / "series").read_bytes())
    if not names:
        pytest.skip("this release's series is empty")
    return folder / names[0]


def judge(folder: Path, release: pins.Release) -> dict[str, object]:
    paths = series.touched(series.load(folder))
    return check_patches.judge(folder, paths, wheels.pristine(release, PINS))


def test_every_series_is_sound_and_fits_every_wheel(capfd: pytest.CaptureFixture[str]) -> None:
    check_patches.job([])
    assert "fit exactly" in capfd.readouterr().out


@each_release
def test_each_patched_file_has_its_recorded_hash(release: pins.Release, tmp_path: Path) -> None:
    paths = series.touched(series.load(release.series))
    wheels.pristine(release, PINS).extract(paths, tmp_path)
    command = [sys.executable, str(check_patches.APPLY), str(release.series), str(tmp_path), "--json"]
    record = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for file in record["files"]:
        assert files.sha256(tmp_path / file["path"]) == file["after"] != file["before"]


@each_release
def test_no_other_release_takes_a_series(release: pins.Release) -> None:
    others = [other for other in RELEASES if other.version != release.version]
    assert others and series.entries((release.series / "series").read_bytes())
    for other in others:
        with pytest.raises(Stop, match=r"these are other sources|there to be none"):
            judge(release.series, other)


# Releases of SGLang after 0.5.9 that are not pinned: the next one, and the one with the last change that is backported.
LATER = {
    "0.5.10.post1": "a854a68b11caf6b4b55c241a44378a7cdede7ede325db85c955f131506703bc6",
    "0.5.13": "9d26266ab7e99165098f9e173f4a5a0ef6a0b64a6f30ef0b5ee859eead37e75a",
}


@pytest.mark.parametrize("version", LATER)
def test_a_later_sglang_takes_no_patch_of_0_5_9_alone_nor_all_of_them(version: str, tmp_path: Path) -> None:
    """GNU patch takes the first of them, methods that upstream has by now, and has them twice after that."""
    release = PINS.release("sglang", "0.5.9")
    wheel = wheels.fetched(replace(release, version=version), (LATER[version],), PINS)
    texts = series.load(release.series)
    paths = series.touched(texts)
    with pytest.raises(Stop, match="these are other sources"):
        check_patches.judge(release.series, paths, wheel)
    wheel.extract(paths, tmp_path / "fuzz")
    names = series.entries(texts["series"])
    command = ["patch", "-p1", "--force", "--no-backup-if-mismatch", "-i", release.series / names[0]]
    assert subprocess.run(command, cwd=tmp_path / "fuzz", capture_output=True).returncode == 0
    wrapper = (tmp_path / "fuzz/sglang/srt/models/kimi_k25.py").read_text()
    assert wrapper.count("def set_eagle3_layers_to_capture(") == 2
    for name in names:
        single = tmp_path / name
        single.mkdir()
        patches = {name: texts[name]}
        tree = [line for line in texts["tree"].splitlines() if line.split()[0].decode() in diffs_of(texts[name])]
        for file, data in {**patches, "series": f"{name}\n".encode(), "tree": b"\n".join([*tree, b""])}.items():
            (single / file).write_bytes(data)
        with pytest.raises(Stop, match=r"these are other sources|there to be none"):
            check_patches.judge(single, diffs_of(texts[name]), wheel)
    check_patches.judge(tmp_path / names[0], diffs_of(texts[names[0]]), wheels.pristine(release, PINS))


def diffs_of(patch: bytes) -> list[str]:
    """The paths that one patch touches."""
    return [change.path for change in diffs.parse(patch).changes]


@each_release
def test_one_byte_of_a_patch_is_noticed(release: pins.Release, tmp_path: Path) -> None:
    folder = copy(release, tmp_path)
    judge(folder, release)
    patch = first_patch(folder)
    lines = patch.read_bytes().split(b"\n")
    at = next(
        i for i, line in enumerate(lines) if line.startswith(b"+") and not line.startswith(b"+++") and len(line) > 6
    )
    lines[at] += b" "
    patch.write_bytes(b"\n".join(lines))
    with pytest.raises(Stop, match="after the series"):
        judge(folder, release)


@each_release
@pytest.mark.parametrize("column", [1, 2])
def test_one_digit_of_a_hash_is_noticed(release: pins.Release, tmp_path: Path, column: int) -> None:
    folder = copy(release, tmp_path)
    lines = (folder / "tree").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if not line.startswith("#") and line.split()[column] != "-")
    words = lines[at].split()
    words[column] = ("0" if words[column][0] != "0" else "1") + words[column][1:]
    (folder / "tree").write_text("\n".join([*lines[:at], " ".join(words), *lines[at + 1 :], ""]))
    with pytest.raises(Stop, match=re.escape(words[0])):
        judge(folder, release)


@each_release
def test_a_series_moved_to_its_own_release_is_the_same_series(release: pins.Release) -> None:
    files = series.load(release.series)
    patches = new_series.listed(files, release.series)
    moved = new_series.move(patches, wheels.pristine(release, PINS).read, release.version)
    assert {verdict.name: verdict.data for verdict in moved.verdicts} == patches
    assert [verdict.kind for verdict in moved.verdicts] == ["exact"] * len(patches)
    recorded = [line for line in files["tree"].splitlines() if not line.startswith(b"#")]
    assert recorded == [
        line for line in new_series.tree(moved.before, moved.after).splitlines() if not line.startswith(b"#")
    ]


def test_a_tampered_wheel_in_the_cache_is_named_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    release = PINS.release("vllm", "0.32.0", "cpu")
    real = wheels.pristine(release, PINS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bad = wheels.cache() / real.sha256 / real.path.name
    bad.parent.mkdir(parents=True)
    shutil.copyfile(real.path, bad)
    with bad.open("r+b") as file:
        file.seek(1_000_000)
        byte = file.read(1)
        file.seek(1_000_000)
        file.write(bytes([byte[0] ^ 1]))
    again = wheels.pristine(release, PINS)
    assert again.path == bad and files.sha256(bad) == real.sha256
    assert str(bad) in capfd.readouterr().out
