"""The twin speaks for an image only where both run the same Python: their wheels are compared, file by file."""

from scripts.pipeline import pins, series, wheels
from scripts.pipeline.say import Stop

# Below the engine's package: what the contract and the series are about. A difference elsewhere is said and allowed,
# such as in the file that holds the version, or in those that choose the platform.
SHARED = ("config/", "model_executor/", "transformers_utils/", "v1/", "entrypoints/")


def differences(mine: dict[str, str], twins: dict[str, str]) -> list[str]:
    """The Python files, of hashes by path, that the twin lacks, has otherwise, or has in addition; sorted."""
    return sorted(path for path in mine.keys() | twins.keys() if mine.get(path) != twins.get(path))


def told(mine: dict[str, str], twins: dict[str, str]) -> str:
    """The differences in words: changed files by name, and how many only one of the two has, by their folders."""
    found = differences(mine, twins)
    changed = [path for path in found if path in mine and path in twins]
    alone = [path for path in found if path not in changed]
    folders = sorted({"/".join(path.split("/")[:2]) for path in alone})
    lacking = f", and {len(alone)} files of {', '.join(folders)} that only one of them has" if alone else ""
    return (", ".join(changed) or "nothing") + lacking


def compare(all_pins: pins.Pins, twin: pins.Release) -> str:
    """How the Python of a twin's wheel differs from that of the image it stands for, in words.

    Raises Stop where a file that differs is patched, or is of the code that the contract is about.
    """
    image = all_pins.release(twin.engine, twin.version)
    mine, twins = (wheels.pristine(release, all_pins).python() for release in (image, twin))
    patched = set(series.touched(series.load(twin.series)))
    inside = tuple(f"{twin.engine}/{folder}" for folder in SHARED)
    wrong = [path for path in differences(mine, twins) if path in patched or path.startswith(inside)]
    if wrong:
        raise Stop(
            f"{twin.name} is no twin of {image.name}: {', '.join(wrong[:3])} ({len(wrong)} files) differ in their "
            f"wheels: take the variant {twin.variant} out of pins.toml, or pin one that has the same Python"
        )
    return told(mine, twins)
