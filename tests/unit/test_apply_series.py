"""apply_series.py: exact or refused, all or nothing, in one line that names the place."""

import hashlib
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from series_help import APPLY, HEADER, apply, diff, sha256, snapshot, write_root, write_series

LINES = b"".join(b"x%d = %d\n" % (i, i) for i in range(40))
BEFORE = {"vllm/a.py": LINES, "vllm/sub/b.py": b"one = 1\ntwo = 2\n", "vllm/other.py": b"untouched = 1\n"}
FIRST = {"vllm/a.py": LINES.replace(b"x20 = 20\n", b"x20 = 21\nx20b = 22\n"), "vllm/sub/b.py": b"one = 1\ntwo = 3\n"}
SECOND = {"vllm/a.py": FIRST["vllm/a.py"].replace(b"x30 = 30\n", b""), "vllm/new/c.py": b"made = True\n"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_root(tmp_path / "site-packages", BEFORE)


@pytest.fixture
def series(tmp_path: Path) -> Path:
    return write_series(tmp_path / "series", BEFORE, FIRST, SECOND)


def refused(series: Path, root: Path, *words: str) -> str:
    """Both with --check and without, the series is refused in one line with all words, and nothing is changed."""
    before = snapshot(root)
    for options in ([], ["--check"]):
        done = apply(series, root, *options)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        for word in words:
            assert word in done.stderr
    assert snapshot(root) == before
    return done.stderr


def test_a_series_gives_exactly_its_target_and_touches_nothing_else(series: Path, root: Path) -> None:
    done = apply(series, root)
    assert done.returncode == 0, done.stderr
    sources = {path: data for path, data in snapshot(root).items() if path.endswith(".py")}
    assert sources == BEFORE | FIRST | SECOND
    assert done.stdout.count("\n") == 3 and "applied: 2 patches, 3 files" in done.stdout


def test_check_writes_nothing(series: Path, root: Path) -> None:
    before = snapshot(root)
    done = apply(series, root, "--check")
    assert done.returncode == 0 and "fits: 2 patches" in done.stdout
    assert snapshot(root) == before


def test_a_second_application_is_named_as_such(series: Path, root: Path) -> None:
    assert apply(series, root).returncode == 0
    refused(series, root, "already applied")


def test_a_half_applied_tree_is_refused(series: Path, root: Path) -> None:
    (root / "vllm/a.py").write_bytes(SECOND["vllm/a.py"])
    assert "already applied" not in refused(series, root, "vllm/a.py", "install the engine again")


def test_a_hunk_off_by_one_line_is_refused(series: Path, root: Path) -> None:
    patch = series / "0001-step.patch"
    patch.write_bytes(patch.read_bytes().replace(b"@@ -18,7 +18,8 @@", b"@@ -19,7 +19,8 @@"))
    refused(series, root, "0001-step.patch:", "vllm/a.py:19")


def test_a_hunk_that_says_another_place_to_land_is_refused(series: Path, root: Path) -> None:
    patch = series / "0001-step.patch"
    patch.write_bytes(patch.read_bytes().replace(b"+18,8 @@", b"+19,8 @@"))
    refused(series, root, "0001-step.patch:", "lands at +18")


def test_a_changed_context_line_is_refused_at_its_line(series: Path, root: Path) -> None:
    patch = series / "0001-step.patch"
    text = patch.read_bytes()
    patch.write_bytes(text.replace(b" x23 = 23\n", b" x23 = 24\n"))
    line = text[: text.index(b" x23 = 23")].count(b"\n") + 1
    refused(series, root, f"0001-step.patch:{line}:", "vllm/a.py:24", "x23 = 23")


def test_a_changed_byte_in_an_added_line_is_refused(series: Path, root: Path) -> None:
    patch = series / "0001-step.patch"
    patch.write_bytes(patch.read_bytes().replace(b"+two = 3\n", b"+two = 4\n"))
    refused(series, root, "vllm/sub/b.py", "after the series")


@pytest.mark.parametrize("column", [1, 2])
def test_a_changed_hash_in_tree_is_refused(series: Path, root: Path, column: int) -> None:
    words = (series / "tree").read_text().splitlines()[0].split()
    words[column] = words[column][:-1] + ("0" if words[column][-1] != "0" else "1")
    (series / "tree").write_text(
        " ".join(words) + "\n" + "\n".join((series / "tree").read_text().splitlines()[1:]) + "\n"
    )
    refused(series, root, "vllm/a.py", "tree")


def test_a_changed_byte_in_the_sources_is_refused(series: Path, root: Path) -> None:
    (root / "vllm/a.py").write_bytes(LINES.replace(b"x1 = 1", b"x1 = 2"))  # far from any hunk
    refused(series, root, "vllm/a.py", "these are other sources")


def test_a_missing_source_and_an_unexpected_one_are_refused(series: Path, root: Path) -> None:
    (root / "vllm/new").mkdir()
    (root / "vllm/new/c.py").write_bytes(b"mine = 1\n")
    refused(series, root, "vllm/new/c.py", "there to be none")
    (root / "vllm/new/c.py").unlink()
    (root / "vllm/a.py").unlink()
    refused(series, root, "vllm/a.py", "is missing")


def test_patches_apply_in_the_order_of_series(series: Path, root: Path) -> None:
    (series / "series").write_text("0002-step.patch\n0001-step.patch\n")
    refused(series, root, "0002-step.patch:")


def test_tree_lists_exactly_the_files_that_are_touched(series: Path, root: Path) -> None:
    tree = (series / "tree").read_text()
    (series / "tree").write_text("".join(tree.splitlines(keepends=True)[:-1]))
    refused(series, root, "vllm/sub/b.py", "doesn't list")
    (series / "tree").write_text(tree + f"vllm/zzz.py {'0' * 64} {'1' * 64}\n")
    refused(series, root, "vllm/zzz.py", "no patch touches")
    (series / "tree").write_text("".join(reversed(tree.splitlines(keepends=True))))
    refused(series, root, "tree:2", "sorted order")


@pytest.mark.parametrize("missing", ["series", "tree", "0001-step.patch"])
def test_a_missing_file_of_the_series_is_named(series: Path, root: Path, missing: str) -> None:
    (series / missing).unlink()
    refused(series, root, missing)


def test_a_patch_listed_twice_is_refused(series: Path, root: Path) -> None:
    (series / "series").write_text("0001-step.patch\n0001-step.patch\n")
    refused(series, root, "0001-step.patch", "comes twice")


def test_an_empty_series_says_why(tmp_path: Path, root: Path) -> None:
    folder = write_series(tmp_path / "empty", {})
    (folder / "series").write_text("# Upstream has all of it.\n")
    done = apply(folder, root)
    assert done.returncode == 0 and "0 patches" in done.stdout and "Upstream has all of it." in done.stdout
    (folder / "series").write_text("\n#\n")
    refused(folder, root, "series", "doesn't say why")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"--- a/vllm/a.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n", "deletes a file"),
        (b"--- a/vllm/a.py\n+++ b/vllm/z.py\n@@ -1 +1 @@\n-x\n+y\n", "renames"),
        (
            b"diff --git a/vllm/a.py b/vllm/z.py\nsimilarity index 100%\nrename from vllm/a.py\n",
            "no part of a text diff",
        ),
        (b"diff --git a/vllm/a.so b/vllm/a.so\nGIT binary patch\nliteral 3\n", "no part of a text diff"),
        (b"--- a/../a.py\n+++ b/../a.py\n@@ -1 +1 @@\n-x\n+y\n", "inside site-packages"),
        (b"--- a//etc/x.py\n+++ b//etc/x.py\n@@ -1 +1 @@\n-x\n+y\n", "inside site-packages"),
        (b"--- a/vllm/a.py\n+++ b/vllm/a.py\n", "no hunk"),
        (b"--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1,2 @@\n-x\n+y\n", "breaks off"),
        (b"--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1,2 +1,2 @@\n\n-x\n+y\n", "blank context line"),
        (b"--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1 @@\n-x\n+y\n+z\n", "no part of a text diff"),
        (b"--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1 @@\n-x\n+y\n-- \n2.39\n", "no part of a text diff"),
        (b"", "holds no diff"),
    ],
)
def test_what_a_series_cannot_do_is_refused_with_its_line(series: Path, root: Path, body: bytes, words: str) -> None:
    (series / "0001-step.patch").write_bytes(HEADER.encode() + body)
    refused(series, root, "0001-step.patch", words)


