"""What the preflight looks at: the engine's command line, and the two configs where they lie. Nothing is guessed.

A model is a folder, or a repository in the Hugging Face cache. What isn't there is said, one line each, and the rules
that need it stay silent.
"""

import hashlib
import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Other names of a flag, as the engines write them.
ALIASES = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-sc": "speculative-config",
    "--tp": "tensor-parallel-size",
    "--tp-size": "tensor-parallel-size",
    "--pp-size": "pipeline-parallel-size",
    "--model": "target",
    "--model-path": "target",
    "--speculative-draft-model": "speculative-draft-model-path",
    "--spec-method": "speculative-config.method",
    "--spec-model": "speculative-config.model",
    "--spec-tokens": "speculative-config.num_speculative_tokens",
}
Config = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """What is known of a start. A config is None where it can't be read, and `unread` says why, or `broken` where the
    engine can't read it either.

    `flags`: the command line by flag, without dashes; `speculation`: what the engine is told about the drafter, by
    vLLM's names (method, model, num_speculative_tokens, max_model_len ...), empty without one. `drafter_states`: the
    width of the checkpoint's `fc` in states of the target, or None. `series`: the hash of what this image's patches
    make, or "". `env`: the environment.
    """

    engine: str
    version: str
    gpu: bool
    flags: Mapping[str, str]
    speculation: Mapping[str, Any]
    target_name: str
    target: Config | None = None
    drafter: Config | None = None
    fc_width: int | None = None
    unread: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    series: str = ""

    @property
    def drafter_name(self) -> str:
        return str(self.speculation.get("model") or "")

    @property
    def drafts(self) -> bool:
        """Whether there is an EAGLE drafter; other ways to speculate are no matter of these rules."""
        return bool(self.speculation) and str(self.speculation.get("method") or "eagle").lower().startswith("eagle")

    @property
    def text(self) -> Config | None:
        """The config of the target's language model."""
        return (self.target.get("text_config") or self.target) if self.target else None

    def number(self, name: str) -> int | None:
        """The value of a flag, where it is a whole number; 32k and 1K as vLLM reads them."""
        match = re.fullmatch(r"(\d+)([kKmM]?)", self.flags.get(name, ""))
        scale = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}
        return int(match[1]) * scale[match[2]] if match else None

    def older(self, version: str) -> bool:
        """Whether the engine's version comes before `version`."""
        return numbers(self.version) < numbers(version)


def numbers(version: str) -> tuple[int, ...]:
    """`0.5.10.post1` -> (0, 5, 10): what orders releases here."""
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].strip(".").split(".") if part)  # type: ignore[index]


def flags_of(command: Sequence[str]) -> dict[str, str]:
    """The flags of a command line without their dashes; the last word wins. A flag without a value is `true`."""
    words, found, at = list(command), dict[str, str](), 0
    if words[1:2] == ["serve"] and words[2:3] and not words[2].startswith("-"):
        found["target"] = words[2]
    while at < len(words):
        name, equals, value = words[at].partition("=")
        at += 1
        short, dot, part = name.partition(".")
        if ALIASES.get(short) and part:  # -sc.method
            name = f"--{ALIASES[short]}{dot}{part}"
        if name not in ALIASES and not name.startswith("--"):
            continue
        if not equals:
            value = words[at] if at < len(words) and not words[at].startswith("-") else "true"
        head, dot, rest = ALIASES.get(name, name[2:]).partition(".")
        found[head.replace("_", "-") + dot + rest] = value
    return found


def speculation_of(engine: str, flags: Mapping[str, str]) -> dict[str, Any]:
    """What the engine is told about the drafter, by vLLM's names; empty where there is no speculation."""
    if engine == "sglang":
        names = {"method": "speculative-algorithm", "model": "speculative-draft-model-path"}
        names["revision"] = "speculative-draft-model-revision"
        return {key: flags[name] for key, name in names.items() if name in flags}
    try:
        whole = json.loads(flags.get("speculative-config", "{}"))
    except ValueError:
        whole = {}  # the engine refuses it in its own words
    found = dict(whole) if isinstance(whole, dict) else {}
    for name, value in flags.items():
        if name.startswith("speculative-config."):
            found[name.partition(".")[2]] = int(value) if value.isdigit() else value
    return found


