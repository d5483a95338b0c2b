"""The oracle in one process, without a GPU or a server: does this engine's own Python hand over the right states?

    python3 oracle_in_process.py ORACLE_DIR [--k K]... [--release FILE] [--json] [--verbose]

For an image whose engine can't speculate on a CPU. ORACLE_DIR is what oracle.py wrote. Target and drafter are loaded,
and tokens are drafted and verified greedily, until oracle.json's `max_tokens` for each K (1, 3 and 5 by default). The
output and all counts must be what oracle.json says, exactly. Exit status: 0, or 1 with one line that begins with the
failure's name:

    output-differs      the target's text is not the oracle's: states are not the (only) thing that is wrong
    acceptance-is-one   no draft token is accepted: the drafter gets wrong states
    acceptance-differs  some are accepted, but not as predicted: look at the drafter (positions, attention, vocabulary)
    no-states           the target returns no auxiliary hidden states
    does-not-load       the engine refuses the pair, or fails to load it
    does-not-run        the engine fails in a forward pass
    wrong-version       another release of the engine is installed than the image says
    nothing-measured    there is nothing to measure, or nothing was

The engine's own code: configuration and its allow-list, registry, both models with their loaders and the sharing of
weights, the capture and the runner's way to choose its layers (ids of the drafter's config, or the default), the
drafter's combination of the states, its forward for each draft token, its logits and the map of a partial vocabulary.

What stands in: platform and kernels, as contract_vllm_bench.py says (attention has no KV cache, so that each pass
computes the whole sequence), and the loop around the models, here: the shift of the tokens, positions 0, 1, 2 ...,
argmax, and the greedy acceptance. So the proposer's `propose` (positions and slots of the drafter's steps), the
rejection sampler, the scheduler, sampling and CUDA graphs are not seen here. bfloat16, as the checkpoint is.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.dont_write_bytecode = True  # the folder of this file is read-only in an image

import contract_vllm  # noqa: E402
from contract import HOME, load_release, one_line, quiet  # noqa: E402
from contract_check import Context, Unmet, version  # noqa: E402
from contract_vllm_bench import Bench  # noqa: E402
from contract_vllm_target import set_layers  # noqa: E402

DRAFT_TOKENS = (1, 3, 5)
COUNTS = ("drafts", "draft_tokens", "accepted", "accepted_per_position", "acceptance_length")


class Failure(Exception):
    """The engine is wrong, or nothing was measured: a name of the list above, and one line on it."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name, self.detail = name, detail


@dataclass(frozen=True)
class Run:
    """A run with k draft tokens in each round: what the target wrote, and how many drafts each round accepted."""

    k: int
    output: list[int]
    rounds: list[int]

    def counts(self) -> dict[str, Any]:
        """The counts by oracle.json's names, of one round at least."""
        return {
            "drafts": len(self.rounds),
            "draft_tokens": len(self.rounds) * self.k,
            "accepted": sum(self.rounds),
            "accepted_per_position": [sum(n > i for n in self.rounds) for i in range(self.k)],
            "acceptance_length": 1 + sum(self.rounds) / len(self.rounds),
        }


class Pair:
    """The engine's own target and drafter, loaded, with the layers chosen as the runner chooses them.

    Raises Failure, or whatever the engine raises, where they don't load.
    """

    def __init__(self, folder: Path, work: Path, max_len: int, draft_tokens: int) -> None:
        self.engine = Bench(work, folder / "target", max_len, draft_tokens, dtype="bfloat16")
        # The bench goes on where the allow-list refuses a pair, which is a check of the contract. Not here.
        self.engine.speculative_config(folder / "drafter", self.engine.model_config(folder / "target"))
        self.proposer = self.engine.proposer(folder / "drafter")
        self.drafter = self.engine.load(self.proposer)
        self.layers = self._choose_layers()

    def _choose_layers(self) -> tuple[int, ...]:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        runner = SimpleNamespace(speculative_config=self.proposer.speculative_config)
        return set_layers(self.engine.wrapper, GPUModelRunner._get_eagle3_aux_layers_from_config(runner) or None)

    def target(self, tokens: Sequence[int]) -> tuple[list[int], Any]:
        """The token that the target puts after each, [n], and the captured states side by side, [n, 3 * hidden]."""
        import torch

        ids, wrapper = torch.tensor(tokens), self.engine.wrapper
        output = self.engine.run(self.engine.config, wrapper, input_ids=ids, positions=torch.arange(len(tokens)))
        if not isinstance(output, tuple) or len(output) != 2 or not output[1]:
            raise Failure("no-states", f"{type(wrapper).__name__} returns no auxiliary states for layers {self.layers}")
        final, states = output
        with torch.inference_mode():
            return wrapper.compute_logits(final).argmax(-1).tolist(), torch.cat(list(states), -1)

    def draft(self, states: Any, tokens: Sequence[int], k: int) -> list[int]:
        """k tokens after `tokens`, [n], by the drafter, from the target's states one position before each, [n, ...]."""
        import torch

        written = list(tokens)
        with torch.inference_mode():
            hidden = self.drafter.combine_hidden_states(states)
        for _ in range(k):
            inputs = {"input_ids": torch.tensor(written), "positions": torch.arange(len(written))}
            config = self.proposer.vllm_config
            output, after = self.engine.run(config, self.drafter, **inputs, hidden_states=hidden.clone())
            with torch.inference_mode():
                written.append(int(self.drafter.compute_logits(output[-1:]).argmax(-1)))
            hidden = torch.cat([hidden, after[-1:]])
        return written[len(tokens) :]


