"""Every buffer, staleness policy and inflight policy there is, held to its contract, under both event loops."""

from __future__ import annotations

from types import ModuleType

import anyio
import msgspec
import pytest

from corrente import buffer, inflight, runtime
from corrente.buffer import double, none
from corrente.buffer.base import BufferSize
from corrente.buffer.stream import StreamBuffer
from corrente.buffer.window import WindowBuffer
from corrente.common.imports import load_object
from corrente.config import Double, NoBuffer, Stream, Window, schema
from corrente.entrypoints.assemble import build_buffer, build_inflight
from corrente.inflight.policies import (
    BarrierPolicy,
    CancelPolicy,
    DrainPolicy,
    OldWeightsPolicy,
    RecomputePolicy,
    ResumePolicy,
    SwapPolicy,
)
from corrente.staleness.policies import Accept, ByVersion
from corrente.testing import check_buffer, check_inflight, check_staleness, run_virtual
from corrente.testing.world import LANDINGS, flow

SIZE = BufferSize(groups_per_version=3, slots=9, window=2, generating=6)
BUFFERS = {
    "none": lambda: none.build(SIZE),
    "double": lambda: double.build(SIZE),
    "window of one": lambda: WindowBuffer(slots=5, window=1),
    "window of two": lambda: WindowBuffer(slots=4, window=2),
    "window of all": lambda: WindowBuffer(slots=6, window=6),
    "stream": lambda: StreamBuffer(inflight=4),
    "resumed window": lambda: WindowBuffer(slots=4, window=2, first_ticket=1000),
}


@pytest.mark.parametrize(("axis", "folder"), [("buffer", buffer), ("inflight", inflight), ("runtime", runtime)])
def test_table_of_an_axis_names_an_implementation_for_every_kind(axis: str, folder: ModuleType) -> None:
    assert set(folder.KINDS) == set(schema.sections()[axis])
    assert all(callable(load_object(path)) for path in folder.KINDS.values())


@pytest.mark.parametrize(
    ("section", "slots", "generating"), [(NoBuffer(), 4, 4), (Double(), 8, 8), (Window(), 12, 12), (Stream(), 0, 4)]
)
def test_buffer_has_the_slots_that_the_config_implies(section, slots: int, generating: int) -> None:
    """P = 2, k = 2, S = 2: Q = 4 groups a version."""
    config = msgspec.structs.replace(flow(prompts=2, ahead=2, every=2), buffer=section)
    found = build_buffer(config, first_ticket=7)

    async def admitted() -> list[int]:
        tickets = []
        with anyio.move_on_after(1):
            while True:
                tickets.append((await found.reserve()).id)
        return tickets

    assert found.occupancy().slots == slots
    assert run_virtual(admitted) == list(range(7, 7 + generating))


@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_keep_the_contract(kind: str) -> None:
    anyio.run(check_buffer, BUFFERS[kind])
    for seed in range(5):
        run_virtual(check_buffer, BUFFERS[kind], seed=seed, limit_s=1000)


INFLIGHT = {
    "swap": (SwapPolicy, {"mode": "swap"}),
    "recompute": (RecomputePolicy, {"mode": "recompute"}),
    "resume": (ResumePolicy, {"mode": "swap", "waits_for": "interrupted"}),
    "drain": (DrainPolicy, {"mode": "swap", "waits_for": "requests"}),
    "barrier": (BarrierPolicy, {"mode": "swap", "waits_for": "groups"}),
    "cancel": (lambda: CancelPolicy(max_age=2), {"mode": "swap", "gives_up_before": 5}),
    "snapshot": (OldWeightsPolicy, {"mode": "snapshot"}),
}


@pytest.mark.parametrize("kind", INFLIGHT)
def test_inflight_policies_keep_the_contract(kind: str) -> None:
    make, promise = INFLIGHT[kind]
    anyio.run(lambda: check_inflight(make, **promise))
    for seed in range(5):
        run_virtual(lambda: check_inflight(make, **promise), seed=seed, limit_s=1000)


def test_every_inflight_policy_is_held_to_its_contract() -> None:
    assert {type(make()) for make, _ in INFLIGHT.values()} == {type(build_inflight(flow(inflight=x))) for x in LANDINGS}


@pytest.mark.parametrize(
    "make",
    [
        Accept,
        ByVersion,
        lambda: ByVersion(reject=0),
        lambda: ByVersion(reject=2),
        lambda: ByVersion(mask=1),
        lambda: ByVersion(mask=3, reject=2),
    ],
)
def test_staleness_policies_keep_the_contract(make) -> None:
    check_staleness(make)
