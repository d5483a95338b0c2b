"""The oracle's pair in SGLang's own scheduler, for oracle_in_process.py.

The engine's own code: all that its HTTP server has behind it, in the scheduler's process. That is the scheduler's loop,
batches and memory pools, the target's and the drafter's workers and runners with their loaders and the sharing of
weights, the choice of the layers, the prefill, the drafter's steps with their positions and KV slots, the verify pass,
the greedy acceptance and its counters; and the triton attention backend, which is the one for sm_120, with its index
arithmetic and the kernels for it.

What stands in: Triton's interpreter for those kernels; torch for the attention kernels and, where the release has them
compiled only, for the two that build and walk the tree of drafts (sglang_kernels.py). Where the engine asks whether it
runs on CUDA, it takes the other branch, which in 0.5.23 is also another way to raise the position after a draft step.

So not seen here: kernels as a GPU runs them, CUDA graphs (the contract looks at which layers they capture), the
overlapped schedule, batches of several requests, sampling, trees of several branches, the radix cache, tensor
parallelism, quantised weights, and the server.
"""

import inspect
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import sglang_kernels
from contract_sglang_bench import Bench, captured
from oracle_run import Failure, Run

# What the scheduler calls where it has nothing to run; and where a request counts its rounds by the drafts that they
# accepted. Two names each, of earlier and of later releases.
IDLE = ("self_check_during_idle", "on_idle")
HISTOGRAM = ("spec_acceptance_histogram", "spec_correct_drafts_histogram")
KEPT_BACK = 16  # more than the tokens of a sequence (6) that the scheduler allows no request


class Idle(Exception):
    """The scheduler has nothing more to run."""


class Pair:
    """A scheduler with both workers for each number of draft tokens, as that is fixed when it starts.

    Each is in a process of its own, as a server is: the engine's modules keep what the first one leaves (a drafter's
    config that was completed, so that the next drafter doesn't share the target's head).
    """

    layers: tuple[int, ...] = ()
    models: tuple[str, str] = ("", "")

    def __init__(self, folder: Path, work: Path, max_len: int, most_draft_tokens: int) -> None:
        self.engine = Bench(work, folder / "target", max_len + KEPT_BACK, most_draft_tokens, dtype="bfloat16")
        self.drafter = folder / "drafter"
        self.process: ProcessPoolExecutor | None = None
        sglang_kernels.stand_in()
        import sglang.srt.managers.scheduler  # noqa: F401  (once, for all processes)

    def load(self, k: int) -> None:
        """Start a scheduler that drafts `k` tokens."""
        if self.process:
            self.process.shutdown()
        self.process = ProcessPoolExecutor(1, get_context("fork"))
        self.k = self.engine.draft_tokens = k
        self.layers, self.models = self._there(start, self.engine, self.drafter)
        if not self.layers:
            raise Failure("no-states", f"{self.models[0]} captures no layer")

    def speculate(self, prompt: Sequence[int], max_tokens: int) -> Run:
        """Have the scheduler answer one greedy request."""
        output, rounds = self._there(answer, list(prompt), max_tokens)
        return Run(self.k, output, rounds)

    def _there(self, function: Callable[..., Any], *arguments: Any) -> Any:
        assert self.process
        return self.process.submit(function, *arguments).result()


scheduler: Any = None  # the one of this process


def start(engine: Bench, drafter: Path) -> tuple[tuple[int, ...], tuple[str, str]]:
    """Start this process's scheduler. Returns the layers that the target captures, and both models' classes."""
    global scheduler
    arguments = engine.arguments(drafter, attention_backend="triton", disable_overlap_schedule=True)
    scheduler = engine.start.scheduler(arguments)
    for name in IDLE:
        if hasattr(scheduler, name):
            setattr(scheduler, name, _idle)
    wrapper = scheduler.tp_worker.model_runner.model
    return captured(wrapper), (type(wrapper).__name__, type(_drafter(scheduler.draft_worker)).__name__)


def answer(prompt: Sequence[int], max_tokens: int) -> tuple[list[int], list[int]]:
    """Send a request to this process's scheduler, and let its loop run until nothing is left to do.

    Returns the tokens written, and how many drafts were accepted in each round, in no order.
    """
    scheduler.handle_generate_request(_request(prompt, max_tokens))
    (request,) = scheduler.waiting_queue
    with suppress(Idle):
        scheduler.event_loop_normal()
    if request.finished_reason is None:
        raise Failure("does-not-run", f"the scheduler stops after {len(request.output_ids)} of {max_tokens} tokens")
    reason = type(request.finished_reason).__name__
    if reason != "FINISH_LENGTH":
        raise Failure("does-not-run", f"the request ends with {reason}: {vars(request.finished_reason)}")
    return list(request.output_ids), [n for n, count in enumerate(_histogram(request)) for _ in range(count)]


def _idle() -> None:
    raise Idle


def _drafter(worker: Any) -> Any:
    """The drafter's model, in a worker of the first or the second version."""
    inner = getattr(worker, "draft_worker", worker)
    return (getattr(inner, "draft_runner", None) or inner.draft_model_runner).model


def _histogram(request: Any) -> list[int]:
    """How many rounds of a request accepted 0, 1, 2 ... drafts. Raises Failure where the release has no such count."""
    for name in HISTOGRAM:
        if hasattr(request, name):
            return list(getattr(request, name))
    raise Failure("nothing-measured", f"a request has neither {' nor '.join(HISTOGRAM)}")


def _request(prompt: Sequence[int], max_tokens: int) -> Any:
    """A request as the tokenizer's process sends it. What a release wants to know beyond that is none."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=0, max_new_tokens=max_tokens, ignore_eos=True)
    sampling.normalize(None)
    fields = inspect.signature(TokenizedGenerateReqInput).parameters
    required = [name for name, field in fields.items() if field.default is field.empty]
    as_array = "array" in str(fields["input_ids"].annotation)  # in later releases
    given = {
        "rid": f"{max_tokens} tokens",
        "input_text": "",
        "input_ids": array("q", prompt) if as_array else list(prompt),
        "sampling_params": sampling,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": [],
        "stream": False,
    }
    return TokenizedGenerateReqInput(**dict.fromkeys(required) | given)