def test_a_patch_without_a_reason_is_refused(series: Path, root: Path) -> None:
    patch = series / "0001-step.patch"
    patch.write_bytes(patch.read_bytes().replace(b"Description:", b"Subject:"))
    refused(series, root, "0001-step.patch:1", "Description")


def test_python_that_does_not_compile_is_refused(tmp_path: Path, root: Path) -> None:
    folder = write_series(tmp_path / "bad", BEFORE, {"vllm/sub/b.py": b"one = 1\ntwo = (\n"})
    refused(folder, root, "vllm/sub/b.py:2", "doesn't compile")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"a = 1\r\nb = 2\r\n", b"a = 1\r\nb = 3\r\n"),
        (b"a = 1\nb = 2", b"a = 1\nb = 3"),
        (b"a = 1\nb = 2", b"a = 1\nb = 2\n"),
        (b"a = 1\nb = 2\n", b"a = 1\nb = 2"),
        (b"", b"a = 1\n"),
        (b"a = 1\x0c\nb = 2\x0b\n", b"a = 1\x0c\nb = 2\n"),
    ],
)
def test_line_ends_are_content(tmp_path: Path, old: bytes, new: bytes) -> None:
    root = write_root(tmp_path / "root", {"vllm/t.txt": old})
    folder = write_series(tmp_path / "s", {"vllm/t.txt": old}, {"vllm/t.txt": new})
    done = apply(folder, root)
    assert done.returncode == 0, done.stderr
    assert (root / "vllm/t.txt").read_bytes() == new


