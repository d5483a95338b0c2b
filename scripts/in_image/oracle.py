"""The oracle: a tiny Kimi-K2.5 target and an EAGLE-3 drafter that is right if, and only if, the hidden states are.

`python3 oracle.py OUT [options]` writes OUT/target, OUT/drafter and OUT/oracle.json, byte for byte the same each time.
An engine loads both folders as they are, without a network. Acceptance length is exactly K + 1 when the engine hands
the drafter the states that it asks for, and exactly 1 otherwise. oracle.json says what to send and what has to come
back: prompt, output, and for each K the counts of a run in which every round is a full one.

`python3 oracle.py check OUT [--json]` proves the pair without an engine: transformers' hidden states drive the drafter,
written out in torch; it is right with them, and with none of the faults that an engine can have.

Needs torch and safetensors, and `check` transformers. Exit status: 0, 1 if a check fails, 2 for wrong arguments.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import oracle_files
from oracle_plan import PLACES, Oracle, draft_vocabulary, following

LEAST_LAYERS, MOST_LAYERS = 7, 61
LEAST_EXPERTS = 4
ROUNDS = 24
MOST_DRAFT_TOKENS = 16
PROMPT_TOKENS = 12


def accepted(oracle: Oracle, sequence: Sequence[int], start: int, k: int) -> int:
    """How many of k drafts for sequence[start], sequence[start + 1], ... are right: up to the first it can't write."""
    vocabulary = set(draft_vocabulary(oracle))
    return next((i for i in range(k) if sequence[start + i] not in vocabulary), k)


def expected(oracle: Oracle, output: Sequence[int], k: int) -> dict[str, Any]:
    """What the engine counts in a run of ROUNDS rounds with k draft tokens.

    The first token comes from the prompt, so that the first draft is for output[1]; a round writes the tokens that it
    accepts and one of the target's own. `max_tokens` ends the run with a full round.
    """
    position, rounds = 1, []
    for _ in range(ROUNDS):
        rounds.append(accepted(oracle, output, position, k))
        position += rounds[-1] + 1
    return {
        "max_tokens": position,
        "drafts": ROUNDS,
        "draft_tokens": ROUNDS * k,
        "accepted": sum(rounds),
        "accepted_per_position": [sum(n > i for n in rounds) for i in range(k)],
        "acceptance_length": 1 + sum(rounds) / ROUNDS,
    }


def expectations(oracle: Oracle) -> dict[str, Any]:
    """oracle.json: what the pair is, prompt and output as token ids and as words, and the counts for each K.

    An engine may write a space before the first word.
    """
    prompt = [(37 * i + 5) % PLACES for i in range(PROMPT_TOKENS)]
    output = [following(prompt[-1])]
    while len(output) < 1 + ROUNDS * (MOST_DRAFT_TOKENS + 1):
        output.append(following(output[-1]))
    return {
        "oracle": asdict(oracle),
        "prompt": prompt,
        "prompt_text": " ".join(f"t{token}" for token in prompt),
        "output": output,
        "output_text": " ".join(f"t{token}" for token in output),
        "rounds": ROUNDS,
        "k": {str(k): expected(oracle, output, k) for k in range(1, MOST_DRAFT_TOKENS + 1)},
    }


def write(out: Path, oracle: Oracle) -> None:
    """Write the pair and oracle.json to the folder `out`, all or nothing.

    Raises SystemExit where `out` isn't empty or can't be written, and where torch or safetensors is missing.
    """
    try:
        import oracle_weights
        from safetensors.torch import save_file
    except ImportError as error:
        raise SystemExit(
            f"error: no {error.name} in this Python: run `nox -s oracle`, which has an image for it"
        ) from None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f"error: {out} exists and is not an empty folder: name another, or remove it")
    half = out.with_name(out.name + ".part")
    try:
        shutil.rmtree(half, ignore_errors=True)
        for name, data in {**oracle_files.configs(oracle), "oracle.json": expectations(oracle)}.items():
            (half / name).parent.mkdir(parents=True, exist_ok=True)
            (half / name).write_text(json.dumps(data, indent=1) + "\n")
        (half / "target/oracle_image_processor.py").write_text(oracle_files.IMAGE_PROCESSOR)
        for name, make in (("target", oracle_weights.target), ("drafter", oracle_weights.drafter)):
            save_file(make(oracle), half / name / "model.safetensors", metadata={"format": "pt"})
            (half / name / "model.safetensors").chmod(0o644)  # readable for the engine's user
        if out.exists():
            out.rmdir()
        half.rename(out)
    except OSError as error:
        raise SystemExit(f"error: {out} can't be written: {error.strerror}; name a folder that you can write") from None
    finally:
        shutil.rmtree(half, ignore_errors=True)


