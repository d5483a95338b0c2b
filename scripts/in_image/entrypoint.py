"""What the image does when it is run: serve with the pinned models and flags, or run a tool or any other command.

`python3 entrypoint.py [ARGUMENTS]`; HELP below is its whole interface. It reads release.json in the folder above its
own and replaces itself with what it starts, so signals reach the engine. The user's word always wins: a flag given
replaces the default of the same name, and an environment variable that is set is left alone.
Exit status: that of what it starts, or 1 with one line on standard error.
"""

import ctypes
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.dont_write_bytecode = True  # the folder of this file is read-only in an image
sys.path.insert(0, str(Path(__file__).resolve().parent))

from engine_command import ENGINES, Drafter  # noqa: E402

HELP = """\
Kimi-K2.5 with an EAGLE-3 drafter, on {engine} {version}.

  docker run --gpus all --ipc=host -p 8000:8000 -v kimi-cache:/cache IMAGE [OPTION | ENGINE FLAG]...
      serves {target} with the drafter {drafter}.
      Any flag of the engine is passed on, and replaces the default of the same name.

  --target REPO_OR_FOLDER[@REVISION]    another target; the same as --model, or `serve MODEL`
  --drafter REPO_OR_FOLDER[@REVISION]   another drafter, or a revision of the same
  --draft-tokens K                      draft tokens a step (default {draft_tokens})
  --no-speculation                      no drafter
  --no-FLAG                             without this default, e.g. --no-reasoning-parser
  --no-defaults                         without any default but models, address and port
  --print                               only print the command and its environment

  The engine's own {replaces} replaces the drafter as a whole. The positional model comes first.

  IMAGE preflight  what would fail, or be slow, in a start with these options; starts nothing, no GPU needed
                   (asked before each start, too; -e KIMI_EAGLE3_ALLOW=RULE overrules a refusal)
  IMAGE about      what is in this image; --json
  IMAGE contract   checks that this engine runs Kimi-K2.5 with EAGLE-3; no GPU needed; --json
  IMAGE coverage   which shared objects hold code for {arch}; no GPU needed; --json
  IMAGE health     asks the server in this container
  IMAGE help       this text; the engine's flags: IMAGE {engine_help}
  IMAGE COMMAND    runs any other command, e.g. bash

Models and compiled kernels are kept in /cache: mount it, or they are read and compiled anew each time.
"""
TOOLS: dict[str, tuple[str, ...]] = {  # each with its first arguments; {root} is the folder of release.json
    "about": (),
    "contract": ("--release", "{root}/release.json", "--series", "{root}/series"),
    "coverage": ("--release", "{root}/release.json"),
    "health": (),
}
SECRET = {"api-key", "admin-api-key", "hf-token"}
TARGET = {"target", "model", "model-path"}  # ours, and what the engines call it
VALUED = {*TARGET, "drafter", "draft-tokens"}
SWITCHES = {"no-speculation", "no-defaults", "print"}


class Refused(Exception):
    """It can't start. The message is one line: what is wrong, and the cure."""