def speculate(pair: Pair, prompt: Sequence[int], max_tokens: int, k: int) -> Run:
    """Write `max_tokens` tokens after `prompt`: the drafter drafts k, the target verifies them and adds one."""
    sequence, rounds = list(prompt), []
    following, states = pair.target(sequence)
    sequence.append(following[-1])
    while len(sequence) - len(prompt) < max_tokens:
        known = len(sequence) - 1  # the target has seen all but the last token
        drafts = pair.draft(states[:known], sequence[1:], k)
        following, states = pair.target(sequence + drafts)
        verified = following[known:]
        rounds.append(next((i for i in range(k) if drafts[i] != verified[i]), k))
        sequence += verified[: rounds[-1] + 1]
    return Run(k, sequence[len(prompt) :][:max_tokens], rounds)


def line(counts: dict[str, Any]) -> str:
    """Counts for people."""
    return (
        f"acceptance length {counts['acceptance_length']:.4g}, {counts['accepted']} of {counts['draft_tokens']} draft"
        f" tokens accepted, by position {counts['accepted_per_position']}"
    )


def judge(run: Run, expected: dict[str, Any], output: Sequence[int]) -> None:
    """Compare a run with oracle.json's counts for its K and with its output. Raises Failure where they differ."""
    counts = run.counts()
    wanted = list(output[: expected["max_tokens"]])
    if run.output != wanted:
        at = next((i for i, pair in enumerate(zip(run.output, wanted, strict=False)) if pair[0] != pair[1]), -1)
        raise Failure("output-differs", f"token {at} of the output with K = {run.k} is not the oracle's")
    if all(counts[name] == expected[name] for name in COUNTS):
        return
    detail = f"K = {run.k}: {line(counts)}; right is: {line(expected)}"
    raise Failure("acceptance-differs" if counts["accepted"] else "acceptance-is-one", detail)


@contextmanager
def named(name: str, work: Path) -> Iterator[None]:
    """Give whatever the engine raises inside a name."""
    try:
        yield
    except Failure:
        raise
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, Unmet) else f"{type(error).__name__}: "
        raise Failure(name, one_line(f"{kind}{error}", work)) from error


def measure(folder: Path, oracle: dict[str, Any], ks: Sequence[int], context: Context, found: dict[str, Any]) -> None:
    """Load the pair and run it with each of `ks`; what is seen goes into `found`. Raises Failure at the first fault."""
    if not ks:
        raise Failure("nothing-measured", "no K is given")
    expected = {k: oracle["k"][str(k)] for k in ks}
    # The last round may go beyond what is asked for by its drafts.
    longest = len(oracle["prompt"]) + max(e["max_tokens"] + 2 * k + 1 for k, e in expected.items())
    with named("wrong-version", context.work):
        version(context)
    with named("does-not-load", context.work):
        pair = Pair(folder, context.work, longest, max(ks))
    found["layers"] = list(pair.layers)
    found["models"] = [type(model).__name__ for model in (pair.engine.wrapper, pair.drafter)]
    for k in ks:
        with named("does-not-run", context.work):
            run = speculate(pair, oracle["prompt"], expected[k]["max_tokens"], k)
        if not run.rounds:
            raise Failure("nothing-measured", f"no token was drafted with K = {k}")
        found["runs"].append({"k": k, **run.counts()})
        judge(run, expected[k], oracle["output"])


def load_oracle(folder: Path, ks: Sequence[int]) -> dict[str, Any]:
    """oracle.json of `folder`. Raises Unmet where it can't be read, or says nothing on one of `ks`."""
    path = folder / "oracle.json"
    try:
        oracle = json.loads(path.read_text())
        unknown = [k for k in ks if str(k) not in oracle["k"]]
    except (OSError, ValueError, KeyError) as error:
        raise Unmet(f"{path}: {error}; write it with `oracle.py {folder}`") from None
    if unknown:
        raise Unmet(f"{path} predicts nothing for K = {unknown[0]}, only for {', '.join(oracle['k'])}")
    return dict(oracle)


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("oracle", type=Path, metavar="ORACLE_DIR")
    parser.add_argument("--k", type=int, action="append", metavar="K", help="draft tokens; may be repeated")
    parser.add_argument("--release", type=Path, default=HOME / "release.json", metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--verbose", action="store_true", help="show what the engine prints, on standard error")
    options = parser.parse_args(arguments)
    folder, ks = options.oracle.resolve(), options.k or DRAFT_TOKENS
    try:
        release, oracle = load_release(options.release), load_oracle(folder, ks)
    except Unmet as unmet:
        print(f"error: {unmet}", file=sys.stderr)
        return 1
    # As in contract.py: the engine must not find one of our modules by a name that it means otherwise.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    found = {"engine": release["engine"], "version": release["version"], "oracle": oracle["oracle"], "runs": []}
    failure = None
    with tempfile.TemporaryDirectory(prefix="oracle-") as work, tempfile.TemporaryFile() as hidden:
        context = Context(release, Path(), Path(work))
        contract_vllm.prepare(context)
        with quiet(sys.stderr if options.verbose else hidden):
            try:
                measure(folder, oracle, ks, context, found)
            except Failure as error:
                failure = error
    found |= {"failure": {"name": failure.name, "detail": failure.detail} if failure else None, "ok": failure is None}
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for run in found["runs"]:
            print(f"K = {run['k']}: {line(run)}")
    if failure:
        print(f"{failure.name}: {failure.detail}", file=sys.stderr)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
