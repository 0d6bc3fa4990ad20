"""The embedded engine as an Engine: the conformance suite, on both event loops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest
import torch
import trio.testing
from tests.numerics.engine_tiny import CONTEXT, tiny

from corrente.engine.embedded.core import EmbeddedCore
from corrente.engine.embedded.driver import EmbeddedEngine
from corrente.errors import GenerationError
from corrente.sync import pack
from corrente.sync.base import Update
from corrente.testing import EngineCase, check_engine, samples
from corrente.testing.engines import stage_in_place

TICK_S = 0.005
"""The engine rests this long after a step, so that the suite can look at it while it decodes. asyncio looks for idle tasks every
0.1 s, which is a quarter of a long request; trio's clock is virtual and jumps."""
PROMPT = np.arange(20, 30, dtype=np.int32)


@asynccontextmanager
async def engine_case(kind: str, path: str) -> AsyncIterator[EngineCase]:
    where, model, _ = tiny(kind)
    core = EmbeddedCore(model=where, path=path)
    layout = core.layout()
    buffers = [torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2)]
    core.attach(buffers)
    engine, weights = EmbeddedEngine(core), model.state_dict

    async def stage(version: int) -> Update:
        return await stage_in_place(engine, version, write=lambda slot: pack.write(layout, weights(), buffers[slot]))

    async def broken(version: int) -> Update:
        return Update(version=version, slot=9)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: engine.run(rest=lambda: anyio.sleep(TICK_S)))
        yield EngineCase(
            engine=engine, stage=stage, broken=broken, prompt=PROMPT, context=CONTEXT, long_tokens=80, tick_s=TICK_S
        )
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(("kind", "path"), [("llama", "lean"), ("gpt2", "hf")])
def test_embedded_engine_conforms_under_a_virtual_clock(kind: str, path: str):
    clock = trio.testing.MockClock(autojump_threshold=0)
    anyio.run(lambda: check_engine(lambda: engine_case(kind, path)), backend="trio", backend_options={"clock": clock})


@pytest.mark.slow
def test_embedded_engine_conforms_on_asyncio():
    anyio.run(lambda: check_engine(lambda: engine_case("llama", "lean")), backend="asyncio")


def test_refused_request_costs_only_its_own_call():
    async def main() -> tuple[Any, int]:
        async with engine_case("llama", "lean") as case:
            await case.engine.apply(await case.stage(0), "swap")
            full = samples.request(id="full", tokens=np.resize(PROMPT, CONTEXT))
            with pytest.raises(GenerationError) as refusal:
                await case.engine.generate(full)
            done = await case.engine.generate(samples.request(id="ok", tokens=PROMPT, max_tokens=3))
            return refusal.value, len(done.tokens)

    error, count = anyio.run(main)
    assert "no room" in str(error)
    assert count == 3
