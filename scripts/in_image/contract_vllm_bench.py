"""vLLM's real model code on a CPU, from any wheel: configuration, models and loader, with tiny checkpoints.

What is real: the configuration classes, the model registry, the loader, the models' own code in float32 (multi-head
latent attention, mixture of experts, rotary embedding, norms) and the proposer. What stands in: the platform (the
engine's own CPU platform, so that a CUDA wheel works without a GPU), and two kernels, computed with torch: attention
(plain, causal, over one sequence) and, where the release has a compiled one, the product with the chosen experts. The
image processor is left out.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import contract_states
import tiny_models
from contract_check import Context, Unmet


def _platform() -> Any:
    """The engine's CPU platform, which only picks attention backends that each wheel can build without a GPU."""
    from vllm.platforms.cpu import CpuPlatform

    class BenchPlatform(CpuPlatform):  # type: ignore[misc]
        @classmethod
        def get_attn_backend_cls(cls, *args: Any, **named: Any) -> str:
            if any(getattr(value, "use_mla", False) for value in (*args, *named.values())):
                return "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"
            return "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"

    return BenchPlatform()


def _causal(q: Any, k: Any, v: Any, scale: float) -> Any:
    """Causal attention of one sequence. q, k: [tokens, heads, d], v: [tokens, heads, d_v] -> [tokens, heads * d_v]."""
    import torch

    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    ahead = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(q.shape[0], -1)


def _latent_forward(self: Any, q: Any, kv_c_normed: Any, k_pe: Any, *_: Any, **__: Any) -> Any:
    """MLAAttention.forward without a KV cache: expand the latent with the layer's own kv_b_proj, then attend."""
    import torch

    heads, nope, v_dim = self.num_heads, self.qk_nope_head_dim, self.v_head_dim
    k_nope, v = self.kv_b_proj(kv_c_normed)[0].view(-1, heads, nope + v_dim).split([nope, v_dim], dim=-1)
    k = torch.cat([k_nope, k_pe.expand(-1, heads, -1)], dim=-1)
    return _causal(q, k, v, self.impl.scale)


def _plain_forward(self: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    """Attention.forward without a KV cache."""
    q = query.view(query.shape[0], self.num_heads, -1)
    k, v = (x.view(x.shape[0], self.num_kv_heads, -1) for x in (key, value))
    groups = self.num_heads // self.num_kv_heads
    return _causal(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), self.impl.scale)


def _experts(out: Any, x: Any, w13: Any, w2: Any, _b13: Any, _b2: Any, *routed: Any, **_: Any) -> None:
    """The expert kernel: out is the sum of weight * down(silu(gate(x)) * up(x)) over the chosen experts. No biases.

    x, out: [tokens, hidden]; w13: [experts, 2 * inner, hidden]; w2: [experts, hidden, inner]; `routed` begins with the
    weights and the ids of the chosen experts: [tokens, k] each.
    """
    import torch

    weights, ids = routed[:2]
    gate, up = torch.einsum("th,tkih->tki", x, w13[ids]).chunk(2, dim=-1)
    each = torch.einsum("tki,tkhi->tkh", torch.nn.functional.silu(gate) * up, w2[ids])
    out.copy_((each * weights[..., None].to(each.dtype)).sum(1))


def _in_place(native: Any) -> Any:
    """The engine's norm in torch, which writes into its inputs as the fused kernel on a GPU does.

    So a state that was captured by reference is overwritten here, too.
    """

    def forward_native(self: Any, x: Any, residual: Any = None) -> Any:
        if residual is None:
            return native(self, x)
        normed, total = native(self, x, residual)
        return x.copy_(normed), residual.copy_(total)

    return forward_native


