"""A learner in several processes: the smallest backend that shards a policy over gloo ranks, for tests of the contracts alone."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from corrente import backends
from corrente import config as c
from corrente.backends.optimizer import LearnerOptimizer
from corrente.data.reductions import Accumulator


class GlooTotals:
    """Implements StepTotals over all ranks."""

    def sum(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def concat(self, values: np.ndarray) -> np.ndarray:
        return np.concatenate(self._gather(values))

    def all(self, flag: bool) -> bool:
        return all(self._gather(flag))

    def merge(self, recorded: Accumulator) -> Accumulator:
        out = Accumulator()
        for one in self._gather(recorded):
            out.merge(one)
        return out

    def _gather(self, value: Any) -> list[Any]:
        out: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(out, value)
        return out


class ShardedOptimizer(LearnerOptimizer):
    """The norm of sharded gradients is a total over ranks."""

    def norm(self) -> float:
        total: Any = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        return float(total.full_tensor() if isinstance(total, DTensor) else total)


class ShardedBackend:
    """Implements Backend: every layer is a unit, and the policy as a whole is the root."""

    def __init__(self, settings: c.Single, *, learner: c.LearnerConfig) -> None:
        self.totals = GlooTotals()
        self._learner = learner
        self._prepared: list[Any] = []

    def prepare(self, policy: Any) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in policy.model.base_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(policy, mesh=mesh)
        for module in policy.modules():
            if isinstance(module, FSDPModule):  # losses add up over ranks; both calls are needed, and neither recurses
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._prepared.append(policy)
        return policy

    def optimizer(self, policy: nn.Module) -> LearnerOptimizer:
        return ShardedOptimizer(policy, learner=self._learner)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        self._prepared[0].set_requires_gradient_sync(last)
        return nullcontext()

    def accumulate(self, loss: Tensor) -> None:
        loss.backward()

    def discard(self) -> None:
        for policy in self._prepared:
            policy.reset_iter_state()
            policy.zero_grad(set_to_none=True)


def run_ranks(count: int, work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """Call ``work(rank, *arguments)`` in ``count`` processes that form a gloo group, and return their results by rank.

    Learners in them get a ShardedBackend for backend.kind "single". AssertionError where a process fails or hangs.
    """
    root = str(Path(__file__).parents[2])
    if root not in sys.path:  # a spawned process imports this module by its name, along the path of this one
        sys.path.append(root)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_rank, args=(rank, count, work, folder, arguments)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
    assert not stuck
    assert [process.exitcode for process in processes] == [0] * count
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(count)]


def _rank(rank: int, count: int, work: Callable[..., Any], folder: Path, arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    backends.KINDS["single"] = f"{__name__}:ShardedBackend"  # pyright: ignore[reportIndexIssue]
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=count)
    try:
        torch.save(work(rank, *arguments), folder / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()
