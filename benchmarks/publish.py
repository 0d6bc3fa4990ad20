"""What a publish costs, for every transport: bytes, time, the engine's pause, and bandwidth against a memcpy of the same bytes.

    python benchmarks/publish.py MODEL [--transport shm disk ...] [--threads 2] [--repeats 9] [--json FILE]

Part 1, one process with a worker's environment, nothing else running: writing all weights into the spare slot in the engine's
layout, against torch.copy_ and numpy.copyto (the C library's memcpy) of as many bytes between buffers whose pages exist, all
with the same number of threads, alternating. The figure is the median of the ratios within a round. Part 2, the real runtime,
once for each transport: the learner takes a step, and its weights are published while the engine decodes. Publishes alternate
between two orders. In one the learner waits until every engine has the version, as it would without a delivery of its own
(waited_s). In the other it waits for the export alone (export_s) and takes its next step while the version is delivered and
flipped to: what that step takes beside a delivery (step_beside_s) stands against what it takes alone (step_alone_s), for the two
share the machine. The pause is what the engine measures around the flip. "+delta" ships what changed, "+bf16" runs the engine in
bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from corrente import config as c
from corrente.common.spawn import WorkerPlace
from corrente.data.types import Batch, Request, Row, Sampling
from corrente.runtime.base import Workers
from corrente.runtime.placement import available_cpus, computing_place
from corrente.runtime.procs import ProcsRuntime
from corrente.sync.base import stage

KINDS: dict[str, Callable[..., Any]] = {"shm": c.Shm, "disk": c.Disk, "http": c.Http, "collective": c.Collective}
TRANSPORTS = ("shm", "disk", "http", "collective", "disk+delta+bf16", "http+delta+bf16")


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copies(model: Path, *, threads: int, repeats: int) -> dict[str, float]:
    """Seconds and ratios of a stage and of two memcpys of the same bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    from corrente.engine.embedded.core import EmbeddedCore
    from corrente.sync import pack
    from corrente.sync.shared_memory import SharedMemory
    from corrente.sync.weight_slots import map_slots

    torch.set_num_threads(threads)
    layout = EmbeddedCore(model=model).layout()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    params = {name: tensor.clone() for name, tensor in loaded.items()}
    memory = SharedMemory()
    memory.reserve(layout.nbytes)
    slots = map_slots(layout, fd=memory.fd)
    memory.close()
    source, target = (torch.ones(layout.nbytes, dtype=torch.uint8) for _ in range(2))
    rounds = []
    for number in range(repeats + 1):
        stage_s = timed(lambda n=number: pack.write(layout, params, slots[n % 2]))
        torch_s = timed(lambda: target.copy_(source))
        numpy_s = timed(lambda: np.copyto(target.numpy(), source.numpy()))
        rounds.append((stage_s, torch_s, numpy_s))
    rounds = rounds[1:]
    gb = layout.nbytes / 1e9
    return {
        "bytes": float(layout.nbytes),
        "stage_gb_s": gb / statistics.median(stage for stage, _, _ in rounds),
        "torch_copy_gb_s": gb / statistics.median(copy for _, copy, _ in rounds),
        "numpy_copy_gb_s": gb / statistics.median(copy for _, _, copy in rounds),
        "stage_over_torch_copy": statistics.median(copy / stage for stage, copy, _ in rounds),
        "stage_over_numpy_copy": statistics.median(copy / stage for stage, _, copy in rounds),
        "transposed_slabs": float(sum(slab.transpose for slab in layout.slabs)),
    }


def configured(model: Path, transport: str, folder: str, given: argparse.Namespace) -> c.RunConfig:
    kind, *extras = transport.split("+")
    delta: dict[str, Any] = {"payload": "delta", "anchor_every": 10**6} if "delta" in extras else {}
    return c.RunConfig(
        run=c.Run(dir=folder, steps=1000),
        model=c.Model(path=str(model), dtype="bfloat16" if "bf16" in extras else "float32"),
        runtime=c.Procs(placement="shared"),
        engine=c.Embedded(max_sequences=max(given.sequences, 1)),
        sync=KINDS[kind](**delta),
        learner=c.LearnerConfig(lr=given.lr),
        pool=c.Pool(replicas=given.replicas),
    )


async def batch(workers: Workers, step: int, *, length: int = 24) -> Batch:
    """Two random completions, one better than the other, with the log-probs they have now: the ratio is about 1."""
    random = np.random.default_rng(step)
    sampled = np.arange(length) >= length // 2
    rows: list[Row] = []
    for advantage in (1.0, -1.0):
        tokens = random.integers(10, 400, length).astype(np.int32)
        logprobs = np.append(np.float32(0), (await workers.engine.score(tokens)).logprobs)
        rows.append(
            Row(
                group=0,
                tokens=tokens,
                loss_mask=sampled,
                logprobs=np.where(sampled, logprobs, 0.0).astype(np.float32),
                versions=np.where(sampled, step - 1, 0).astype(np.int32),
                advantages=np.full(length, advantage, np.float32),
            )
        )
    return Batch(step=step, version=step - 1, rows=tuple(rows), sequences=2, tokens=length)