def test_crlf_sources_refuse_a_patch_with_line_feeds(tmp_path: Path) -> None:
    old, new = b"a = 1\r\nb = 2\r\n", b"a = 1\r\nb = 3\r\n"
    root = write_root(tmp_path / "root", {"vllm/t.txt": old})
    folder = write_series(tmp_path / "s", {"vllm/t.txt": old}, {"vllm/t.txt": new})
    patch = folder / "0001-step.patch"
    patch.write_bytes(patch.read_bytes().replace(b"\r\n", b"\n"))
    refused(folder, root, "0001-step.patch:", "vllm/t.txt:1")


def test_hardlinks_of_a_file_keep_the_old_content_and_the_mode_is_kept(
    series: Path, root: Path, tmp_path: Path
) -> None:
    (root / "vllm/a.py").chmod(0o750)
    os.link(root / "vllm/a.py", tmp_path / "cache.py")
    inode = (root / "vllm/a.py").stat().st_ino
    assert apply(series, root).returncode == 0
    assert (tmp_path / "cache.py").read_bytes() == LINES
    assert (root / "vllm/a.py").stat().st_ino != inode
    assert (root / "vllm/a.py").stat().st_mode & 0o777 == 0o750
    assert (root / "vllm/new/c.py").stat().st_mode & 0o777 == 0o644


def test_a_failure_while_writing_puts_everything_back(series: Path, root: Path) -> None:
    cache = root / "vllm/sub/__pycache__"
    (cache / f"b.{sys.implementation.cache_tag}.pyc").mkdir(parents=True)  # no file can take its place
    before, inode = snapshot(root), (root / "vllm/a.py").stat().st_ino
    folders = sorted(p for p in root.rglob("*") if p.is_dir())
    done = apply(series, root)
    assert done.returncode == 1 and "no file is changed" in done.stderr and done.stderr.count("\n") == 1
    assert snapshot(root) == before and (root / "vllm/a.py").stat().st_ino == inode
    assert sorted(p for p in root.rglob("*") if p.is_dir()) == folders


def test_files_written_before_the_failing_one_are_restored(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("apply_series", APPLY)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "apply_series", module)
    spec.loader.exec_module(module)
    (root / "vllm/blocked.txt").mkdir()  # no file can take its place
    before, inode = snapshot(root), (root / "vllm/a.py").stat().st_ino
    seen: list[tuple[str, bytes]] = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        replace(source, target)
        seen.append((Path(target).name, Path(target).read_bytes()))

    monkeypatch.setattr(os, "replace", watched)
    with pytest.raises(OSError, match=r"blocked\.txt"):
        module.write({root / "vllm/a.py": b"new = 1\n", root / "vllm/blocked.txt": b"new = 1\n"})
    assert [data for name, data in seen if name == "a.py"] == [b"new = 1\n", LINES]
    assert snapshot(root) == before and (root / "vllm/a.py").stat().st_ino == inode


