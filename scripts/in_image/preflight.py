"""Find out in a second what fails after an hour of loading, or is silently slow: the rules, asked about one start.

`docker run IMAGE preflight [as for serve]` prints what they find, and the entrypoint asks them before it starts the
engine. A refusal can be overruled by its name: KIMI_EAGLE3_ALLOW=RULE,... (or `all`), which is said when it happens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preflight_facts import Facts, compiled_by, gather, has_graphs, series_hash
from preflight_rules import ALWAYS, RULES

ALLOW = "KIMI_EAGLE3_ALLOW"


@dataclass(frozen=True)
class Found:
    """What the rules found, one line each: refusals, warnings, and what couldn't be looked at."""

    refusals: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def examine(facts: Facts) -> Found:
    """Ask each rule that holds for this engine. Refusals that the environment allows become warnings that say so."""
    allowed = {name.strip() for name in facts.env.get(ALLOW, "").split(",") if name.strip()}
    unknown = sorted(allowed - {rule.name for rule in RULES} - {"all"})
    refusals = [f"{ALLOW} names no rule: {', '.join(unknown)}; a refusal names its own"] if unknown else []
    warnings, notes = [], list(facts.unread)
    for rule in RULES:
        asked = facts.engine in rule.engines and (facts.gpu or not rule.gpu)
        try:
            text = rule.check(facts) if asked and (facts.drafts or rule.name in ALWAYS) else ""
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            notes.append(f"a config has another form than expected, so {rule.name} is not checked ({error!r})")
            continue
        if not text:
            continue
        if not rule.refuses:
            warnings.append(text)
        elif allowed & {rule.name, "all"}:
            warnings.append(f"{ALLOW} allows {rule.name}, so this starts although it is refused otherwise: {text}")
        else:
            refusals.append(f"{text} ({ALLOW}={rule.name} starts it all the same)")
    return Found(tuple(refusals), tuple(warnings), tuple(notes))


def look(release: Mapping[str, Any], command: tuple[str, ...], env: Mapping[str, str], root: Path) -> Found:
    """What the rules find for a command line; `root` holds `series`."""
    return examine(gather(release, command, env, series_hash(root)))


def remember(release: Mapping[str, Any], env: Mapping[str, str], root: Path) -> None:
    """Note with which patches the graphs are made that this start will compile, where there are none yet."""
    file, series = compiled_by(env, release["version"]), series_hash(root)
    if release["engine"] != "vllm" or file is None or not series or has_graphs(env):
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(series + "\n")
    except OSError:
        pass  # the cache can't be written, which the entrypoint has said
