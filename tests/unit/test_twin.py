"""The twin's wheel against that of the image: what differs is said, and what matters is refused."""

import pytest

from scripts.pipeline import pins, series, twin, wheels
from scripts.pipeline.say import Stop

PINS = pins.load()
TWIN = PINS.release("vllm", "0.32.0", "cpu")
SAME = {"vllm/v1/a.py": "1", "vllm/_version.py": "2", "vllm/third_party/b.py": "3"}


class Wheel:
    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def python(self) -> dict[str, str]:
        return self.files


def pair(monkeypatch: pytest.MonkeyPatch, twins: dict[str, str]) -> None:
    monkeypatch.setattr(wheels, "pristine", lambda release, _: Wheel(twins if release.variant == "cpu" else SAME))


def test_what_differs_elsewhere_is_said_by_name_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    pair(monkeypatch, {"vllm/v1/a.py": "1", "vllm/_version.py": "cpu"})
    said = twin.compare(PINS, TWIN)
    assert said == "vllm/_version.py, and 1 files of vllm/third_party that only one of them has"


@pytest.mark.parametrize("change", [{"vllm/v1/a.py": "other"}, {"vllm/v1/new.py": "1"}])
def test_another_file_of_the_code_under_contract_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    pair(monkeypatch, SAME | change)
    with pytest.raises(Stop, match=r"is no twin of vllm 0.32.0: vllm/v1/"):
        twin.compare(PINS, TWIN)


def test_a_patched_file_that_differs_is_refused_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = series.touched(series.load(TWIN.series))[0]
    monkeypatch.setattr(twin, "SHARED", ())
    pair(monkeypatch, SAME | {patched: "1"})
    with pytest.raises(Stop, match=patched):
        twin.compare(PINS, TWIN)