def test_bytecode_is_by_checked_hash_and_stale_bytecode_is_never_used(series: Path, root: Path) -> None:
    import py_compile

    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    old = Path(py_compile.compile(str(root / "vllm/sub/b.py"), invalidation_mode=mode) or "")
    assert apply(series, root).returncode == 0
    data = old.read_bytes()
    assert data[4:8] == (0b11).to_bytes(4, "little")
    assert data[8:16] == importlib.util.source_hash(FIRST["vllm/sub/b.py"])
    show = "import vllm.sub.b as b; print(b.two, b.__spec__.cached, b.__loader__.get_code('vllm.sub.b').co_filename)"
    done = subprocess.run([sys.executable, "-c", show], cwd=root, capture_output=True, text=True)
    assert done.stdout.split() == ["3", str(old), str(root / "vllm/sub/b.py")]


def test_bytecode_for_another_python_that_would_hide_the_patch_is_refused(series: Path, root: Path) -> None:
    other = root / "vllm/sub/__pycache__/b.cpython-399.pyc"
    other.parent.mkdir()
    other.write_bytes(b"\0\0\0\0" + (0b01).to_bytes(4, "little") + b"\0" * 8)
    before = snapshot(root)
    done = apply(series, root)
    assert done.returncode == 1 and "b.cpython-399.pyc" in done.stderr and "hide the patch" in done.stderr
    assert snapshot(root) == before


def test_the_record_names_all_hashes_and_can_be_checked_with_sha256sum(series: Path, root: Path) -> None:
    record = json.loads(apply(series, root, "--json").stdout)
    names = ["series", "0001-step.patch", "0002-step.patch", "tree"]
    listing = subprocess.run(["sha256sum", *names], cwd=series, capture_output=True).stdout
    assert record["series_sha256"] == hashlib.sha256(listing).hexdigest()
    assert [p["name"] for p in record["patches"]] == names[1:3]
    assert record["patches"][0]["description"] == "Make the example say something else"
    assert record["files"][0] == {
        "path": "vllm/a.py",
        "before": sha256(LINES),
        "after": sha256(SECOND["vllm/a.py"]),
    }
    assert record["files"][1]["before"] is None


def test_any_difflib_diff_gives_its_target_exactly(tmp_path: Path) -> None:
    random.seed(20261130)
    words = [
        b"",
        b"a",
        b"b",
        b"c\r",
        b"+d",
        b"-e",
        b" f",
        b"@@ -1 +1 @@",
        b"--- a/x",
        b"+++ b/x",
        b"\\ No newline at end of file",
    ]
    before: dict[str, bytes] = {}
    steps: list[dict[str, bytes]] = [{}, {}, {}]
    for number in range(60):
        path, current = f"vllm/f{number:02}.txt", [random.choice(words) for _ in range(random.randrange(1, 30))]
        before[path] = b"\n".join(current)
        for step in steps:
            for _ in range(random.randrange(1, 5)):
                at = random.randrange(len(current) + 1)
                current[at : at + random.randrange(3)] = [random.choice(words) for _ in range(random.randrange(3))]
            content = b"\n".join(current)
            have = next((s[path] for s in reversed(steps) if path in s), before[path])
            if content != have:
                step[path] = content
    before = {path: data for path, data in before.items() if any(path in step for step in steps)}
    target = before | steps[0] | steps[1] | steps[2]
    changed = [path for path in before if target[path] == before[path]]
    folder = write_series(tmp_path / "s", before, *steps)
    root = write_root(tmp_path / "root", before)
    done = apply(folder, root)
    assert done.returncode == 0, done.stderr
    assert snapshot(root) == target and len(target) > 50 and len(changed) < 10


def test_a_diff_without_context_still_needs_its_place(tmp_path: Path) -> None:
    old, new = LINES, LINES.replace(b"x20 = 20\n", b"x20 = 20\nadded = 1\n")
    root = write_root(tmp_path / "root", {"vllm/a.py": old})
    folder = write_series(tmp_path / "s", {"vllm/a.py": old}, {"vllm/a.py": new})
    (folder / "0001-step.patch").write_bytes(HEADER.encode() + diff("vllm/a.py", old, new, context=0))
    assert apply(folder, root, "--check").returncode == 0
    text = (folder / "0001-step.patch").read_bytes()
    (folder / "0001-step.patch").write_bytes(text.replace(b"@@ -21,0 +22", b"@@ -22,0 +23"))
    refused(folder, root, "vllm/a.py", "after the series")
