"""Placement is arithmetic on a set of cores."""

from __future__ import annotations

import pytest

from corrente.common.spawn import WorkerPlace
from corrente.runtime.placement import BASE_NICE, computing_place, places, share


def test_shared_gives_both_every_core():
    found = places("shared", (0, 1, 5))
    assert found.engine == found.learner == WorkerPlace(cpus=(0, 1, 5), threads=3, nice=BASE_NICE)


@pytest.mark.parametrize(
    ("cpus", "engine", "learner"),
    [
        ((0, 1), (0,), (1,)),
        ((2, 3, 4), (2, 3), (4,)),
        (tuple(range(8)), (0, 1, 2, 3), (4, 5, 6, 7)),
        ((3,), (3,), (3,)),
    ],
)
def test_pinned_splits_the_cores_and_the_threads_with_them(cpus, engine, learner):
    found = places("pinned", cpus)
    assert (found.engine.cpus, found.learner.cpus) == (engine, learner)
    assert (found.engine.threads, found.learner.threads) == (len(engine), len(learner))
    assert found.engine.nice == found.learner.nice


def test_priority_shares_all_cores_and_lets_one_side_go_first():
    found = places("priority", (0, 1))
    assert found.engine.cpus == found.learner.cpus == (0, 1)
    assert found.engine.threads == found.learner.threads == 2
    assert found.engine.nice != found.learner.nice
    assert min(found.engine.nice, found.learner.nice) == BASE_NICE


@pytest.mark.parametrize(("asked", "threads"), [("", "4"), ("2", "2"), ("9", "4"), ("0", "4"), ("many", "4")])
def test_place_sizes_thread_pools_and_keeps_the_users_smaller_number(asked: str, threads: str):
    place = WorkerPlace(cpus=(0, 1, 2, 3), threads=4, nice=1)
    found = computing_place(place, {"OMP_NUM_THREADS": asked}).environment()
    assert found["OMP_NUM_THREADS"] == found["MKL_NUM_THREADS"] == found["OPENBLAS_NUM_THREADS"] == threads
    assert found["OMP_WAIT_POLICY"] == "passive"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "glibc.cpu.x86_non_temporal_threshold=131072"),
        ("glibc.malloc.check=1", "glibc.malloc.check=1:glibc.cpu.x86_non_temporal_threshold=131072"),
        ("glibc.cpu.x86_non_temporal_threshold=0x100000", "glibc.cpu.x86_non_temporal_threshold=0x100000"),
    ],
)
def test_place_adds_to_the_users_tunables(given: str, expected: str):
    place = WorkerPlace(cpus=(0,), threads=1, nice=1)
    assert computing_place(place, {"GLIBC_TUNABLES": given}).variables["GLIBC_TUNABLES"] == expected


@pytest.mark.parametrize(
    ("threads", "replicas", "each"), [(2, 2, [1, 1]), (8, 3, [3, 3, 2]), (2, 1, [2]), (2, 5, [1, 1, 1, 1, 1])]
)
def test_replicas_share_the_cores_and_divide_the_threads(threads: int, replicas: int, each: list[int]):
    place = WorkerPlace(cpus=tuple(range(threads)), threads=threads, nice=3)
    shares = [share(place, among=replicas, index=index) for index in range(replicas)]
    assert [found.threads for found in shares] == each
    assert all((found.cpus, found.nice) == (place.cpus, place.nice) for found in shares)
