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

What of the engine's own code runs, what stands in, and what is therefore not seen, says the module that is for it:
oracle_vllm.py, oracle_sglang.py. bfloat16, as the checkpoint is.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the folder of this file is read-only in an image

from contract import ADAPTERS, HOME, load_release, one_line, quiet  # noqa: E402
from contract_check import Context, Unmet, version  # noqa: E402
from oracle_run import Failure, Pair, judge, line  # noqa: E402

DRAFT_TOKENS = (1, 3, 5)


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


def measure(
    folder: Path,
    oracle: dict[str, Any],
    ks: Sequence[int],
    context: Context,
    pair_of_engine: type[Pair],
    found: dict[str, Any],
) -> None:
    """Load the pair and run it with each of `ks`; what is seen goes into `found`. Raises Failure at the first fault."""
    if not ks:
        raise Failure("nothing-measured", "no K is given")
    expected = {k: oracle["k"][str(k)] for k in ks}
    # The last round may go beyond what is asked for by its drafts.
    longest = len(oracle["prompt"]) + max(e["max_tokens"] + 2 * k + 1 for k, e in expected.items())
    with named("wrong-version", context.work):
        version(context)
    with named("does-not-load", context.work):
        pair = pair_of_engine(folder, context.work, longest, max(ks))
    for k in ks:
        with named("does-not-load", context.work):
            pair.load(k)
        found |= {"layers": list(pair.layers), "models": list(pair.models)}
        with named("does-not-run", context.work):
            run = pair.speculate(oracle["prompt"], expected[k]["max_tokens"])
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
        adapter = import_module(ADAPTERS[release["engine"]])
        pair_of_engine = import_module(f"oracle_{release['engine']}").Pair
    except Unmet as unmet:
        print(f"error: {unmet}", file=sys.stderr)
        return 1
    # As in contract.py: the engine must not find one of our modules by a name that it means otherwise.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    found = {"engine": release["engine"], "version": release["version"], "oracle": oracle["oracle"], "runs": []}
    failure = None
    with tempfile.TemporaryDirectory(prefix="oracle-") as work, tempfile.TemporaryFile() as hidden:
        context = Context(release, Path(), Path(work))
        adapter.prepare(context)
        with quiet(sys.stderr if options.verbose else hidden):
            try:
                measure(folder, oracle, ks, context, pair_of_engine, found)
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