async def publishes(config: c.RunConfig, *, repeats: int, sequences: int) -> dict[str, float]:
    """Publishes through the runtime while ``sequences`` are being decoded, ``repeats`` in each order."""
    found: list[dict[str, float]] = []
    alone_s: list[float] = []
    beside_s: list[float] = []
    waited_s: list[float] = []
    async with ProcsRuntime().open(config) as workers:

        async def decode(number: int) -> None:
            tokens = np.arange(100, 116, dtype=np.int32)
            sampling = Sampling(max_tokens=10**6)
            await workers.engine.generate(Request(id=str(number), tokens=tokens, sampling=sampling, seed=number))

        async def step(version: int, took_s: list[float]) -> None:
            given = await batch(workers, version)
            start = time.perf_counter()
            await workers.learner.step(given)
            took_s.append(time.perf_counter() - start)

        async def bring(version: int) -> None:
            await workers.sync.flip(await workers.sync.deliver(version), "swap")

        async with anyio.create_task_group() as group:
            await workers.sync.flip(await stage(workers.sync, 0), "swap")
            first = dict(workers.sync.stats())
            for number in range(sequences):
                group.start_soon(decode, number)
            await step(1, [])
            for version in range(1, 2 * repeats + 1, 2):
                start = time.perf_counter()
                update = await stage(workers.sync, version)
                waited_s.append(time.perf_counter() - start)
                await workers.sync.flip(update, "swap")
                await step(version + 1, alone_s)
                await workers.sync.export(version + 1)
                given = await batch(workers, version + 2)
                async with anyio.create_task_group() as both:
                    both.start_soon(bring, version + 1)
                    start = time.perf_counter()
                    await workers.learner.step(given)
                    beside_s.append(time.perf_counter() - start)
                found.append(dict(workers.sync.stats()))
            decoded = (await workers.engine.stats()).decode_tokens
            group.cancel_scope.cancel()
    export_s = statistics.median(f["publish/export_s"] for f in found)
    return {
        "bytes": statistics.median(f["publish/bytes"] for f in found),
        "waited_s": statistics.median(waited_s),
        "export_s": export_s,
        "waited_over_export": statistics.median(
            waited / f["publish/export_s"] for waited, f in zip(waited_s, found, strict=True)
        ),
        "copy_s": statistics.median(f["publish/copy_s"] for f in found),
        "deliver_s": statistics.median(f["publish/deliver_s"] for f in found),
        "stage_s": statistics.median(f["publish/stage_s"] for f in found),
        "step_alone_s": statistics.median(alone_s),
        "step_beside_s": statistics.median(beside_s),
        "gb_s": statistics.median(f["publish/bandwidth_gb_s"] for f in found),
        "first_pause_ms": first["publish/pause_ms"],
        "pause_ms_median": statistics.median(f["publish/pause_ms"] for f in found),
        "pause_ms_max": max(f["publish/pause_ms"] for f in found),
        "tokens_decoded_meanwhile": float(decoded),
    }


def tell(part: str, values: dict[str, float]) -> None:
    for name, value in values.items():
        sys.stdout.write(f"{part:18} {name:28} {value:14.4g}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--transport", nargs="+", default=list(TRANSPORTS), help=f"any of {', '.join(TRANSPORTS)}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--copies-only", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.copies_only:
        sys.stdout.write(json.dumps(copies(given.model, threads=given.threads, repeats=given.repeats)))
        return
    place = computing_place(WorkerPlace(cpus=available_cpus(), threads=given.threads), os.environ)
    command = [sys.executable, *sys.argv, "--copies-only"]
    done = subprocess.run(command, env={**os.environ, **place.environment()}, stdout=subprocess.PIPE, check=True)
    figures: dict[str, dict[str, float]] = {"copies": json.loads(done.stdout)}
    tell("copies", figures["copies"])
    for transport in given.transport:
        with tempfile.TemporaryDirectory() as folder:
            config = configured(given.model, transport, folder, given)
            measured = anyio.run(lambda conf=config: publishes(conf, repeats=given.repeats, sequences=given.sequences))
        measured["over_memcpy"] = measured["gb_s"] / figures["copies"]["numpy_copy_gb_s"]
        figures[transport] = measured
        tell(transport, measured)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
