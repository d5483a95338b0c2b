"""What the smoke test puts through the ladder: the oracle, the pinned target and drafter, or anybody's own pair."""

import json
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.pipeline import containers, oracle, pins, say, server
from scripts.pipeline.ladder import Answer, Expected, Figure

PROMPTS = Path(__file__).with_name("prompts.toml")
PLAIN_TOKENS = 128
# Seconds to healthy. Reading 547 GB takes tens of minutes.
DEADLINES = {"oracle": 900.0, "own": 900.0, "pinned": 5400.0}


@dataclass(frozen=True)
class Group:
    """Prompts of one kind, as {"prompt": token ids or text} or {"messages": ...}, and the tokens of each answer."""

    kind: str
    prompts: tuple[Mapping[str, Any], ...]
    max_tokens: int


@dataclass(frozen=True)
class Trial:
    """A pair to test at some K: folders of this machine or models' names, what to ask, what to hold it against.

    `origin` says how the folders came to be, where they are gone after the test.
    """

    pair: str
    target: str
    drafter: str
    k: int
    groups: tuple[Group, ...]
    expected: Expected
    deadline: float
    origin: str = ""

    @property
    def name(self) -> str:
        return f"{self.pair}, K = {self.k}"

    @property
    def models(self) -> tuple[str, str]:
        """Target and drafter, as the receipt names them."""
        return (f"target of {self.origin}", f"drafter of {self.origin}") if self.origin else (self.target, self.drafter)


def oracle_trial(folder: Path, k: int, origin: str = "") -> Trial:
    """The oracle in a folder that scripts/in_image/oracle.py wrote. Raises Stop where it has no counts for K."""
    data = json.loads((folder / "oracle.json").read_text())
    if str(k) not in data["k"]:
        raise say.Stop(f"{folder}/oracle.json has no counts for K = {k}; it has {', '.join(data['k'])}")
    want = data["k"][str(k)]
    tokens = want["max_tokens"]
    output = Answer(" ".join(data["output_text"].split()[:tokens]), tuple(data["output"][:tokens]), tokens)
    expected = Expected(
        k,
        acceptance=want["acceptance_length"],
        counts=(want["drafts"], want["accepted"], tuple(want["accepted_per_position"])),
        outputs=(output,),
        source="the output that the oracle was made for",
        no_figures="the oracle is made, not trained: nothing is published for it",
    )
    group = Group("oracle", ({"prompt": data["prompt"]},), tokens)
    models = (str(folder / "target"), str(folder / "drafter"))
    return Trial("oracle", *models, k, (group,), expected, DEADLINES["oracle"], origin)


def make_oracle(engine: containers.ContainerEngine, image: str, folder: Path, arguments: Sequence[str]) -> Path:
    """Write the oracle into `folder` with an image's torch, readable for the image's user, and return its own folder.

    Raises Stop where oracle.py fails.
    """
    out = folder / "oracle"
    done = subprocess.run(
        oracle.command(engine, image, folder, [str(out), *arguments]), capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        said = server.tidy(done.stdout + done.stderr)[-1:]
        raise say.Stop(f"the oracle can't be made with {image}: {''.join(said) or f'exit code {done.returncode}'}")
    folder.chmod(0o755)
    return out


def drafter_for(all_pins: pins.Pins, name: str) -> pins.Drafter | None:
    """The pinned drafter of that repository; None where it isn't pinned."""
    return next((drafter for drafter in all_pins.drafters if drafter.model.repo == name.partition("@")[0]), None)


def pinned_trial(all_pins: pins.Pins, target: str, drafter: str, k: int, chats: bool = True) -> Trial:
    """The real target with a drafter: conversations by kind, the drafter's floor, what others measured.

    Without `chats`, where the engine doesn't tell the drafts of conversations, it goes on with plain text, for which
    nobody has measured anything.
    """
    if not chats:
        why = "this release tells drafts for plain text alone, and what is published is for conversations"
        return replace(own_trial(target, drafter, k), pair="pinned", expected=Expected(k, no_figures=why),
                       deadline=DEADLINES["pinned"])  # fmt: skip
    known = drafter_for(all_pins, drafter)
    expected = Expected(
        k,
        floor=known.floor if known and known.draft_tokens == k else None,
        figures=tuple(Figure(p.kind, p.k, p.acceptance) for p in known.published) if known else (),
    )
    prompts = tomllib.loads(PROMPTS.read_text())
    groups = tuple(
        Group(
            kind,
            tuple({"messages": [{"role": "user", "content": text}]} for text in prompts[kind]),
            prompts["max_tokens"],
        )
        for kind in ("chat", "maths", "coding")
    )
    return Trial("pinned", target, drafter, k, groups, expected, DEADLINES["pinned"])


def own_trial(target: str, drafter: str, k: int) -> Trial:
    """Anybody's pair, asked to go on with plain text."""
    texts = tomllib.loads(PROMPTS.read_text())["plain"]
    group = Group("plain", tuple({"prompt": text} for text in texts), PLAIN_TOKENS)
    return Trial("own", target, drafter, k, (group,), Expected(k), DEADLINES["own"])


def trial_for(all_pins: pins.Pins, target: str, drafter: str | None, pinned: str, k: int, chats: bool = True) -> Trial:
    """What a target and a drafter are: the oracle, the pinned target, or somebody's own pair.

    Without a drafter it is the oracle's own, or the `pinned` one. `chats` is as for pinned_trial.
    """
    folder = Path(target).resolve()
    if (folder.parent / "oracle.json").is_file() and folder.name == "target":
        trial = oracle_trial(folder.parent, k)
        return replace(trial, drafter=drafter) if drafter else trial
    if target.partition("@")[0] == all_pins.target.repo:
        return pinned_trial(all_pins, target, drafter or pinned, k, chats)
    return own_trial(target, drafter or pinned, k)
