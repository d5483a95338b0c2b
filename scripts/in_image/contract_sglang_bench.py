"""SGLang's real workers on a CPU, from any wheel: configuration, loader, runner, memory pools, with tiny checkpoints.

What is real: the arguments, the configuration classes, the model registry, the loader, the workers and runners, the KV
pools, and the models' own code in float32 (multi-head latent attention in its absorbed form, mixture of experts, rotary
embedding, norms). What stands in: compiled kernels can't be loaded without a driver, so their modules hold functions
that raise when they are called, and none is; attention is the engine's own torch backend, taught the verify pass.
"""

import copy
import dataclasses
import importlib.machinery
import socket
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import contract_sglang_start
import contract_states
import tiny_models
from contract_check import Context, Unmet

# Only these: the engine asks for others too, and must go on finding that they aren't there. The names of vllm's are
# for a rotary embedding that is constructed, and never run.
GPU_MODULES = ("sgl_kernel", "sgl_kernel.kvcacheio", "vllm", "vllm._custom_ops")

# What the workers call on the target.
METHODS = ("set_eagle3_layers_to_capture", "get_embed_and_head", "set_embed_and_head")


class GpuModule(types.ModuleType):
    """A module of compiled kernels: each name is there, and raises NotImplementedError when it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def kernel(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name} needs a GPU")

        return kernel


def stand_in_for_kernels() -> None:
    """Put modules that can be imported where the engine imports compiled ones. Before the engine is imported."""
    if any(name.split(".")[0] == "sglang" for name in sys.modules):
        raise Unmet("sglang is imported already: run the contract in a process of its own")
    for name in GPU_MODULES:
        sys.modules[name] = GpuModule(name)


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _with_verify(backend: type) -> type:
    """The engine's torch attention backend, with the pass that it lacks.

    In TARGET_VERIFY a request brings some tokens behind `seq_lens` others that are in the KV cache: an extend of a
    sequence that is so much longer. The tokens are a chain (topk 1), so the mask is the causal one.
    """

    class TorchBackend(backend):  # type: ignore[misc]
        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **named: Any
        ) -> Any:
            if forward_batch.forward_mode.is_target_verify():
                forward_batch = as_extend(forward_batch)
            return super().forward_extend(q, k, v, layer, forward_batch, *args, **named)

    return TorchBackend


def as_extend(batch: Any) -> Any:
    """A TARGET_VERIFY batch as the extend of the same tokens."""
    extend = copy.copy(batch)
    tokens = batch.out_cache_loc.shape[0] // batch.batch_size
    extend.extend_prefix_lens = batch.seq_lens
    extend.seq_lens = batch.seq_lens + tokens
    extend.extend_seq_lens = extend.seq_lens - extend.extend_prefix_lens
    return extend


def _use_torch_attention() -> None:
    """Register the torch backend, and absorbed MLA as the way to use it, where the engine looks both up."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    ATTENTION_BACKENDS["torch_native"] = _with_verify(TorchNativeAttnBackend)
    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


def _no_cuda() -> None:
    """Let the two calls pass that the engine makes on every device after it has shared the embedding."""
    import torch

    torch.cuda.empty_cache = lambda: None
    torch.cuda.synchronize = lambda *_, **__: None


