"""Which cores, how many threads and what priority a worker gets on one host. Decided from intent alone; starts nothing.

``shared``    both workers may use every core; the operating system divides them.
``pinned``    the cores are split. An idle side's cores stay idle: not work-conserving, here to be compared with.
``priority``  shared, and one side yields to the other wherever both have work. Idle time of either serves the other.

Workers run a little nicer than the controller, which does next to nothing but must answer at once. Threads that wait for
each other sleep instead of spinning: a spinning thread takes the core the other worker needs. What each choice costs is
measured in docs/reference/runtimes.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

BASE_NICE = 1
YIELDING_NICE = 10
PAST_THE_CACHE_BYTES = 1 << 17
"""Copies from this size on bypass the cache: a publish moves weight matrices, some of a fraction of a megabyte, and reads none
of them again. The C library's own threshold is of the order of the whole cache."""
_PAST_THE_CACHE = "glibc.cpu.x86_non_temporal_threshold"


class WorkerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where one worker runs: the cores it may use, its thread count, and how far it steps back for others."""

    cpus: tuple[int, ...]
    threads: int
    nice: int


class Places(msgspec.Struct, frozen=True, kw_only=True):
    engine: WorkerPlace
    learner: WorkerPlace


def available_cpus() -> tuple[int, ...]:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def places(placement: Literal["shared", "pinned", "priority"], cpus: Sequence[int]) -> Places:
    """Places of engine and learner on ``cpus``. Pinned gives the engine the larger half; one core is always shared."""
    every = tuple(cpus)
    half = -(-len(every) // 2)
    ours, theirs = (every[:half], every[half:]) if placement == "pinned" and len(every) > 1 else (every, every)
    yielding = YIELDING_NICE if placement == "priority" else BASE_NICE
    return Places(
        engine=WorkerPlace(cpus=ours, threads=len(ours), nice=BASE_NICE),
        learner=WorkerPlace(cpus=theirs, threads=len(theirs), nice=yielding),
    )


def share(place: WorkerPlace, *, among: int, index: int) -> WorkerPlace:
    """The place of replica ``index`` of ``among`` that share one: its cores are open to all of them, its threads are divided, for
    as many threads as cores are what decodes fastest together. Nobody gets less than one."""
    threads, left = divmod(place.threads, among)
    return msgspec.structs.replace(place, threads=max(1, threads + (index < left)))


def environment(place: WorkerPlace, inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment of a worker: ``inherited``, with thread pools sized to its place and made to sleep while they wait, and
    copies the size of a weight matrix made past the cache. A smaller OMP_NUM_THREADS of the user's stands.
    """
    asked = inherited.get("OMP_NUM_THREADS", "")
    threads = str(min(place.threads, int(asked)) if asked.isdecimal() and int(asked) > 0 else place.threads)
    tunables = [wish for wish in inherited.get("GLIBC_TUNABLES", "").split(":") if wish]
    if not any(wish.startswith(_PAST_THE_CACHE) for wish in tunables):
        tunables.append(f"{_PAST_THE_CACHE}={PAST_THE_CACHE_BYTES}")
    return {
        **inherited,
        "GLIBC_TUNABLES": ":".join(tunables),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
