"""An engine with one weight slot: it stands still while that is written, and goes on as if it had had two."""

from __future__ import annotations

import anyio
import numpy as np
import pytest
from tests.numerics.tiny_engine import Served, tiny

from corrente.data.types import ApplyMode, Completion, Request, Sampling
from corrente.engine.embedded.async_engine import EmbeddedEngine
from corrente.engine.embedded.core import EmbeddedCore
from corrente.errors import GenerationError, SyncError
from corrente.sync import pack
from corrente.sync.base import Update, stage
from corrente.sync.inproc import InprocSync
from corrente.sync.weight_slots import allocate_slots

PROMPT = np.arange(20, 50, dtype=np.int32)
LONG = Sampling(max_tokens=24)


def _played(kind: str, path: str, mode: ApplyMode, *, slots: int) -> dict[str, Completion]:
    """Two sequences over a flip, and one that is asked for while it is prepared."""
    where, model, other = tiny(kind)
    served = Served(where, model, kind=path, slots=slots)
    for seed, name in enumerate("ab"):
        served.submit(PROMPT, LONG, name=name, seed=seed)
    for _ in range(7):
        served.core.step()
    if slots == 1:
        served.core.pause()
        served.submit(PROMPT[:9], LONG, name="c", seed=2)
        assert served.core.idle
        assert served.core.step() == []
        assert {len(partial.tokens) for partial in served.core.partial_completions(["a", "b"]).values()} == {8}
        with pytest.raises(GenerationError, match="weights are being written"):
            served.core.score(PROMPT)
    served.flip(other, 1, mode)
    if slots == 2:
        served.submit(PROMPT[:9], LONG, name="c", seed=2)
    assert not served.core.idle
    return served.finish()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize(("kind", "path"), [("llama", "lean"), ("gpt2", "hf")])
def test_one_slot_samples_what_two_slots_sample(kind: str, path: str, mode: ApplyMode):
    one, two = (_played(kind, path, mode, slots=slots) for slots in (1, 2))
    for name in "abc":
        assert one[name].tokens.tolist() == two[name].tokens.tolist()
        assert one[name].logprobs.tolist() == two[name].logprobs.tolist()
        assert one[name].spans == two[name].spans
    assert [span.version for span in one["a"].spans] == [0, 1]
    assert [span.version for span in one["c"].spans] == [1]


def test_paused_engine_ends_requests_that_are_aborted_and_stays_paused_when_it_cannot_flip():
    where, model, other = tiny("llama")
    served = Served(where, model, slots=1)
    served.submit(PROMPT, LONG, name="a")
    served.submit(PROMPT, LONG, name="b")
    for _ in range(3):
        served.core.step()
    served.core.pause()
    served.core.abort(["a"])
    ((name, partial),) = served.core.step()
    assert isinstance(partial, Completion)
    assert (name, len(partial.tokens), partial.finish_reason) == ("a", 4, "abort")
    pack.write(served.layout, other.state_dict(), served.buffers[0])
    with pytest.raises(SyncError, match="keeps the old weights for live sequences"):
        served.core.apply(Update(version=1, slot=0), "snapshot")
    with pytest.raises(SyncError, match="buffer 1 is none that the engine was given"):
        served.core.apply(Update(version=1, slot=1), "swap")
    assert served.core.idle
    served.core.apply(Update(version=1, slot=0), "swap")
    assert [span.version for span in served.finish()["b"].spans] == [0, 1]


def test_publish_in_one_process_pauses_generation_from_the_export_to_the_flip():
    """Half the memory for weights: the learner writes where the engine looks, and a failed export leaves it standing still."""

    async def main() -> Completion:
        where, model, other = tiny("llama")
        core = EmbeddedCore(model=where)
        buffers = allocate_slots(core.layout(), count=1)
        core.attach_buffers(buffers)
        engine = EmbeddedEngine(core)
        weights = dict(model.state_dict())
        sync = InprocSync(engine=engine, layout=core.layout(), buffers=buffers, tensors=lambda: weights)
        done: list[Completion] = []

        async def ask() -> None:
            done.append(await engine.generate(Request(id="a", tokens=PROMPT, sampling=Sampling(max_tokens=60))))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            await sync.flip(await stage(sync, 0), "swap")
            async with anyio.create_task_group() as asking:
                asking.start_soon(ask)
                while (await engine.stats()).decode_tokens < 5:
                    await anyio.lowlevel.checkpoint()
                name = core.layout().slabs[0].sources[0]
                kept = weights.pop(name)
                with pytest.raises(SyncError, match=name):
                    await sync.export(1)
                before = (await engine.stats()).decode_tokens
                for _ in range(50):
                    await anyio.lowlevel.checkpoint()
                assert (await engine.stats()).decode_tokens == before
                weights[name] = kept
                weights.update(other.state_dict())
                await sync.flip(await stage(sync, 1), "swap")
            tasks.cancel_scope.cancel()
        return done[0]

    done = anyio.run(main)
    assert [span.version for span in done.spans] == [0, 1]
    assert len(done.tokens) == 60
