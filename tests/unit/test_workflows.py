"""The workflows for users: what they run exists, releases come from pins.toml, and they may do no more than needed."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.pipeline import matrix, pins

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PUSH_IS_THERE = (ROOT / "scripts/pipeline/push.py").exists()
PINS = pins.load()


def runs() -> Iterator[tuple[str, str]]:
    """Each command that a workflow runs: the file's name, and the line."""
    for path in WORKFLOWS:
        for line in re.findall(r"^ +-? ?run: (.+)$", path.read_text(), re.MULTILINE):
            yield path.name, line


def sessions() -> list[tuple[str, list[str]]]:
    """Each nox session that a workflow runs, for each engine where it names one, with its options."""
    found = []
    for _, line in runs():
        if match := re.fullmatch(r'nox -s "?([\w$-]+)"?(?: -- (.*))?', line):
            engines = sorted({release.engine for release in PINS.releases}) if "$ENGINE" in match[1] else [""]
            options = re.findall(r"--[a-z-]+", match[2] or "")
            found += [(match[1].replace("$ENGINE", engine), options) for engine in engines]
    return found


@pytest.fixture(scope="module")
def known() -> dict[str, str]:
    """The sessions of noxfile.py, each with its job and first argument, if it has them (`build vllm`)."""
    text = (ROOT / "noxfile.py").read_text()
    found = {}
    for head, name, body in re.findall(r"@nox\.session(.*)\ndef (\w+)\(.*\n((?:    .*\n|\n)+)", text):
        given = re.search(r'name="([\w-]+)"', head)
        job = re.search(r"job\(session, ([^)]*)\)", body)
        found[given[1] if given else name] = job[1].replace('"', "").replace(",", "") if job else ""
    return found


def test_a_workflow_runs_something() -> None:
    assert len(WORKFLOWS) == 2 and len(sessions()) > 8


@pytest.mark.parametrize(("session", "options"), sessions())
def test_each_session_exists_and_takes_the_options_that_it_is_given(
    session: str, options: list[str], known: dict[str, str]
) -> None:
    if session.startswith("push-") and not PUSH_IS_THERE:
        pytest.skip("the push isn't here yet")
    assert session in known
    if options:
        command = [sys.executable, "-m", f"scripts.pipeline.{known[session].split()[0]}"]
        done = subprocess.run(
            [*command, *known[session].split()[1:], "--help"],
            cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "200"},
        )  # fmt: skip
        assert not [option for option in options if not re.search(rf"{option}\b", done.stdout)]


def test_each_other_command_is_one_that_this_test_knows() -> None:
    others = [line for _, line in runs() if not line.startswith("nox ")]
    plain = re.compile(
        r"pip install \"\$\(grep '\^nox==' tests/requirements\.txt\)\"|.*python3 -m scripts\.pipeline\.matrix\b.*"
        r"|printf %s .* \| docker login .* --password-stdin .*|docker logout .*"
    )
    assert others and not [line for line in others if not plain.fullmatch(line)]


def test_every_release_that_is_served_is_built_and_a_new_one_needs_no_edit() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "scripts.pipeline.matrix"], cwd=ROOT, capture_output=True, text=True, check=True
    )  # -S: without any installed package
    jobs = json.loads(done.stdout)["include"]
    assert jobs == matrix.matrix(PINS)["include"]
    assert {(j["engine"], j["version"]) for j in jobs} == {(r.engine, r.version) for r in PINS.releases}
    text = "".join(path.read_text() for path in WORKFLOWS)
    assert not [release.version for release in PINS.releases if release.version in text]


def test_actions_are_pinned_by_commit_and_credentials_are_not_kept() -> None:
    for path in WORKFLOWS:
        text = path.read_text()
        uses = re.findall(r"uses: (.*)", text)
        assert uses and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use) for use in uses)
        assert text.count("actions/checkout@") == text.count("persist-credentials: false")


def test_nothing_may_be_written_but_by_the_push_which_comes_after_the_gpus() -> None:
    for path in WORKFLOWS:
        head, _, jobs = path.read_text().partition("\njobs:\n")
        assert "\npermissions: {}\n" in head and "\nconcurrency:\n" in head
        for job in re.split(r"^  (?=\w+:$)", jobs, flags=re.MULTILINE)[1:]:
            name = job.partition(":")[0]
            assert "    permissions:\n      contents: read\n" in job and "timeout-minutes:" in job
            writes = [line.strip() for line in job.splitlines() if line.strip().endswith(": write")]
            assert writes == (["packages: write"] if name == "push" else [])
            assert ("secrets." in job) == (name == "push")
    push = (ROOT / ".github/workflows/images.yml").read_text().partition("\n  push:\n")[2]
    assert "needs: [releases, gpu]" in push and "environment: release" in push
    assert push.index('nox -s "build-') < push.index('nox -s "push-')


@pytest.mark.skipif(shutil.which("jactionlint") is None, reason="jactionlint comes with tests/requirements.txt")
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("needs: [releases, build]", "needs: [releases, bild]", "bild"),
        ("@3d3c42e5aac5ba805825da76410c181273ba90b1 # v7.0.1", "@v7", "checkout"),
        ("fromJSON(needs.releases.outputs.matrix)", "fromJSON(needs.releases.outputs.matrx)", "matrx"),
    ],
)
def test_the_linter_passes_them_and_finds_a_fault(tmp_path: Path, old: str, new: str, says: str) -> None:
    text = (ROOT / ".github/workflows/images.yml").read_text()
    for name, content, code in (("good.yml", text, 0), ("bad.yml", text.replace(old, new), 1)):
        (tmp_path / name).write_text(content)
        done = subprocess.run(["jactionlint", tmp_path / name], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stdout
