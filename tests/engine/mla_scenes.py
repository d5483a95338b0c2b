"""Scenes for mla_rig, played on several versions of the backend: the engine is imported once, as it takes long.

Runs under the engine's interpreter. argv[1] is a JSON list of plays: {"files": {module: path}, "scenes": [[scene,
arguments], ...]}. Each play has a process of its own, in which the modules come from those files. A JSON list goes to
stdout: for each play, the answers of its scenes. A scene that raises answers {"failed": "Type: message"}.
"""

import dataclasses
import importlib
import importlib.util
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from mla_rig import CompilationConfig, Rig, Sizes, step

Batch = list[tuple[int, int]]


def steps(sizes: dict[str, Any], batches: list[Batch]) -> list[dict[str, Any]]:
    """One step for each batch, on a rig of its own."""
    return [step(Rig(Sizes(**sizes), seed), [tuple(seq) for seq in batch]) for seed, batch in enumerate(batches)]


def replay(sizes: dict[str, Any], seqs: int, batches: list[Batch]) -> dict[str, Any]:
    """A CUDA graph of `seqs` sequences: captured once, then replayed for batches that may be smaller.

    A replay reads the addresses of the capture, so the metadata of the capture is what the layer is given each time.
    """
    rig = Rig(Sizes(**sizes))
    tokens = rig.sizes.k + 1
    captured = rig.builder.build_for_cudagraph_capture(rig.common([(0, tokens)] * seqs))

    def addresses(metadata: Any) -> list[tuple[Any, ...]]:
        tensors = (metadata.decode.block_table, metadata.decode.seq_lens)
        return [(t.data_ptr(), t.stride(), tuple(t.shape)) for t in tensors]

    same, errors, padding = [], [], []
    for batch in batches:
        inputs, common = rig.fill(batch), rig.common(batch, padded_seqs=seqs)
        same.append(addresses(rig.builder.build(0, common)) == addresses(captured))
        out = rig.forward(dataclasses.replace(captured, slot_mapping=common.slot_mapping), inputs)
        used = len(inputs["q"])
        errors.append(float((out[:used].float() - rig.dense(batch, inputs)).abs().nan_to_num(1e9).max()))
        padding.append(bool((out[used:] == 0).all()))
    return {"same": same, "errors": errors, "padding_is_zero": padding}


def modes(sizes: dict[str, Any]) -> dict[str, Any]:
    """What the model runner makes of the backend: mode, sizes to capture, and the graph of a verify batch of two."""
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    rig = Rig(Sizes(**sizes))
    config, tokens = rig.config, rig.sizes.k + 1
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        cudagraph_capture_sizes=[1, 2, 4, 8, 16, 24, 32],
        max_cudagraph_capture_size=32,
    )
    compilation.post_init_cudagraph_sizes()
    compilation.set_splitting_ops_for_v1("")
    config.compilation_config, config.lora_config = compilation, None
    if config.speculative_config:
        config.speculative_config.use_eagle = lambda: False
    runner = SimpleNamespace(
        vllm_config=config,
        compilation_config=compilation,
        parallel_config=config.parallel_config,
        speculative_config=config.speculative_config,
        uniform_decode_query_len=tokens,
        cudagraph_dispatcher=CudagraphDispatcher(config),
    )
    groups = [SimpleNamespace(kv_cache_spec=rig.builder.kv_cache_spec)]
    GPUModelRunner._check_and_update_cudagraph_mode(runner, [{rig.backend}], groups)
    mode, shape = runner.cudagraph_dispatcher.dispatch(2 * tokens, uniform_decode=True)
    return {
        "mode": compilation.cudagraph_mode.name,
        "sizes": compilation.cudagraph_capture_sizes,
        "verify": mode.name,
        "verify_seqs": shape.num_reqs,
    }


def answer(name: str, arguments: dict[str, Any]) -> Any:
    try:
        return SCENES[name](**arguments)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def start(sizes: dict[str, Any]) -> dict[str, Any]:
    """The layer and its builder come into being; says which types of cache the backend offers."""
    rig = Rig(Sizes(**sizes))
    return {
        "caches": list(rig.backend.supported_kv_cache_dtypes),
        "quantizes_queries": rig.layer.impl.supports_quant_query_input,
    }


def cost(context: int) -> dict[str, Any]:
    """What a verify step costs behind this many tokens."""
    import verify_cost

    return verify_cost.cost(context)


SCENES = {"cost": cost, "steps": steps, "replay": replay, "modes": modes, "start": start}


def play(files: dict[str, str], scenes: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """The answers of the scenes, with modules from other files. Runs in a process of its own."""
    for name, path in files.items():
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader and name not in sys.modules
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return [answer(name, arguments) for name, arguments in scenes]


def apart(files: dict[str, str], scenes: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """`play` in a fork of this process, which has the engine imported."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        with os.fdopen(write, "w") as out:
            json.dump(play(files, scenes), out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status or not text:
        raise SystemExit(f"a play ended with {status}: {files}")
    return list(json.loads(text))


if __name__ == "__main__":
    importlib.import_module("vllm.v1.worker.gpu_model_runner")
    print(json.dumps([apart(**one) for one in json.loads(sys.argv[1])]))