@dataclass(frozen=True)
class Asked:
    """The options of this image that were given, and the arguments left for the engine."""

    target: str | None = None
    drafter: str | None = None
    draft_tokens: int | None = None
    switches: frozenset[str] = frozenset()
    rest: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What will run: the command, the environment variables to set, the models (repositories or folders) it reads,
    the GPUs that our own defaults ask for (0 if the user chose), and warnings, one line each.
    """

    command: tuple[str, ...]
    env: dict[str, str]
    models: tuple[str, ...]
    gpus: int
    warnings: tuple[str, ...]


def flag(argument: str, short: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """The canonical name of a flag, as the engine reads it: `max-model-len` for --max_model_len=8. None for a value.

    `short` maps an engine's other names for its flags.
    """
    name = argument.split("=", 1)[0]
    if name in short:
        return short[name]
    return name[2:].split(".", 1)[0].replace("_", "-") if name.startswith("--") else None


def parse(arguments: Iterable[str]) -> Asked:
    """Take the image's own options out of the arguments; a first argument that is no flag is the target.

    Raises Refused where an option lacks its value or the value is no number.
    """
    values: dict[str, str] = {}
    switches, rest = set(), []
    left = iter(arguments)
    for position, argument in enumerate(left):
        name = flag(argument)
        if name in VALUED:
            value = argument.split("=", 1)[1] if "=" in argument else next(left, "")
            if not value:
                raise Refused(f"--{name} lacks its value: IMAGE help shows how it is written")
            values["target" if name in TARGET else name] = value
        elif name in SWITCHES:
            switches.add(name)
        elif position == 0 and not argument.startswith("-"):
            values["target"] = argument
        else:
            rest.append(argument)
    tokens = values.get("draft-tokens")
    if tokens is not None and not re.fullmatch("[1-9][0-9]*", tokens):
        raise Refused(f"--draft-tokens {tokens} is no positive number: --no-speculation serves without a drafter")
    return Asked(
        values.get("target"), values.get("drafter"), int(tokens) if tokens else None, frozenset(switches), tuple(rest)
    )


def configured(arguments: tuple[str, ...], short: Mapping[str, str]) -> set[str]:
    """Flags set in the YAML file of the engine's `--config FILE`: its keys at the outermost level.

    The engine puts that file below the command line, so defaults must make way for it.
    Raises Refused where it can't be read.
    """
    if "--config" not in arguments[:-1]:
        return set()
    path = arguments[arguments.index("--config") + 1]
    try:
        keys = re.findall(r"^[\"']?([A-Za-z][\w.-]*)[\"']?\s*:", Path(path).read_text(), re.MULTILINE)
    except OSError as error:
        raise Refused(f"--config {path}: {error.strerror}; mount it into the container with -v") from None
    return {flag("--" + key, short) or "" for key in keys}


def model(text: str | None, pinned: Mapping[str, Any]) -> tuple[str, str | None]:
    """Repository or folder, and revision, of REPO_OR_FOLDER[@REVISION]. The pinned repository keeps its revision."""
    text = text or pinned["repo"]
    if not re.fullmatch(r"/.*|\.{1,2}/.*|[\w.-]+/[\w.-]+(@[\w./-]+)?", text) and not Path(text).exists():
        raise Refused(f"{text!r} is neither a folder nor REPO or REPO@REVISION, as in owner/name@0123abc")
    repo, _, revision = (text, "", "") if Path(text).exists() else text.partition("@")
    return repo, revision or (pinned["revision"] if repo == pinned["repo"] else None)


def spelled(name: str, value: object) -> list[str]:
    """A default as arguments. True is a flag without a value, False none at all."""
    return [] if value is False else [f"--{name}"] if value is True else [f"--{name}", str(value)]


def speculation(release: Mapping[str, Any], asked: Asked, target: str) -> tuple[Drafter, list[str]]:
    """The drafter to serve with, and what to warn of, one line each."""
    pinned, tokens = release["drafter"], asked.draft_tokens or release["drafter"]["draft_tokens"]
    repo, revision = model(asked.drafter, pinned)
    warnings = []
    if not revision and repo == pinned["repo"]:
        warnings.append(f"the drafter {repo} is UNPINNED: {pinned['unpinned']}. --drafter {repo}@COMMIT pins it")
    if target != release["target"]["repo"] and not asked.drafter:
        name = target or "the model of --config"
        warnings.append(
            f"the drafter {repo} is for {release['target']['repo']}: if {name} is another model, hardly a"
            " draft is accepted and nothing fails; see --drafter and --no-speculation"
        )
    return Drafter(repo, revision, tokens), warnings


def plan(release: Mapping[str, Any], asked: Asked, env: Mapping[str, str]) -> Plan:
    """The engine's command line for what was asked. Raises Refused where two options contradict each other."""
    serve, engine = release["serve"], ENGINES[release["engine"]]
    named = [(argument, flag(argument, engine.short)) for argument in asked.rest]
    given = {name for _, name in named if name} | configured(asked.rest, engine.short)
    own = dict(sorted(serve["flags"].items()))
    # The engine has no --no-FLAG for a flag with a value, or for none. Taking the default away is all that was meant.
    undone = {f"no-{name}" for name, value in own.items() if not (engine.negated and isinstance(value, bool))}
    rest = tuple(argument for argument, name in named if name not in undone)
    defaults: dict[str, object] = {} if "no-defaults" in asked.switches else own
    defaults = {**defaults, "host": "0.0.0.0", "port": serve["port"]}

    target, revision = model(asked.target, release["target"])
    models: list[str] = [target]
    warnings: list[str] = []
    if given & TARGET and asked.target is None:
        target, models = "", []
    elif revision:
        defaults["revision"] = revision

    without, whole = "no-speculation" in asked.switches, given & set(engine.replaces)
    if (asked.drafter or asked.draft_tokens) and (without or whole or (asked.draft_tokens and given & engine.tokens)):
        other = "no-speculation" if without else sorted(whole or given & engine.tokens)[0]
        raise Refused(f"--drafter and --draft-tokens contradict --{other}: give one or the other")
    if not without and not whole:
        drafter, cautions = speculation(release, asked, target)
        extra = {} if "no-defaults" in asked.switches else serve["drafter_flags"]
        defaults |= {**engine.drafter(drafter), **extra}
        models.append(drafter.model)
        warnings += cautions

    kept = {name: value for name, value in defaults.items() if not {name, f"no-{name}"} & given}
    flags = [argument for name, value in kept.items() for argument in spelled(name, value)]
    start = engine.start if target or not engine.start[-1].startswith("-") else engine.start[:-1]
    command = (*start, *([target] if target else []), *flags, *rest)
    added = {name: value for name, value in sorted(serve["env"].items()) if name not in env}
    gpus = release["gpu"]["count"] if "tensor-parallel-size" in kept else 0
    return Plan(command, added, tuple(models), gpus, tuple(warnings))


