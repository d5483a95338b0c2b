"""How the scheduler's process of a release brings its workers up. What comes out is the same: their runners.

Two ways, told apart by what the release has. Up to 0.5.10 at least, a worker's constructor does all. Later, the process
publishes its arguments, makes its world once, and gives workers their memory pools and attention backends afterwards.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pair:
    """The runner of a target, and the one of the drafter that was loaded beside it."""

    target: Any
    drafter: Any


class Constructors:
    """Workers whose constructors do all."""

    def __init__(self, port: int) -> None:
        """`port`: where the world of one meets. Several targets may start in it, one after the other."""
        from sglang.srt.distributed import parallel_state
        from sglang.srt.model_executor import model_runner

        # Where a worker stands in a world of one, by the names that workers take.
        ranks = dict.fromkeys(("gpu_id", "tp_rank", "moe_ep_rank", "attn_cp_rank", "moe_dp_rank"), 0)
        self.ranks = {**ranks, "dp_rank": None, "nccl_port": port}
        initialize = parallel_state.initialize_model_parallel

        def once(*args: Any, **named: Any) -> None:
            if not parallel_state.model_parallel_is_initialized():
                initialize(*args, **named)

        model_runner.initialize_model_parallel = once

    def worker(self, arguments: Any) -> Any:
        """The real TpModelWorker of the target."""
        from sglang.srt.managers.tp_worker import TpModelWorker

        return TpModelWorker(server_args=arguments, pp_rank=0, **self.ranks)

    def scheduler(self, arguments: Any) -> Any:
        """The real Scheduler, with workers of its own, before its loop begins. One in a process."""
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.server_args import PortArgs

        ranks = {name: rank for name, rank in self.ranks.items() if name != "nccl_port"}
        return Scheduler(arguments, PortArgs.init_new(arguments), pp_rank=0, **ranks)

    def target(self, arguments: Any) -> Any:
        """The runner of a target that is ready. Raises what the engine raises."""
        return self.worker(arguments).model_runner

    def pair(self, arguments: Any) -> Pair:
        """A target, and its drafter in the engine's real EAGLE worker, which has shared the embedding.

        The backends of several draft steps and the graphs are left out, as the engine has none for a CPU.
        """
        from sglang.srt.speculative.eagle_worker import EAGLEWorker

        class Worker(EAGLEWorker):  # type: ignore[misc]
            def init_attention_backend(self) -> None: ...

            def init_cuda_graphs(self) -> None: ...

        target = self.worker(arguments)
        worker = Worker(server_args=arguments, target_worker=target, **self.ranks)
        return Pair(target.model_runner, worker.draft_model_runner)


class Published:
    """Workers of a process that has published its arguments."""

    def __init__(self, port: int) -> None:
        self.port, self.world = port, False

    def worker(self, arguments: Any) -> Any:
        """The real TpModelWorker of the target, before it has a memory pool."""
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import bootstrap
        from sglang.srt.layers.moe import initialize_moe_config
        from sglang.srt.managers.tp_worker import TpModelWorker
        from sglang.srt.runtime_context import SpawnRanks, get_resources, publish

        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        if not self.world:
            bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=self.port)
            self.world = True
        bootstrap.init_layer_runtime(model_config=ModelConfig.from_server_args(arguments))
        initialize_moe_config()
        get_resources().expert_location_metadata = None  # else a second target in this process is refused
        return TpModelWorker(server_args=arguments, gpu_id=0, nccl_port=self.port)

    def scheduler(self, arguments: Any) -> Any:
        """As Constructors.scheduler."""
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs

        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        return Scheduler(arguments, PortArgs.init_new(arguments))

    def target(self, arguments: Any) -> Any:
        """The runner of a target that is ready. Raises what the engine raises."""
        worker = self.worker(arguments)
        worker.alloc_memory_pool()
        return self.ready(worker)

    def pair(self, arguments: Any) -> Pair:
        """As Constructors.pair."""
        from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

        target = self.worker(arguments)
        worker = EAGLEWorkerV2(arguments, 0, self.port, target)
        target.alloc_memory_pool(draft_parallel_layout=worker.draft_parallel_layout)
        pool, allocator = target.get_memory_pool()
        worker.alloc_memory_pool(
            memory_pool_config=target.model_runner.memory_pool_config,
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=allocator,
        )
        return Pair(self.ready(target), self.ready(worker.draft_worker.draft_worker))

    def ready(self, worker: Any) -> Any:
        """The runner of a worker that has its memory pool."""
        worker.init_attention_backends()
        worker.init_cuda_graphs()  # on a CPU: none
        return worker.model_runner


def start(port: int) -> Constructors | Published:
    """The way of this release."""
    publishes = importlib.util.find_spec("sglang.srt.runtime_context") is not None
    return Published(port) if publishes else Constructors(port)
