"""pins.toml: what is in it, and what is refused."""

from pathlib import Path

import pytest

from scripts.pipeline import pins
from scripts.pipeline.say import Stop

TEXT = pins.PINS.read_text()


def load(tmp_path: Path, text: str) -> pins.Pins:
    path = tmp_path / "pins.toml"
    path.write_text(text)
    return pins.load(path)


def test_the_default_release_is_the_newest_with_a_twin() -> None:
    all_pins = pins.load()
    twins = [r.version for r in all_pins.releases if r.engine == "vllm" and r.variant == "cpu"]
    assert all_pins.release("vllm").version == max(twins, key=lambda v: [int(n) for n in v.split(".")])


def test_each_engine_has_a_default_of_its_own(tmp_path: Path) -> None:
    assert [pins.load().release(engine).version for engine in ("vllm", "sglang")] == ["0.32.0", "0.5.23"]
    for text, says in ((TEXT.replace("default = true", ""), "0 releases"), (
        TEXT.replace('version = "0.5.9"', 'version = "0.5.9"\ndefault = true'), r"sglang has 2 .*0\.5\.9, 0\.5\.23"
    )):  # fmt: skip
        with pytest.raises(Stop, match=says):
            load(tmp_path, text)


def test_images_are_named_by_engine_and_version_and_the_twin_ends_in_cpu() -> None:
    all_pins = pins.load()
    assert all_pins.image(all_pins.release("vllm", "0.16.0")) == "kimi-k2.5-eagle3-vllm:0.16.0"
    assert all_pins.image(all_pins.release("vllm", "0.32.0", "cpu")) == "kimi-k2.5-eagle3-vllm:0.32.0-cpu"


def test_each_release_has_its_lock_its_stack_and_its_series() -> None:
    for release in pins.load().releases:
        assert release.lock.is_file() and release.torch.lock.is_file()
        assert (release.series / "series").is_file() and (release.series / "tree").is_file()


@pytest.mark.parametrize(
    ("engine", "version", "variant"), [("vllm", "9.9.9", "cuda"), ("vllm", "0.16.0", "cpu"), ("x", None, "cuda")]
)
def test_an_unknown_release_is_one_line_that_names_what_there_is(
    engine: str, version: str | None, variant: str
) -> None:
    with pytest.raises(Stop, match=r"pins.toml has no release.*it has: ") as stop:
        pins.load().release(engine, version, variant)
    assert "\n" not in str(stop.value)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("@sha256:88200866", "@sha256:8820", "is not pinned"),
        ("4d01dfe0332d63057c186e0b262165819efb6611", "main", "not a full commit"),
        ('repo = "moonshotai/Kimi-K2.5"\n', "", "lacks the key"),
        ('torch = "2.9.1"', 'torch = "2.0.0"', "lacks the key or the entry '2.0.0'"),
        ("unpinned = ", "why = ", "neither a revision nor the reason"),
        ("[image]", "[image", "pins.toml"),
        ("floor = 2.2", "floor = 4.2", "floor is 4.2, and 3 draft tokens give more than 1 and at most 4"),
        ("acceptance = 3.017", "acceptance = 1.0", "published 'GSM8K' is 1.0"),
        ('kind = "chat", ', "", "kind"),
    ],
)
def test_an_input_that_is_not_pinned_is_refused_by_name(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in TEXT
    with pytest.raises(Stop, match=says):
        load(tmp_path, TEXT.replace(old, new))
