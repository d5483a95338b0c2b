"""The oracle's pair in vLLM's own models, and the loop around them, for oracle_in_process.py.

The engine's own code: configuration and its allow-list, registry, both models with their loaders and the sharing of
weights, the capture and the runner's way to choose its layers (ids of the drafter's config, or the default), the
drafter's combination of the states, its forward for each draft token, its logits and the map of a partial vocabulary.

What stands in: platform and kernels, as contract_vllm_bench.py says (attention has no KV cache, so that each pass
computes the whole sequence), and the loop around the models, here: the shift of the tokens, positions 0, 1, 2 ...,
argmax, and the greedy acceptance. So the proposer's `propose` (positions and slots of the drafter's steps), the
rejection sampler, the scheduler, sampling and CUDA graphs are not seen here.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from contract_vllm_bench import Bench
from contract_vllm_target import set_layers
from oracle_run import Failure, Run


class Pair:
    """The engine's own target and drafter, with the layers chosen as the runner chooses them."""

    layers: tuple[int, ...] = ()
    models: tuple[str, str] = ("", "")

    def __init__(self, folder: Path, work: Path, max_len: int, most_draft_tokens: int) -> None:
        self.engine = Bench(work, folder / "target", max_len, most_draft_tokens, dtype="bfloat16")
        self.folder, self.k = folder, 0

    def load(self, k: int) -> None:
        """Load the models, once: they don't depend on `k`."""
        if not self.k:
            self._load()
        self.k = k

    def _load(self) -> None:
        # The bench goes on where the allow-list refuses a pair, which is a check of the contract. Not here.
        target = self.engine.model_config(self.folder / "target")
        self.engine.speculative_config(self.folder / "drafter", target)
        self.proposer = self.engine.proposer(self.folder / "drafter")
        self.drafter = self.engine.load(self.proposer)
        self.layers = self._choose_layers()
        self.models = (type(self.engine.wrapper).__name__, type(self.drafter).__name__)

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

    def draft(self, states: Any, tokens: Sequence[int]) -> list[int]:
        """k tokens after `tokens`, [n], by the drafter, from the target's states one position before each, [n, ...]."""
        import torch

        written = list(tokens)
        with torch.inference_mode():
            hidden = self.drafter.combine_hidden_states(states)
        for _ in range(self.k):
            inputs = {"input_ids": torch.tensor(written), "positions": torch.arange(len(written))}
            config = self.proposer.vllm_config
            output, after = self.engine.run(config, self.drafter, **inputs, hidden_states=hidden.clone())
            with torch.inference_mode():
                written.append(int(self.drafter.compute_logits(output[-1:]).argmax(-1)))
            hidden = torch.cat([hidden, after[-1:]])
        return written[len(tokens) :]

    def speculate(self, prompt: Sequence[int], max_tokens: int) -> Run:
        """Write `max_tokens` tokens after `prompt`: the drafter drafts k, the target verifies them and adds one."""
        sequence, rounds = list(prompt), []
        following, states = self.target(sequence)
        sequence.append(following[-1])
        while len(sequence) - len(prompt) < max_tokens:
            known = len(sequence) - 1  # the target has seen all but the last token
            drafts = self.draft(states[:known], sequence[1:])
            following, states = self.target(sequence + drafts)
            verified = following[known:]
            rounds.append(next((i for i in range(self.k) if drafts[i] != verified[i]), self.k))
            sequence += verified[: rounds[-1] + 1]
        return Run(self.k, sequence[len(prompt) :][:max_tokens], rounds)