def folder_of(name: str, revision: str | None, env: Mapping[str, str]) -> Path | None:
    """Where a model's files are: a folder, or a snapshot in the cache; None where there is neither."""
    if Path(name).is_dir():
        return Path(name)
    home = Path(env.get("HF_HOME") or Path(env.get("HOME", "/"), ".cache/huggingface"))
    hub = Path(env.get("HF_HUB_CACHE") or home / "hub")
    repo = hub / f"models--{name.replace('/', '--')}"
    ref = repo / "refs" / (revision or "main")
    wanted = ref.read_text().strip() if ref.is_file() else revision or "main"  # a commit has no ref
    folder = repo / "snapshots" / wanted
    return folder if folder.is_dir() else None


def is_path(name: str) -> bool:
    """Whether a model is a folder, there or not, and no repository: nothing that is lacking will be downloaded."""
    return name.startswith(("/", "./", "../")) or Path(name).is_dir()


def read_config(what: str, name: str, folder: Path | None) -> tuple[Config | None, str]:
    """A model's config.json, or None and one line on why it can't be read."""
    if folder is None and is_path(name):
        return None, f"no folder {name} in this container: mount it with -v"
    if folder is None:
        return None, f"{what} {name} is not in this container yet, so its config is not checked"
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        return None, f"{what} {name}: its config.json can't be read ({why}): correct it"
    if isinstance(config, dict):
        return config, ""
    return None, f"{what} {name}: its config.json is no object: correct it"


def fc_width(folder: Path) -> int | None:
    """The input size of `fc` as the checkpoint has it, from the headers of its safetensors; None where none has it."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as data:
                (size,) = struct.unpack("<Q", data.read(8))
                header = json.loads(data.read(size)) if size < 10**8 else {}
            for name in ("fc.weight", "model.fc.weight"):
                if name in header:
                    return int(header[name]["shape"][1])
        except (OSError, ValueError, struct.error, KeyError, IndexError, TypeError):
            continue
    return None


def gather(release: Mapping[str, Any], command: Sequence[str], env: Mapping[str, str], series: str = "") -> Facts:
    """The facts of a start. `release` is release.json, `command` what would be run."""
    engine, flags = release["engine"], flags_of(command)
    speculation = speculation_of(engine, flags)
    target = flags.get("target", "")
    unread = [f"flags in --config {flags['config']} are not checked"] if "config" in flags else []
    unread += ["--hf-overrides is not applied to what is checked"] if "hf-overrides" in flags else []
    broken: list[str] = []
    configs: dict[str, Config | None] = {}
    folders: dict[str, Path | None] = {}
    models = {"target": (target, flags.get("revision"))}
    if speculation.get("model"):
        models["drafter"] = (str(speculation["model"]), speculation.get("revision"))
    for what, (name, revision) in models.items():
        folders[what] = folder_of(name, revision, env) if name else None
        configs[what], trouble = read_config(what, name, folders[what])
        if trouble and name:
            (broken if is_path(name) else unread).append(trouble)
    drafter = folders.get("drafter")
    return Facts(
        engine=engine,
        version=release["version"],
        gpu=release.get("variant") != "cpu",
        flags=flags,
        speculation=speculation,
        target_name=target,
        target=configs["target"],
        drafter=configs.get("drafter"),
        fc_width=fc_width(drafter) if drafter and configs.get("drafter") else None,
        unread=tuple(unread),
        broken=tuple(broken),
        env=dict(env),
        series=series,
    )


def series_hash(root: Path) -> str:
    """The hash of what an image's patches make of the engine, or "" where there is none; `root` holds `series`."""
    try:
        return hashlib.sha256((root / "series" / "tree").read_bytes()).hexdigest()
    except OSError:
        return ""


def compiled_by(env: Mapping[str, str], version: str) -> Path | None:
    """The file that says with which patches the graphs in the compile cache were made; None without a cache folder."""
    root = env.get("VLLM_CACHE_ROOT")
    return Path(root, f"compiled-by-{version}") if root else None


def has_graphs(env: Mapping[str, str]) -> bool:
    """Whether there are compiled graphs in the cache."""
    folder = Path(env.get("VLLM_CACHE_ROOT", os.devnull), "torch_compile_cache")
    return folder.is_dir() and any(folder.iterdir())
