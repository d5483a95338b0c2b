"""The runner of the contract, and the checks that need no engine."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

IN_IMAGE = Path(__file__).parents[2] / "scripts/in_image"
sys.path.append(str(IN_IMAGE))

import contract  # noqa: E402
import contract_check  # noqa: E402
import contract_sglang  # noqa: E402
import contract_sglang_target  # noqa: E402
import contract_vllm  # noqa: E402
from contract_check import Check, Context, Unmet  # noqa: E402


def context(tmp_path: Path, **release: Any) -> Context:
    work = tmp_path / "work"
    work.mkdir()
    return Context({"engine": "vllm", "version": "1.0", **release}, tmp_path, work)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, IN_IMAGE / "contract.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def release_file(tmp_path: Path, **release: Any) -> Path:
    file = tmp_path / "release.json"
    file.write_text(json.dumps({"engine": "vllm", "version": "1.0"} | release))
    return file


def test_a_check_that_breaks_is_false_and_the_others_go_on(tmp_path: Path) -> None:
    def breaks(_: Context) -> str:
        raise ZeroDivisionError("line one\nline two")

    def unmet(_: Context) -> str:
        raise Unmet("not there")

    def leaves(_: Context) -> str:
        raise SystemExit(3)

    checks = [
        Check("a", breaks, "cure a"),
        Check("b", unmet, "cure b"),
        Check("c", leaves, "cure c"),
        Check("d", lambda _: "fine", "cure d"),
    ]
    results = contract.run_all(checks, context(tmp_path), False, None)
    assert [(r.name, r.ok, r.detail, r.cure) for r in results] == [
        ("a", False, "ZeroDivisionError: line one line two", "cure a"),
        ("b", False, "not there", "cure b"),
        ("c", False, "SystemExit: 3", "cure c"),
        ("d", True, "fine", ""),
    ]
    assert contract.report({"engine": "vllm", "version": "1.0"}, results)["ok"] is False


def test_no_result_is_not_a_pass() -> None:
    assert contract.report({"engine": "vllm", "version": "1.0"}, [])["ok"] is False


@pytest.mark.parametrize("only", ["", ","])
def test_nothing_to_check_is_an_error(only: str, tmp_path: Path) -> None:
    done = run("--release", release_file(tmp_path), "--only", only)
    assert done.returncode == 1
    assert done.stderr == "error: nothing to check: --only names no check\n"


def test_an_unknown_name_is_an_error_with_the_cure(tmp_path: Path) -> None:
    done = run("--release", release_file(tmp_path), "--only", "version,virsion")
    assert done.returncode == 1
    assert done.stderr == "error: no check is named virsion; contract.py --list names them\n"


def test_an_engine_without_a_contract_is_an_error(tmp_path: Path) -> None:
    done = run("--release", release_file(tmp_path, engine="other"))
    assert done.returncode == 1
    assert "no contract is written for engine 'other'" in done.stderr


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"engine": "vllm"}', "no json"])
def test_a_release_that_says_nothing_is_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "release.json"
    file.write_text(text)
    done = run("--release", file)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("engine", "adapter"), [("vllm", contract_vllm), ("sglang", contract_sglang)])
def test_a_missing_engine_makes_each_check_false_and_crashes_none(engine: str, adapter: Any, tmp_path: Path) -> None:
    release = release_file(tmp_path, engine=engine)
    done = run("--json", "--release", release, "--series", tmp_path)
    assert done.returncode == 1
    assert done.stderr == ""
    outcome = json.loads(done.stdout)
    names = [check.name for check in (*contract_check.FIRST, *adapter.CHECKS, *contract_check.LAST)]
    assert [check["name"] for check in outcome["checks"]] == names
    assert {check["name"] for check in outcome["checks"] if check["ok"]} <= {"compiler"}
    assert outcome["checks"][0]["detail"] == f"{engine} is not installed"
    assert set(outcome) == {"engine", "version", "checks", "ok"}


@pytest.mark.parametrize(("engine", "count"), [("vllm", 16), ("sglang", 18)])
def test_names_are_listed_without_the_engine_and_are_unique(engine: str, count: int, tmp_path: Path) -> None:
    done = run("--list", "--release", release_file(tmp_path, engine=engine))
    names = done.stdout.split()
    assert done.returncode == 0
    assert len(names) == len(set(names)) == count


def test_a_call_that_passes_no_ids_is_found_by_file_and_line(tmp_path: Path) -> None:
    call = "model.set_eagle3_layers_to_capture"
    (tmp_path / "runner.py").write_text(f"x = 1\nself.{call}(self.eagle_aux_hidden_state_layer_ids)\n{call}()\n")
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs/runner.py").write_text(f"if x:\n    {call}(layer_ids=eagle_aux_hidden_state_layer_ids)\n")
    (tmp_path / "other.py").write_text(f"def {call.split('.')[1]}(self, layer_ids=None): ...\n{call}([2, 30, 58])\n")
    assert contract_sglang_target.calls_without_ids(tmp_path) == (4, ["other.py:2", "runner.py:3"])
    assert contract_sglang_target.calls_without_ids(tmp_path / "graphs") == (1, [])


def test_what_differs_from_run_to_run_is_not_in_a_detail(tmp_path: Path) -> None:
    text = f"<object at 0x7fab12345678> in {tmp_path}/models/target\n  failed " + "x" * 500
    line = contract.one_line(text, tmp_path)
    assert line.startswith("<object at 0x...> in <work>/models/target failed xxx")
    assert len(line) == 300


def make_package(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = root / "site" / "tinyengine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('must not be imported')\n")
    (package / "model.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(package.parent))
    return package


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("tinyengine/model.py {before} {after}", None),
        ("tinyengine/model.py - {after}", None),
        ("tinyengine/model.py {before} {before}", "tinyengine/model.py is not what the series makes of it"),
        ("tinyengine/gone.py {before} {after}", "tinyengine/gone.py is missing"),
        ("tinyengine/model.py {before} -", "tinyengine/model.py is there, the series removes it"),
        ("tinyengine/model.py {after}", "a line has [2] fields instead of 3"),
        ("# emptied", "series lists 1 patches, and tree 0 files"),
    ],
)
def test_the_tree_is_compared_file_by_file(
    line: str, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_package(tmp_path, monkeypatch)
    after = hashlib.sha256(b"x = 1\n").hexdigest()
    (tmp_path / "series").write_text("# a comment\n0001-a.patch\n")
    (tmp_path / "tree").write_text("# a comment\n" + line.format(before="0" * 64, after=after) + "\n")
    here = context(tmp_path, engine="tinyengine")
    if problem is None:
        assert contract_check.tree(here) == "1 files as the series leaves them"
        return
    with pytest.raises(Unmet) as unmet:
        contract_check.tree(here)
    assert problem in str(unmet.value)


def test_a_series_without_a_tree_is_not_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(tmp_path, monkeypatch)
    with pytest.raises(Unmet, match="tree is missing"):
        contract_check.tree(context(tmp_path, engine="tinyengine"))


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(Unmet, match="no-such-compiler is not there"):
        contract_check.compiler(context(tmp_path))


def test_a_compiler_without_headers_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract_check.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(Unmet, match=r"Python\.h"):
        contract_check.compiler(context(tmp_path))


def test_a_missing_nvcc_is_named_where_the_release_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    with pytest.raises(Unmet, match="cuda/bin/nvcc is not there"):
        contract_check.compiler(context(tmp_path, nvcc=True, arch="sm_120"))