def default_ids(layers: int) -> tuple[int, ...]:
    """The layers that an engine captures when it is told nothing."""
    return (2, layers // 2, layers - 3)


def parse(arguments: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """OUT and the fields of the oracle. Exits with 2 and one line for arguments that no oracle can have."""
    parser = argparse.ArgumentParser(prog="oracle.py", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; it must be empty or not exist")
    parser.add_argument("--layers", type=int, default=9, help=f"{LEAST_LAYERS} to {MOST_LAYERS} (default 9)")
    parser.add_argument("--drafter", choices=("llama", "mla"), default="llama", help="its attention (default llama)")
    parser.add_argument(
        "--attention", action=argparse.BooleanOptionalAction, default=True,
        help="let drafts depend on the drafter's attention too: next token, positions, KV cache (default on)",
    )  # fmt: skip
    parser.add_argument(
        "--partial-vocabulary", action="store_true", help="a drafter that can't write every ninth token: rejections"
    )
    parser.add_argument(
        "--experts", type=int, default=8, help=f"experts of a layer, {LEAST_EXPERTS} or more (default 8)"
    )
    parser.add_argument("--ids", type=int, nargs=3, metavar="ID", help="layers whose input is captured, ascending")
    given = parser.parse_args(arguments)
    ids = tuple(given.ids or default_ids(given.layers))
    if not LEAST_LAYERS <= given.layers <= MOST_LAYERS:
        parser.error(f"--layers {given.layers}: with fewer than {LEAST_LAYERS} the default ids meet, and the clock is"
                     f" made for up to {MOST_LAYERS}")  # fmt: skip
    if given.experts < LEAST_EXPERTS:
        parser.error(
            f"--experts {given.experts}: two are chosen and two have to be left, so give {LEAST_EXPERTS} or more"
        )
    if not 1 <= ids[0] < ids[1] < ids[2] < given.layers:
        parser.error(f"--ids {' '.join(map(str, ids))}: three ascending ids from 1 to {given.layers - 1}; an engine"
                     " can't capture 0, and captures in ascending order")  # fmt: skip
    fields = {"drafter": given.drafter, "attention": given.attention, "partial": given.partial_vocabulary}
    return given.out.resolve(), {"layers": given.layers, "ids": ids, "experts": given.experts, **fields}


def check(arguments: Sequence[str]) -> int:
    """Run the engine-free check of a folder. The exit status."""
    parser = argparse.ArgumentParser(prog="oracle.py check", description="Prove the pair without an engine.")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder that oracle.py wrote")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    given = parser.parse_args(arguments)
    if not (given.out / "oracle.json").is_file():
        raise SystemExit(f"error: {given.out} has no oracle.json: write one with `oracle.py {given.out}`")
    try:
        import oracle_reference
    except ImportError as error:
        raise SystemExit(f"error: no {error.name} in this Python: run `nox -s oracle -- OUT --check`") from None
    results = oracle_reference.check(given.out)
    passed = bool(results) and all(result.passed for result in results)
    if given.json:
        print(json.dumps({"passed": passed, "checks": [asdict(r) | {"passed": r.passed} for r in results]}, indent=1))
    else:
        for result in results:
            print(f"{'ok  ' if result.passed else 'FAIL'} {result.name}: {result.found} of {result.of} right,"
                  f" {result.expected} expected")  # fmt: skip
    return 0 if passed else 1


def main(arguments: list[str]) -> int:
    """Run as a command. The exit status."""
    if arguments[:1] == ["check"]:
        return check(arguments[1:])
    out, fields = parse(arguments)
    oracle = Oracle(**fields)
    write(out, oracle)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"{out}: target of {oracle.layers} layers, {oracle.drafter} drafter for the input of layers"
          f" {', '.join(map(str, oracle.ids))}; {size / 1e6:.1f} MB")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