def _stand_in_for_kernels() -> None:
    """Put the torch versions where the engine calls a kernel that a CUDA wheel doesn't have for a CPU."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.layernorm import RMSNorm

    MLAAttention.forward = _latent_forward
    Attention.forward = _plain_forward
    RMSNorm.forward_native = _in_place(RMSNorm.forward_native)
    try:
        experts: Any = import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe")
    except ModuleNotFoundError:
        return  # this release computes them with torch by itself
    experts.cpu_prepack_moe_weight = lambda weight, isa: weight
    experts.cpu_fused_moe = _experts


def _allow_images() -> None:
    """Say yes where the engine asks whether the target takes images.

    It would ask Kimi's image processor, which is code of the model's repository.
    """
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY

    name = "supports_multimodal_inputs"
    for holder, method in ((MULTIMODAL_REGISTRY, name), (ModelConfig, f"_{name}")):  # the one or the other, by release
        if hasattr(holder, method):
            setattr(holder, method, lambda config: config.is_multimodal_model)


class Bench:
    """One engine process with a world of one, a real wrapper target around a real tiny language model, and drafters.

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
        if "vllm" in sys.modules:
            raise Unmet("vllm is imported already: run the contract in a process of its own")
        import vllm.platforms

        vllm.platforms._current_platform = _platform()
        import torch
        from vllm.model_executor.models import registry

        torch.set_num_threads(1)
        _allow_images()
        registry._run_in_subprocess = lambda inspect: inspect()  # else each class costs another import of vllm
        self.work = work / "models"
        self.work.mkdir()
        self.device = torch.device("cpu")
        self.target = target or tiny_models.write_target(self.work / "target")
        self.max_len, self.draft_tokens, self.dtype = max_len, draft_tokens, dtype

    def model_config(self, folder: Path) -> Any:
        """A real ModelConfig of a target."""
        from vllm.config import ModelConfig

        return ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            skip_tokenizer_init=True,
            dtype=self.dtype,
            max_model_len=self.max_len,
            enforce_eager=True,
            limit_mm_per_prompt={"vision_chunk": 0},
        )

    def speculative_config(self, drafter: Path, target: Any) -> Any:
        """A real SpeculativeConfig of an EAGLE-3 drafter. Raises what the engine raises when it refuses."""
        from vllm.config import ParallelConfig, SpeculativeConfig

        return SpeculativeConfig(
            method="eagle3",
            model=str(drafter),
            num_speculative_tokens=self.draft_tokens,
            target_model_config=target,
            target_parallel_config=ParallelConfig(),
            enforce_eager=True,
        )

    def vllm_config(self, drafter: Path | None = None) -> Any:
        """A real VllmConfig of the tiny Kimi target with `drafter`.

        Where the engine's allow-list refuses the pair (a check of its own), the configuration is made with a Llama
        target and given the Kimi target afterwards, so that the other checks can still look at their own matter.
        """
        from vllm.config import CompilationConfig, DeviceConfig, LoadConfig, SchedulerConfig, VllmConfig

        target = self.model_config(self.target)
        speculative = None
        if drafter:
            try:
                speculative = self.speculative_config(drafter, target)
            except ValueError:
                speculative = self.speculative_config(drafter, self.model_config(self.llama_target))
        config = VllmConfig(
            model_config=target,
            speculative_config=speculative,
            device_config=DeviceConfig(device="cpu"),
            load_config=LoadConfig(load_format="safetensors", use_tqdm_on_load=False),
            compilation_config=CompilationConfig(mode=0, custom_ops=["none"]),
            scheduler_config=SchedulerConfig(
                max_model_len=self.max_len,
                max_num_batched_tokens=self.max_len,
                max_num_seqs=4,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
        )
        if speculative:
            config.speculative_config.target_model_config = target
        return config

    @cached_property
    def llama_target(self) -> Path:
        return tiny_models.write_llama_target(self.work / "llama-target")

    def drafter(self, kind: str) -> Path:
        """The checkpoint of a drafter: `llama`, `mla`, or one of these under another model type, `llama:kimi_k2`."""
        folder = self.work / f"{kind}-drafter"
        if folder.exists():
            return folder
        architecture, _, model_type = kind.partition(":")
        write = {"mla": tiny_models.write_mla_drafter, "llama": tiny_models.write_llama_drafter}[architecture]
        return write(folder, **({"model_type": model_type} if model_type else {}))

    @cached_property
    def config(self) -> Any:
        """The VllmConfig of the target, in a world of one process; over a file, so that no port is needed."""
        from vllm.config import set_current_vllm_config
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

        _stand_in_for_kernels()
        config = self.vllm_config()
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{self.work}/world", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        return config

    @cached_property
    def wrapper(self) -> Any:
        """The KimiK25ForConditionalGeneration that the engine's own loader makes of the tiny checkpoint."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model

        with set_current_vllm_config(self.config):
            return get_model(vllm_config=self.config)

    def proposer(self, drafter: Path) -> Any:
        """The engine's real EagleProposer for the drafter in a folder, before it loads anything."""
        from vllm.config import set_current_vllm_config
        from vllm.v1.spec_decode.eagle import EagleProposer

        self.wrapper  # noqa: B018  (the world and the target come first)
        config = self.vllm_config(drafter)
        with set_current_vllm_config(config):
            return EagleProposer(config, self.device)

    def load(self, proposer: Any) -> Any:
        """Let `proposer` load its drafter beside the wrapper target, by its own `load_model`. Returns the drafter."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(proposer.vllm_config):
            proposer.load_model(self.wrapper)
        return proposer.model

    @contextmanager
    def any_placeholder(self) -> Iterator[None]:
        """Let the target's config answer to each name of the placeholder token, which is a check of its own."""
        config = self.wrapper.config
        known = hasattr(config, "image_token_index")
        if not known:
            config.image_token_index = tiny_models.MEDIA_TOKEN
        try:
            yield
        finally:
            if not known:
                del config.image_token_index

    @cache  # noqa: B019  (there is one bench in a process)
    def loaded(self, kind: str) -> Any:
        """A proposer with its drafter loaded beside the wrapper target."""
        proposer = self.proposer(self.drafter(kind))
        with self.any_placeholder():
            self.load(proposer)
        return proposer

    def run(self, config: Any, model: Any, **inputs: Any) -> Any:
        """Call `model` with `inputs` as the runner does, without a KV cache."""
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        with torch.inference_mode(), set_current_vllm_config(config), set_forward_context(None, config):
            return model(**inputs)

    @cached_property
    def reference(self) -> Any:
        """transformers' own DeepseekV3ForCausalLM with the weights of the target's language model."""
        return contract_states.reference(tiny_models.write_reference(self.work / "reference"))


@lru_cache(maxsize=1)
def _bench(work: Path) -> Bench:
    return Bench(work)


def bench(context: Context) -> Bench:
    """The engine of this process, made at the first call."""
    return _bench(context.work)
