"""What a pool of replicas delivers beside one engine with the same threads: tokens per second, same requests, same machine.

    python benchmarks/pool.py MODEL [--replicas 1 2] [--requests 64 128] [--tokens 64] [--repeats 5] [--json FILE]

For each number of replicas the real runtime is opened, with as many threads in all as there are cores, all of them at once; they
take turns at the same work, REQUESTS completions of TOKENS tokens in groups of 8, so that what else the machine does hits all
alike; who waits computes nothing. Their learners only publish the weights. ``ratio`` is of medians, to the first of --replicas;
``others`` is processor time of everything else over seconds times cores: a row with much of it measures the neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import numpy as np
from transformers import AutoTokenizer

from corrente.config import Model, Pool, Procs, RunConfig
from corrente.data.types import Request, Sampling
from corrente.runtime.base import Workers
from corrente.runtime.procs import ProcsRuntime
from corrente.sync.base import stage

MEMBERS = 8


async def generate(workers: Workers, prompts: list[np.ndarray], *, requests: int, tokens: int) -> float:
    """Tokens per second of one round."""

    async def one(number: int) -> None:
        group = number // MEMBERS
        sampling = Sampling(max_tokens=tokens)
        prompt = prompts[group % len(prompts)]
        await workers.engine.generate(
            Request(id=str(number), tokens=prompt, sampling=sampling, seed=number, group=str(group))
        )

    before, start = (await workers.engine.stats()).decode_tokens, time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for number in range(requests):
            tasks.start_soon(one, number)
    seconds = time.perf_counter() - start
    return ((await workers.engine.stats()).decode_tokens - before) / seconds


def children_s() -> float:
    """Processor time of all children so far."""
    total, tick = 0.0, os.sysconf("SC_CLK_TCK")
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / tick
    return total


def machine_s() -> float:
    """Processor time of everything on this machine so far."""
    user, nice, system, _, _, irq, softirq = (int(n) for n in Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


async def compare(given: argparse.Namespace, prompts: list[np.ndarray]) -> list[dict[str, float]]:
    """Rounds in turn, for each number of requests; one round each goes ahead unmeasured."""
    rows: list[dict[str, float]] = []
    async with AsyncExitStack() as stack:
        pools: dict[int, Workers] = {}
        for replicas in given.replicas:
            config = RunConfig(
                model=Model(path=str(given.model)), runtime=Procs(placement="shared"), pool=Pool(replicas=replicas)
            )
            pools[replicas] = await stack.enter_async_context(ProcsRuntime().open(config))
            await pools[replicas].sync.flip(await stage(pools[replicas].sync, 0), "swap")
        for requests in given.requests:
            rates: dict[int, list[float]] = {replicas: [] for replicas in pools}
            busy = dict.fromkeys(pools, 0.0)
            for round_ in range(given.repeats + 1):
                for replicas, workers in pools.items():
                    everything, ours, start = machine_s(), children_s(), time.perf_counter()
                    rate = await generate(workers, prompts, requests=requests, tokens=given.tokens)
                    others = machine_s() - everything - (children_s() - ours)
                    if round_:
                        rates[replicas].append(rate)
                        busy[replicas] += others / (time.perf_counter() - start) / (os.cpu_count() or 1)
            first = statistics.median(rates[given.replicas[0]])
            for replicas, found in rates.items():
                row = {
                    "replicas": replicas,
                    "requests": requests,
                    "tokens": given.tokens,
                    "tok_per_s": statistics.median(found),
                    "least": min(found),
                    "most": max(found),
                    "ratio": statistics.median(found) / first,
                    "others": busy[replicas] / given.repeats,
                }
                sys.stdout.write("  ".join(f"{name} {value:8.2f}" for name, value in row.items()) + "\n")
                sys.stdout.flush()
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    encode = AutoTokenizer.from_pretrained(given.model)
    texts = [f"2 + 3 = 5\n6 + 1 = 7\n{n % 9 + 1} + {n * 7 % 9 + 1} =" for n in range(16)]
    prompts = [np.array(encode(text)["input_ids"], np.int32) for text in texts]
    rows = anyio.run(compare, given, prompts)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
