"""What a publish costs: the copy into shared memory against a plain memcpy of the same bytes, and the engine's pause.

    python benchmarks/publish.py MODEL [--threads 2] [--repeats 9] [--json FILE]

Part 1, one process with a worker's environment, nothing else running: writing all weights into the spare slot in the engine's
layout, against torch.copy_ and numpy.copyto (the C library's memcpy) of as many bytes between buffers whose pages exist, all
with the same number of threads, alternating. The figure is the median of the ratios within a round. Part 2, the real runtime:
publishes while the engine decodes, and the pause it measures around the flip, first and then every time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import numpy as np

from corrente.config import Embedded, Model, Procs, RunConfig
from corrente.runtime.placement import Place, available_cpus, environment
from corrente.runtime.procs import ProcsRuntime
from corrente.types import Request, Sampling


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copies(model: Path, *, threads: int, repeats: int) -> dict[str, float]:
    """Seconds and ratios of a stage and of two memcpys of the same bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    from corrente.engine.embedded.core import EngineCore
    from corrente.runtime.cores import attach
    from corrente.sync import pack
    from corrente.sync.memory import SharedMemory

    torch.set_num_threads(threads)
    layout = EngineCore(model=model).layout()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    params = {name: tensor.clone() for name, tensor in loaded.items()}
    memory = SharedMemory()
    memory.reserve(layout.nbytes)
    slots = attach(memory.fd, layout)
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


async def publishes(model: Path, *, repeats: int, sequences: int) -> dict[str, float]:
    """Publishes through the runtime while ``sequences`` are being decoded."""
    config = RunConfig(
        model=Model(path=str(model)), runtime=Procs(placement="shared"), engine=Embedded(max_sequences=sequences)
    )
    stages, pauses = [], []
    async with ProcsRuntime().open(config) as workers:

        async def decode(number: int) -> None:
            tokens = np.arange(100, 116, dtype=np.int32)
            sampling = Sampling(max_tokens=10**6)
            await workers.engine.generate(Request(id=str(number), tokens=tokens, sampling=sampling, seed=number))

        async with anyio.create_task_group() as group:
            for version in range(repeats + 1):
                update = await workers.sync.stage(version)
                pauses.append((await workers.sync.flip(update, "swap")).pause_s * 1e3)
                stages.append(workers.sync.stats()["publish/bandwidth_gb_s"])
                if version == 0:
                    for number in range(sequences):
                        group.start_soon(decode, number)
                await workers.engine.stats()
            decoded = (await workers.engine.stats()).decode_tokens
            group.cancel_scope.cancel()
    return {
        "busy_stage_gb_s": statistics.median(stages[1:]),
        "first_pause_ms": pauses[0],
        "pause_ms_median": statistics.median(pauses[1:]),
        "pause_ms_max": max(pauses[1:]),
        "tokens_decoded_meanwhile": float(decoded),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--copies-only", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.copies_only:
        sys.stdout.write(json.dumps(copies(given.model, threads=given.threads, repeats=given.repeats)))
        return
    place = Place(cpus=available_cpus(), threads=given.threads, nice=0)
    command = [sys.executable, *sys.argv, "--copies-only"]
    done = subprocess.run(command, env=environment(place, os.environ), stdout=subprocess.PIPE, check=True)
    figures = json.loads(done.stdout)
    figures |= anyio.run(lambda: publishes(given.model, repeats=given.repeats, sequences=given.sequences))
    for name, value in figures.items():
        sys.stdout.write(f"{name:28} {value:14.4g}\n")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
