"""Cores, threads and priority of the workers on one host, from the placement that a config names. Starts nothing.

``shared``    both workers may use every core; the operating system divides them.
``pinned``    the cores are split. Cores of an idle side stay idle: not work-conserving, kept for comparison.
``priority``  shared, and one side yields to the other wherever both have work. Idle time of either serves the other.

Workers run a little nicer than the controller, which does next to nothing but must answer at once. Threads that wait for
each other sleep instead of spinning: a spinning thread takes the core the other worker needs. docs/reference/runtimes.md says how
each choice was measured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from corrente.common.spawn import WorkerPlace

BASE_NICE = 1
YIELDING_NICE = 10
PAST_THE_CACHE_BYTES = 1 << 17
"""Copies from this size on bypass the cache: a publish moves weight matrices, some of a fraction of a megabyte, and reads none
of them again. The C library's own threshold is of the order of the whole cache."""
_PAST_THE_CACHE = "glibc.cpu.x86_non_temporal_threshold"


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """The places of both sides; replicas of the engine ``share`` theirs."""

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
    """The place of replica ``index`` of ``among`` that share one. All may use its cores; its threads are divided, for together
    they decode fastest with as many threads as there are cores. Each gets at least one."""
    threads, left = divmod(place.threads, among)
    return msgspec.structs.replace(place, threads=max(1, threads + (index < left)))


def computing_place(place: WorkerPlace, inherited: Mapping[str, str]) -> WorkerPlace:
    """A place with the environment variables of a worker that computes: threads sleep while they wait, and copies the size of a
    weight matrix bypass the cache. A smaller OMP_NUM_THREADS in ``inherited``, the user's environment, stands."""
    asked = inherited.get("OMP_NUM_THREADS", "")
    threads = min(place.threads, int(asked)) if asked.isdecimal() and int(asked) > 0 else place.threads
    tunables = [setting for setting in inherited.get("GLIBC_TUNABLES", "").split(":") if setting]
    if not any(setting.startswith(_PAST_THE_CACHE) for setting in tunables):
        tunables.append(f"{_PAST_THE_CACHE}={PAST_THE_CACHE_BYTES}")
    variables = {
        "GLIBC_TUNABLES": ":".join(tunables),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return msgspec.structs.replace(place, threads=threads, variables={**variables, **place.variables})
