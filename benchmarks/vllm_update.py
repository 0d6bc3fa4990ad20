"""What an update of a vLLM server costs with requests in flight, and what streaming costs.

    python benchmarks/vllm_update.py MODEL [--requests 16] [--tokens 128] [--publishes 5] [--intervals 1 8 1000] [--json FILE]

A server is launched as a run would launch it (make vllm). Part 1: publishes over shared memory while requests decode: seconds of
the copy out of the learner, of receiving and packing in vLLM's worker beside requests, of the pause itself, and of the flip as
the controller sees it, which includes the rest of the step that was under way. Part 2: tokens per second by how many tokens one
streamed piece has. Weights do not change their values: what is measured does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from safetensors.torch import load_file

from corrente.common.local_spawner import open_local_spawner
from corrente.config import Model, RunConfig, Vllm
from corrente.data.types import Request, Sampling
from corrente.engine.vllm.launcher import VllmLauncher
from corrente.runtime.run_weights import RunWeights
from corrente.sync import sender
from corrente.sync.base import OfferRequest, Update
from corrente.sync.shared_memory import SharedMemory
from corrente.sync.weight_slots import map_slots


class Publisher:
    """The learner's end: packs the checkpoint's weights into the slot that is free, and has the engine take it."""

    def __init__(self, config: RunConfig, replica: Any, memory: SharedMemory) -> None:
        self._engine, self._version = replica.engine, -1
        slots = map_slots(replica.layout, fd=memory.fd)
        self._sender = sender.build(config, replica.layout, shared=slots, path=memory.path)
        files = sorted(Path(config.model.path).glob("*.safetensors"))
        self._tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}

    async def publish(self) -> dict[str, float]:
        self._version += 1
        slot = self._version % 2
        await self._engine.reserve(slot)
        copy_s = await anyio.to_thread.run_sync(lambda: self._sender.export(self._version, self._tensors, slot=slot))
        start = time.perf_counter()
        await self._engine.receive(self._sender.offer(OfferRequest(version=self._version, slot=slot)))
        received = time.perf_counter()
        pause_s = await self._engine.apply(Update(version=self._version, slot=slot), "swap")
        return {
            "copy_s": copy_s,
            "receive_s": received - start,
            "pause_s": pause_s,
            "flip_s": time.perf_counter() - received,
        }


async def flood(engine: Any, *, requests: int, tokens: int) -> float:
    """Tokens per second of ``requests`` at once, their prefill included."""
    start, before = time.perf_counter(), (await engine.stats()).decode_tokens
    async with anyio.create_task_group() as tasks:
        for at in range(requests):
            prompt = np.array([1 + at % 7, 5, 6, 7], np.int32)
            request = Request(id=str(at), tokens=prompt, sampling=Sampling(max_tokens=tokens), seed=at)
            tasks.start_soon(engine.generate, request)
    return ((await engine.stats()).decode_tokens - before) / (time.perf_counter() - start)


async def publishes(engine: Any, publisher: Publisher, args: argparse.Namespace) -> list[dict[str, float]]:
    """Costs of each publish; requests decode all the while."""
    costs: list[dict[str, float]] = []

    async def keep_busy() -> None:
        while True:
            await flood(engine, requests=args.requests, tokens=args.tokens)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_busy)
        while (await engine.stats()).running < args.requests:
            await anyio.sleep(0.01)
        for _ in range(args.publishes):
            costs.append(await publisher.publish())
        tasks.cancel_scope.cancel()
    return costs


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    section = Vllm(max_context=max(64, args.tokens + 16), max_sequences=args.requests)
    config = RunConfig(model=Model(path=args.model), engine=section)
    memory = SharedMemory()
    async with (
        open_local_spawner() as spawner,
        VllmLauncher(config, weights=RunWeights(memory), spawner=spawner).launch(0) as replica,
    ):
        engine: Any = replica.engine
        publisher = Publisher(config, replica, memory)
        await publisher.publish()
        await flood(engine, requests=args.requests, tokens=args.tokens)
        costs = await publishes(engine, publisher, args)
        rates: dict[str, float] = {}
        for interval in args.intervals:
            engine.stream_interval = interval
            rates[str(interval)] = await flood(engine, requests=args.requests, tokens=args.tokens)
    memory.close()
    median = {key: statistics.median(cost[key] for cost in costs) for key in costs[0]}
    worst = {f"{key}_max": max(cost[key] for cost in costs) for key in costs[0]}
    return {"bytes": replica.layout.nbytes, **median, **worst, "tokens_per_s_by_interval": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--publishes", type=int, default=5)
    parser.add_argument("--intervals", type=int, nargs="+", default=[1, 8, 1000])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = anyio.run(measure, args)
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
