"""Two versions in use at once: live sequences finish under the weights they began with, new ones use the newest."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.numerics.engine_tiny import VOCABULARY, Served, tiny

from corrente.data.types import Completion, Sampling, Span, Tokens
from corrente.engine.embedded.kv import KVCache
from corrente.engine.embedded.rows import LiveRows
from corrente.engine.embedded.sequence import LiveSequence
from corrente.engine.embedded.weights import EmbeddedWeights
from corrente.errors import SyncError
from corrente.sync import pack
from corrente.sync.base import Update
from corrente.testing import samples

PROMPT = np.arange(20, 50, dtype=np.int32)
PATHS = [("llama", "lean"), ("qwen3", "lean"), ("llama", "hf"), ("gpt2", "hf")]
both_paths = pytest.mark.parametrize(("kind", "path"), PATHS)
LONG = Sampling(max_tokens=30)


def serve(kind: str = "llama", path: str = "auto", **options: Any) -> tuple[Served, Any]:
    """An engine that samples from version 0, and another model of its architecture."""
    where, model, other = tiny(kind)
    return Served(where, model, kind=path, **options), other


@functools.cache
def _lone(kind: str, path: str, which: int) -> Served:
    where, *models = tiny(kind)
    return Served(where, models[which], kind=path)


def alone(kind: str, path: str, which: int, tokens: Tokens, sampling: Sampling, seed: int) -> Completion:
    """What a request becomes with nothing beside it, under the first or the second model."""
    served = _lone(kind, path, which)
    served.submit(tokens, sampling, seed=seed)
    return served.finish()["r"]


@both_paths
def test_after_a_snapshot_every_sequence_is_sampled_as_if_its_version_were_alone(kind: str, path: str):
    """More requests than rows, with lengths that make rows of both versions retire and be reused in many orders."""
    served, other = serve(kind, path, max_sequences=6)
    rng = np.random.default_rng(2)
    work = [
        (rng.integers(2, VOCABULARY, rng.integers(1, 30)).astype(np.int32), Sampling(max_tokens=int(budget)), at)
        for at, budget in enumerate(rng.integers(3, 30, 16))
    ]
    for tokens, sampling, at in work[:9]:
        served.submit(tokens, sampling, name=str(at), seed=at)
    done = dict(served.core.step())
    live = served.core.stats().running
    assert live == 6
    served.flip(other, 1, "snapshot")
    for tokens, sampling, at in work[9:]:
        served.submit(tokens, sampling, name=str(at), seed=at)
    done |= served.finish()
    for tokens, sampling, at in work:
        version = int(at >= live)
        expected = alone(kind, path, version, tokens, sampling, at)
        completion = done[str(at)]
        assert isinstance(completion, Completion)
        assert completion.tokens.tolist() == expected.tokens.tolist()
        assert completion.spans == (Span(version, 0, len(completion.tokens)),)
        np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-4)


def test_sequences_end_in_every_way_under_two_versions():
    """Aborts, of sequences of both versions at once, leave the others undisturbed."""
    served, other = serve()
    for at in range(4):
        served.submit(PROMPT[at:], LONG, name=f"old/{at}", seed=at)
    served.core.step()
    served.flip(other, 1, "snapshot")
    for at in range(4):
        served.submit(PROMPT[at:], LONG, name=f"new/{at}", seed=at)
    served.core.step()
    served.core.abort(["old/0", "old/2", "new/1"])
    gone = dict(served.core.step())
    assert set(gone) == {"old/0", "old/2", "new/1"}
    done = served.finish()
    for which, name, left in ((0, "old", (1, 3)), (1, "new", (0, 2, 3))):
        for at in left:
            expected = alone("llama", "auto", which, PROMPT[at:], LONG, at)
            assert done[f"{name}/{at}"].tokens.tolist() == expected.tokens.tolist()


def test_slot_is_vacant_once_nobody_samples_from_it():
    served, other = serve()
    core = served.core
    assert (core.held, core.vacant(0), core.vacant(1)) == (Update(version=0, slot=0), True, True)
    served.submit(PROMPT, Sampling(max_tokens=6), name="old")
    core.step()
    assert (core.vacant(0), core.vacant(1)) == (False, True)
    served.flip(other, 1, "snapshot")
    served.submit(PROMPT, LONG, name="new")
    core.step()
    assert (core.vacant(0), core.vacant(1)) == (False, False)
    with pytest.raises(SyncError, match=r"version 2.*buffer 0.*version 0"):
        core.apply(Update(version=2, slot=0), "snapshot")
    assert core.stats().version == 1
    while "old" not in dict(core.step()):
        assert not core.vacant(0)
    assert core.vacant(0)
    served.flip(other, 2, "snapshot")
    done = served.finish()["new"]
    assert done.spans == (Span(1, 0, len(done.tokens)),)
    assert done.tokens.tolist() == alone("llama", "auto", 1, PROMPT, LONG, 0).tokens.tolist()
    assert core.stats().version == 2


def test_abort_makes_a_slot_vacant():
    served, other = serve()
    served.submit(PROMPT, LONG, name="old")
    served.core.step()
    served.flip(other, 1, "snapshot")
    served.core.abort(["old"])
    assert served.core.vacant(0)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_swap_ends_a_snapshot(mode: Any):
    """The sequences that kept the old weights go on under the new ones, over the keys and values that the mode says."""
    served, other = serve()
    served.submit(PROMPT, LONG, name="old", seed=1)
    served.core.step()
    served.flip(other, 1, "snapshot")
    served.submit(PROMPT, LONG, name="new", seed=2)
    served.core.step()
    served.core.apply(Update(version=1, slot=1), mode)
    assert served.core.vacant(0)
    done = served.finish()
    assert done["old"].spans == (Span(0, 0, 3), Span(1, 3, 30))
    assert done["new"].spans == (Span(1, 0, 30),)
    sequence = torch.tensor([[*PROMPT, *done["old"].tokens]])
    with torch.no_grad():
        fresh = torch.log_softmax(other(sequence).logits[0, len(PROMPT) - 1 : -1].double(), -1)
    expected = fresh.gather(1, sequence[0, len(PROMPT) :, None])[3:, 0].numpy()
    gap = np.abs(done["old"].logprobs[3:] - expected).max()
    assert gap < 1e-4 if mode == "recompute" else gap > 1e-2
    assert done["new"].tokens.tolist() == alone("llama", "auto", 1, PROMPT, LONG, 2).tokens.tolist()


def test_going_back_to_the_weights_before_is_a_swap_to_them():
    served, other = serve()
    served.submit(PROMPT, LONG, name="old", seed=1)
    served.core.step()
    served.flip(other, 1, "snapshot")
    served.submit(PROMPT, LONG, name="new", seed=2)
    served.core.step()
    served.core.apply(Update(version=0, slot=0), "swap")
    done = served.finish()
    assert done["old"].tokens.tolist() == alone("llama", "auto", 0, PROMPT, LONG, 1).tokens.tolist()
    assert done["new"].spans == (Span(1, 0, 2), Span(0, 2, 30))


@pytest.mark.parametrize("path", ["lean", "hf"])
def test_keys_and_values_are_never_shared_across_versions(path: str):
    served, other = serve("llama", path)
    served.submit(PROMPT, LONG, name="old")
    served.core.step()
    served.flip(other, 1, "snapshot")
    before = served.core.stats().prefill_tokens
    served.submit(PROMPT, LONG, name="new", seed=1)
    served.core.step()
    assert served.core.stats().prefill_tokens - before == len(PROMPT)
    served.submit(PROMPT, LONG, name="newer", seed=2)
    done = served.finish()
    assert served.core.stats().prefill_tokens - before == len(PROMPT) + 1
    for name, seed in (("new", 1), ("newer", 2)):
        assert done[name].tokens.tolist() == alone("llama", path, 1, PROMPT, LONG, seed).tokens.tolist()


def test_version_made_twice_shares_nothing_with_itself():
    """The number of a version may come back with other bytes, after a run was resumed: numbers are no proof of equality."""
    served, other = serve()
    served.submit(PROMPT, LONG, name="old")
    served.core.step()
    pack.write(served.layout, other.state_dict(), served.buffers[1])
    served.core.apply(Update(version=0, slot=1), "snapshot")
    served.submit(PROMPT, LONG, name="new", seed=1)
    done = served.finish()["new"]
    assert done.tokens.tolist() == alone("llama", "auto", 1, PROMPT, LONG, 1).tokens.tolist()


def test_scores_are_those_of_the_newest_weights_while_a_snapshot_lasts():
    served, other = serve()
    served.submit(PROMPT, LONG)
    served.core.step()
    served.flip(other, 1, "snapshot")
    served.core.step()
    fresh, _ = serve()
    fresh.flip(other, 1)
    np.testing.assert_allclose(served.core.score(PROMPT).logprobs, fresh.core.score(PROMPT).logprobs, atol=1e-5)
    assert served.finish()["r"].tokens.tolist() == alone("llama", "auto", 0, PROMPT, LONG, 0).tokens.tolist()


# ---- rows ----------------------------------------------------------------------------------------------------------------


def _live(name: int) -> LiveSequence:
    request = samples.request(id=str(name), tokens=(name, name))
    return LiveSequence(request, room=4, stop_ids=frozenset(), decode=None, vocabulary=VOCABULARY)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rows_follow_their_sequences_and_versions_stay_together(data: st.DataObject):
    """Against a plain dictionary: name -> weights. Each row of the cache holds its sequence's name."""
    cache = KVCache(max_rows=64, max_slots=64)
    cache.reserve(64, 2)
    cache.keys, cache.values = [torch.zeros(64, 1, 64, 1)], [torch.zeros(64, 1, 64, 1)]
    rows, expected, names = LiveRows(cache), dict[str, EmbeddedWeights](), iter(range(10_000))
    newest = EmbeddedWeights(Update(version=0, slot=0), {})
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["append", "remove", "remove", "snapshot", "swap"])):
            case "append":
                new = [_live(next(names)) for _ in range(min(data.draw(st.integers(1, 6)), 64 - len(rows)))]
                for row, live in enumerate(new, start=len(rows)):
                    cache.keys[0][row, 0, 0, 0] = cache.values[0][row, 0, 0, 0] = float(live.request.id)
                    expected[live.request.id] = newest
                if new:
                    rows.append(new, newest)
            case "remove" if len(rows):
                leaving = data.draw(st.sets(st.integers(0, len(rows) - 1), max_size=5))
                for name in [live.request.id for row, live in enumerate(rows) if row in leaving]:
                    del expected[name]
                rows.remove(leaving)
            case "snapshot" if len({id(segment.weights) for segment in rows.segments}) < 2:
                newest = EmbeddedWeights(Update(version=newest.version + 1, slot=1 - newest.slot), {})
            case "swap":
                newest = EmbeddedWeights(Update(version=newest.version + 1, slot=1 - newest.slot), {})
                rows.move_to(newest, rebuilt=False)
                expected = dict.fromkeys(expected, newest)
            case _:
                pass
        _check(rows, cache, expected)


def _check(rows: LiveRows, cache: KVCache, expected: dict[str, EmbeddedWeights]) -> None:
    held: dict[str, EmbeddedWeights] = {}
    at = 0
    for segment in rows.segments:
        assert (segment.first, segment.stop > segment.first) == (at, True)
        at = segment.stop
        for row, live in enumerate(rows[segment.first : segment.stop], start=segment.first):
            assert cache.keys[0][row, 0, 0, 0] == cache.values[0][row, 0, 0, 0] == float(live.request.id)
            held[live.request.id] = segment.weights
    assert at == len(rows)
    assert held == expected
    versions = [segment.weights.version for segment in rows.segments]
    assert versions == sorted(set(versions))
