"""What each placement of engine and learner on one machine costs, over a fixed amount of coupled work.

    python benchmarks/placement.py MODEL [--steps 4] [--tokens 8 32] [--rounds 3] [--json FILE]

For every setting the real runtime does the same work: STEPS batches of 64 completions (8 prompts of 8) are generated, each
batch is trained on and its weights are published, and generation runs ahead by at most one version (128 slots). ``sequential``
waits for each side before it starts the other: it is what overlap is measured against. On cores that are all busy overlap
cannot shorten the sum of the work; it must not lengthen it either. A short completion makes the learner the slower side, a long
one the engine. ``lag`` is the mean over trained tokens, ``cpu`` is processor seconds of both workers over seconds times cores,
``others`` that of everything else on the machine: a row with much of it measures the neighbours. The settings alternate within
a round; ends with the median seconds of each, and its ratio to ``shared`` of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import anyio
import numpy as np
from transformers import AutoTokenizer

from corrente.common.spawn import WorkerPlace
from corrente.config import Model, Procs, RunConfig
from corrente.data.types import Batch, Completion, Request, Row, Sampling
from corrente.runtime.base import Workers
from corrente.runtime.placement import Places, places
from corrente.runtime.procs import ProcsRuntime
from corrente.sync.base import stage

GROUPS, MEMBERS = 8, 8
SIZE = GROUPS * MEMBERS
Kind = Literal["shared", "pinned", "priority"]


def niced(engine: int, learner: int) -> Callable[[Kind, Sequence[int]], Places]:
    """Both on all cores, each as nice as told."""

    def place(kind: Kind, cpus: Sequence[int]) -> Places:
        every = tuple(cpus)
        return Places(
            engine=WorkerPlace(cpus=every, threads=len(every), nice=engine),
            learner=WorkerPlace(cpus=every, threads=len(every), nice=learner),
        )

    return place


SETTINGS: dict[str, tuple[Kind, Callable[[Kind, Sequence[int]], Places]]] = {
    "sequential": ("shared", places),
    "shared": ("shared", places),
    "pinned": ("pinned", places),
    "priority": ("priority", places),
    "engine first by 4": ("shared", niced(1, 5)),
    "engine first by 18": ("shared", niced(1, 19)),
    "learner first by 4": ("shared", niced(5, 1)),
    "learner first by 9": ("shared", niced(10, 1)),
    "learner first by 18": ("shared", niced(19, 1)),
}


class Work:
    """Prompts in, trained batches out, with the slot rule of a window buffer for S = 1 in completion order."""

    def __init__(self, workers: Workers, prompts: list[np.ndarray], *, steps: int, tokens: int, ahead: int) -> None:
        self.workers, self.prompts, self.steps, self.tokens = workers, prompts, steps, tokens
        self.slots = anyio.Semaphore(SIZE * (1 + ahead))
        send, receive = anyio.create_memory_object_stream[tuple[Request, Completion]](SIZE * (steps + 1))
        self.send, self.receive = send, receive
        self.version = 0
        self.train_s = 0.0
        self.lags: list[float] = []

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._train)
            for number in range(SIZE * self.steps):
                await self.slots.acquire()
                group.start_soon(self._generate, number)

    async def _generate(self, number: int) -> None:
        prompt = self.prompts[number // MEMBERS % len(self.prompts)]
        sampling = Sampling(max_tokens=self.tokens)
        request = Request(id=str(number), tokens=prompt, sampling=sampling, seed=number, group=str(number // MEMBERS))
        self.send.send_nowait((request, await self.workers.engine.generate(request)))

    async def _train(self) -> None:
        for step in range(self.steps):
            done = [await self.receive.receive() for _ in range(SIZE)]
            start = time.perf_counter()
            rows = batch(done, step, self.version)
            self.lags.append(float(rows.lags().mean()))
            await self.workers.learner.step(rows)
            self.train_s += time.perf_counter() - start
            await self.workers.sync.flip(await stage(self.workers.sync, self.version + 1), "swap")
            self.version += 1
            for _ in done:
                self.slots.release()


def batch(done: list[tuple[Request, Completion]], step: int, version: int) -> Batch:
    """Rows with advantages of alternating sign."""
    rows = []
    for request, completion in sorted(done, key=lambda pair: int(pair[0].id)):
        before, after = len(request.tokens), len(completion.tokens)
        zeros = np.zeros(before, np.float32)
        sign = 1.0 if int(request.id) % 2 else -1.0
        rows.append(
            Row(
                group=int(request.group),
                tokens=np.concatenate([request.tokens, completion.tokens]),
                loss_mask=np.arange(before + after) >= before,
                logprobs=np.concatenate([zeros, completion.logprobs]),
                versions=np.concatenate([zeros.astype(np.int32), completion.versions]),
                advantages=np.concatenate([zeros, np.full(after, sign, np.float32)]),
            )
        )
    sampled = sum(len(c.tokens) for _, c in done)
    return Batch(step=step, version=version, rows=tuple(rows), sequences=len(rows), tokens=sampled)


def cpu_seconds() -> float:
    """Processor time of all children so far."""
    total, tick = 0.0, os.sysconf("SC_CLK_TCK")
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / tick
    return total


def machine_seconds() -> float:
    """Processor time of everything on this machine so far."""
    user, nice, system, _, _, irq, softirq = (int(n) for n in Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


async def measure(
    config: RunConfig, setting: str, prompts: list[np.ndarray], *, steps: int, tokens: int
) -> dict[str, float]:
    """Figures of one setting; one batch goes ahead unmeasured."""
    _, place = SETTINGS[setting]
    ahead = 0 if setting == "sequential" else 1
    async with ProcsRuntime(place=place).open(config) as workers:
        await workers.sync.flip(await stage(workers.sync, 0), "swap")
        await Work(workers, prompts, steps=1, tokens=tokens, ahead=0).run()
        before, cpu, everything = await workers.engine.stats(), cpu_seconds(), machine_seconds()
        work = Work(workers, prompts, steps=steps, tokens=tokens, ahead=ahead)
        work.version = before.version
        start = time.perf_counter()
        await work.run()
        total_s = time.perf_counter() - start
        after = await workers.engine.stats()
        busy, everything = cpu_seconds() - cpu, machine_seconds() - everything
    capacity_s = total_s * (os.cpu_count() or 1)
    return {
        "total_s": total_s,
        "samples_per_s": SIZE * steps / total_s,
        "engine_tok_per_s": (after.decode_tokens - before.decode_tokens) / total_s,
        "engine_busy": (after.busy_s - before.busy_s) / total_s,
        "learner_busy": work.train_s / total_s,
        "lag": sum(work.lags) / steps,
        "cpu": busy / capacity_s,
        "others": (everything - busy) / capacity_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    encode = AutoTokenizer.from_pretrained(given.model)
    texts = [f"2 + 3 = 5\n6 + 1 = 7\n{n % 9 + 1} + {n * 7 % 9 + 1} =" for n in range(16)]
    prompts = [np.array(encode(text)["input_ids"], np.int32) for text in texts]
    rows: list[dict[str, Any]] = []
    for number, tokens, setting in product(range(given.rounds), given.tokens, given.settings):
        config = RunConfig(model=Model(path=str(given.model)), runtime=Procs(placement=SETTINGS[setting][0]))
        figures = anyio.run(lambda c=config, s=setting, t=tokens: measure(c, s, prompts, steps=given.steps, tokens=t))
        rows.append({"round": number, "tokens": tokens, "setting": setting, **figures})
        values = "  ".join(f"{k} {v:7.3f}" for k, v in figures.items())
        print(f"{tokens:4d} tokens  {setting:20}{values}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1) + "\n")
    show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    """Medians over the rounds, and of the ratios to ``shared`` within a round."""
    seconds = {(row["tokens"], row["setting"], row["round"]): row["total_s"] for row in rows}
    for tokens, setting in dict.fromkeys((row["tokens"], row["setting"]) for row in rows):
        rounds = sorted({number for _, _, number in seconds})
        took_s = [seconds[tokens, setting, number] for number in rounds]
        line = (
            f"{tokens:4d} tokens  {setting:20}median {median(took_s):7.2f} s ({min(took_s):.2f} to {max(took_s):.2f})"
        )
        if (tokens, "shared", 0) in seconds:
            ratios = [seconds[tokens, setting, number] / seconds[tokens, "shared", number] for number in rounds]
            line += f"  of shared {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(line)


if __name__ == "__main__":
    main()