def shown(command: Iterable[str], env: Mapping[str, str]) -> str:
    """The command and its environment as one line for a shell, without secrets."""
    line, hide = [], False
    for argument in command:
        if argument.startswith("-"):
            name, equals, _ = argument.partition("=")
            hide = flag(argument) in SECRET
            line.append(f"{name}=***" if hide and equals else argument)
        else:
            line.append("***" if hide else argument)
    return " ".join([f"{name}={shlex.quote(value)}" for name, value in env.items()] + [shlex.join(line)])


def gpu_trouble(dev: Path, driver: str, wanted: int) -> tuple[str, str]:
    """(error, warning), each empty if all is well: NVIDIA's device nodes in `dev`, and its driver library."""
    cards = [path for path in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    missing = [] if cards or (dev / "nvidiactl").exists() or (dev / "dxg").exists() else ["device"]
    try:
        ctypes.CDLL(driver)
    except OSError:
        missing.append("driver library")
    if missing:
        return (
            f"no NVIDIA {' and no '.join(missing)} in this container: run it with --gpus all, on a host with the"
            " NVIDIA container toolkit (IMAGE contract, coverage and about need no GPU)"
        ), ""
    few = f"{len(cards)} GPUs are visible, and the defaults are for {wanted}: see --tensor-parallel-size"
    return "", few if 0 < len(cards) < wanted else ""


def unwritable(folder: Path) -> bool:
    """Whether a cache can't be written, now or once it is made."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return not (there.is_dir() and os.access(there, os.W_OK | os.X_OK))


def preflight(release: Mapping[str, Any], asked: Asked, planned: Plan, env: Mapping[str, str]) -> list[str]:
    """Find out in a second what would fail after minutes or an hour. Warnings, one line each.

    Raises Refused where serving can't work.
    """
    warnings = []
    if release["variant"] == "cpu":
        if asked.target is None and planned.models:
            raise Refused("this is the CPU twin, for tiny test models: give it --target and --drafter")
    else:
        error, warning = gpu_trouble(Path("/dev"), "libcuda.so.1", planned.gpus)
        if error:
            raise Refused(error)
        warnings += [warning] if warning else []
    caches = ["TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", *ENGINES[release["engine"]].caches]
    caches += [] if env.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ["HF_HOME"]
    for name in caches:
        if env.get(name) and unwritable(Path(env[name])):
            raise Refused(
                f"{name}={env[name]} can't be written by uid {os.getuid()}: mount a folder that it owns at"
                " /cache, or run with --user and the owner of the one that is mounted"
            )
    hub = Path(env.get("HF_HOME") or "/cache/huggingface", "hub")
    target = release["target"]
    if target["repo"] in planned.models and not (hub / f"models--{target['repo'].replace('/', '--')}").exists():
        there = next(path for path in (hub, *hub.parents) if path.exists())
        free = shutil.disk_usage(there).free / 1e9
        if free < target["size_gb"]:
            warnings.append(
                f"{target['repo']} takes {target['size_gb']} GB, and {there} has {free:.0f} GB free: mount"
                " a larger volume at /cache"
            )
    return warnings


def start(command: Iterable[str], env: Mapping[str, str]) -> None:
    """Become the command. Raises Refused if there is none of that name."""
    program, *arguments = command
    if shutil.which(program) is None:
        raise Refused(f"no command {program!r} in this image: IMAGE help; another model: IMAGE --target {program}")
    sys.stdout.flush()
    os.execvpe(program, [program, *arguments], {**os.environ, **env})


def main(arguments: list[str], root: Path) -> None:
    """Run as a command. `root` holds release.json and the folder in_image."""
    first = arguments[0] if arguments else "serve"
    if first in TOOLS:
        preset = [argument.format(root=root) for argument in TOOLS[first]]
        start([sys.executable, str(root / "in_image" / f"{first}.py"), *preset, *arguments[1:]], {})
    if first not in ("serve", "preflight", "help") and not first.startswith("-"):
        start(arguments, {})
    try:
        release = json.loads((root / "release.json").read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"{root / 'release.json'} can't be read ({error}): the image is broken, build it again") from None
    if first in ("help", "--help", "-h"):
        engine = ENGINES[release["engine"]]
        names = {"target": release["target"]["repo"], "drafter": release["drafter"]["repo"]}
        names |= {"replaces": f"--{engine.replaces[0]}", "engine_help": engine.help}
        print(HELP.format(**{**release, **names}, draft_tokens=release["drafter"]["draft_tokens"]), end="")
        return
    asked = parse(arguments[1:] if first in ("serve", "preflight") else arguments)
    planned = plan(release, asked, os.environ)
    only_print = "print" in asked.switches
    asks_help = any(argument == "-h" or flag(argument) == "help" for argument in asked.rest)
    warnings, refusals = list(planned.warnings), []
    if first == "preflight" or not (only_print or asks_help):
        from preflight import look, remember  # here, as this file is a part of a package elsewhere

        found = look(release, planned.command, {**planned.env, **os.environ}, root)
        warnings += [*found.warnings, *found.notes]
        refusals += found.refusals
    if first != "preflight" and not (only_print or asks_help or refusals):
        warnings += preflight(release, asked, planned, os.environ)
        remember(release, os.environ, root)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for refusal in refusals[:-1]:
        print(f"error: {refusal}", file=sys.stderr)
    if refusals:
        raise Refused(refusals[-1])
    if first == "preflight":
        print("preflight: nothing is known to be wrong" + " but what is said above" * bool(warnings))
        return
    effective = {name: os.environ.get(name, value) for name, value in sorted(release["serve"]["env"].items())}
    print(shown(planned.command, effective), file=sys.stdout if only_print else sys.stderr, flush=True)
    if not only_print:
        start(planned.command, planned.env)


if __name__ == "__main__":
    try:
        main(sys.argv[1:], Path(__file__).resolve().parents[1])
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        raise SystemExit(1) from None