class Bench:
    """One engine process with a world of one, a real target worker, and draft workers beside it.

    `target`: the folder of another target than the tiny one; `max_len`: tokens of the longest sequence.
    """

    def __init__(
        self,
        work: Path,
        target: Path | None = None,
        max_len: int = 128,
        draft_tokens: int = 3,
        dtype: str = "float32",
    ) -> None:
        stand_in_for_kernels()
        import torch

        torch.set_num_threads(1)
        _no_cuda()
        _use_torch_attention()
        self.work = work / "models"
        self.work.mkdir()
        # With Kimi's rope: without it, the engine's CPU path refuses the model.
        self.target = target or tiny_models.write_target(self.work / "target", rope_scaling=tiny_models.YARN)
        self.max_len, self.draft_tokens, self.dtype = max_len, draft_tokens, dtype

    def arguments(self, drafter: Path | None = None, algorithm: str = "EAGLE3", **changes: Any) -> Any:
        """Real ServerArgs of the target, with `drafter` if there is one. Raises what the engine raises."""
        from sglang.srt.server_args import ServerArgs

        speculative = {
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": str(drafter),
            "speculative_num_steps": self.draft_tokens,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": self.draft_tokens + 1,
        }
        options: dict[str, Any] = {
            "model_path": str(self.target),
            "skip_tokenizer_init": True,
            "device": "cpu",
            "dtype": self.dtype,
            "load_format": "safetensors",
            "context_length": self.max_len,
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_shared_experts_fusion": True,
            "disable_cuda_graph": True,
            "disable_radix_cache": True,
            "max_total_tokens": 8 * self.max_len,
            "max_running_requests": 4,
            "mem_fraction_static": 0.5,
        }
        return ServerArgs(**options | (speculative if drafter else {}) | changes)

    @cached_property
    def start(self) -> Any:
        """How this release brings workers up."""
        return contract_sglang_start.start(free_port())

    def target_runner(self, drafter: Path | None = None, algorithm: str = "EAGLE3") -> Any:
        """The real runner of a target that has started, with `drafter` if there is one. Raises as the engine does."""
        with self.lent_methods():
            return self.start.target(self.arguments(drafter, algorithm))

    @cached_property
    def plain(self) -> Any:
        """The runner of a target without speculation: it starts in each release."""
        return self.target_runner()

    def pair(self, drafter: Path) -> contract_sglang_start.Pair:
        """The real runners of a target and of a drafter that is loaded beside it."""
        with self.lent_methods():
            return self.start.pair(self.arguments(drafter))

    @contextmanager
    def lent_methods(self) -> Iterator[None]:
        """Give the wrapper the methods that it lacks, which is a check of its own, so that others can go on."""
        from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration as Wrapper

        lacking = [name for name in METHODS if not hasattr(Wrapper, name)]
        for name in lacking:
            setattr(Wrapper, name, lambda self, *args, name=name: getattr(self.language_model, name)(*args))
        try:
            yield
        finally:
            for name in lacking:
                delattr(Wrapper, name)

    @property
    def wrapper(self) -> Any:
        """The KimiK25ForConditionalGeneration that the engine's own loader makes of the tiny checkpoint."""
        return self.plain.model

    def drafter(self, kind: str, **changes: Any) -> Path:
        """The checkpoint of a drafter, `llama` or `mla`; `changes` go into its config.json."""
        folder = self.work / f"{kind}-drafter-{len(list(self.work.iterdir()))}"
        write = {"mla": tiny_models.write_mla_drafter, "llama": tiny_models.write_llama_drafter}[kind]
        return write(folder, **changes)

    def forward(self, runner: Any, ids: Any, verify: int = 0, **fields: Any) -> Any:
        """Run `ids`, [tokens], as one new sequence through a real runner: its LogitsProcessorOutput.

        The last `verify` tokens run as TARGET_VERIFY, behind an EXTEND of those before them; what comes back is of
        that pass. `fields` go into the ForwardBatch.
        """
        import torch
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

        known = {field.name for field in dataclasses.fields(ForwardBatch)}
        pools = {
            "req_to_token_pool": runner.req_to_token_pool,
            "token_to_kv_pool": runner.token_to_kv_pool,
            "attn_backend": runner.attn_backend,
        }
        runner.token_to_kv_pool_allocator.clear()
        slots = runner.token_to_kv_pool_allocator.alloc(len(ids))
        runner.req_to_token_pool.req_to_token[0, : len(ids)] = slots
        positions = torch.arange(len(ids))

        def batch(mode: Any, start: int, end: int, **more: Any) -> Any:
            return ForwardBatch(
                forward_mode=mode,
                batch_size=1,
                input_ids=ids[start:end],
                positions=positions[start:end],
                out_cache_loc=slots[start:end],
                req_pool_indices=torch.tensor([0]),
                capture_hidden_mode=CaptureHiddenMode.FULL,
                return_logprob=False,
                mm_inputs=[None],
                # Where the release keeps them in a batch: elsewhere the backend has its own.
                **{name: pool for name, pool in pools.items() if name in known},
                **more,
                **fields,
            )

        def lengths(total: int) -> dict[str, Any]:
            return {"seq_lens": torch.tensor([total]), "seq_lens_cpu": torch.tensor([total]), "seq_lens_sum": total}

        prefix = len(ids) - verify
        extend = batch(
            ForwardMode.EXTEND,
            0,
            prefix,
            extend_num_tokens=prefix,
            extend_seq_lens=torch.tensor([prefix]),
            extend_prefix_lens=torch.tensor([0]),
            extend_start_loc=torch.tensor([0]),
            extend_seq_lens_cpu=[prefix],
            extend_prefix_lens_cpu=[0],
            **lengths(prefix),
        )
        with torch.inference_mode():
            output = runner.forward(extend).logits_output
            if verify:
                output = runner.forward(
                    batch(ForwardMode.TARGET_VERIFY, prefix, len(ids), **lengths(prefix))
                ).logits_output
        return output

    def draft(self, runner: Any, ids: Any, states: Any) -> Any:
        """Run a drafter over `ids`, [tokens], with `states`: [tokens, 3 * hidden], in later steps [tokens, hidden]."""
        given = types.SimpleNamespace(hidden_states=states, is_draft_input=lambda: True)
        return self.forward(runner, ids, spec_info=given)

    @cached_property
    def reference(self) -> Any:
        """transformers' own DeepseekV3ForCausalLM with the weights of the target's language model."""
        folder = tiny_models.write_reference(self.work / "reference", rope_scaling=tiny_models.YARN)
        return contract_states.reference(folder)


@lru_cache(maxsize=1)
def _bench(work: Path) -> Bench:
    return Bench(work)


def bench(context: Context) -> Bench:
    """The engine of this process, made at the first call."""
    return _bench(context.work)


def captured(wrapper: Any) -> tuple[int, ...]:
    """The layers whose input a target hands over, as its language model has them."""
    layers: Sequence[int] = wrapper.language_model.model.layers_to_capture
    return tuple(layers)
