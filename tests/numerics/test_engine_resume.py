"""Requests that are interrupted go on as if they had not been: tokens, log-probs, spans, text and budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.numerics.engine_tiny import CONTEXT, Served, spell, tiny

from corrente.data.types import Completion, Request, Sampling
from corrente.engine.embedded.stop import StopStrings
from corrente.errors import GenerationError
from corrente.testing import samples

PROMPT = np.arange(20, 50, dtype=np.int32)
PATHS = [("llama", "lean"), ("qwen3", "lean"), ("llama", "hf"), ("qwen3", "hf"), ("gpt2", "hf")]
SAMPLINGS = {
    "greedy": Sampling(max_tokens=14, temperature=0),
    "plain": Sampling(max_tokens=14),
    "cut": Sampling(max_tokens=14, temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
}


def serve(kind: str = "llama", path: str = "auto", **options: Any) -> Served:
    where, model, _ = tiny(kind)
    return Served(where, model, kind=path, **options)


def members(sampling: Sampling, *, prompts: int = 2, each: int = 3) -> list[Request]:
    """Groups of requests with equal prompts; the prompts of different groups begin alike."""
    return [
        samples.request(id=f"{g}/{i}", tokens=np.append(PROMPT, 300 + g), sampling=sampling, seed=10 * g + i)
        for g in range(prompts)
        for i in range(each)
    ]


def undisturbed(served: Served, requests: Sequence[Request]) -> dict[str, Completion]:
    for request in requests:
        served.core.submit(request)
    return served.finish()


def disturbed(
    served: Served, requests: Sequence[Request], rng: np.random.Generator
) -> tuple[dict[str, Completion], int]:
    """Completions of requests that are aborted at random and sent again from where they were, and how often that was."""
    asked = {request.id: request for request in requests}
    parts: dict[str, Completion] = {}
    done: dict[str, Completion] = {}
    aborts = 0
    for request in requests:
        served.core.submit(request)
    while len(done) < len(requests):
        for name, outcome in served.core.step():
            assert isinstance(outcome, Completion), outcome
            joined = parts[name].then(outcome) if name in parts else outcome
            if outcome.finish_reason == "abort":
                aborts += 1
                parts[name], asked[name] = joined, asked[name].after(outcome)
                served.core.submit(asked[name])
            else:
                done[name] = joined
        served.core.abort([name for name in asked if name not in done and rng.random() < 0.15])
    return done, aborts


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize(("kind", "path"), PATHS)
def test_groups_that_are_interrupted_again_and_again_end_as_undisturbed(kind: str, path: str, how: str):
    requests = members(SAMPLINGS[how])
    whole = undisturbed(serve(kind, path), requests)
    done, aborts = disturbed(serve(kind, path, max_sequences=4), requests, np.random.default_rng(0))
    assert aborts > 5
    assert how == "greedy" or len({tuple(c.tokens.tolist()) for c in whole.values()}) == len(requests)
    for name, expected in whole.items():
        assert done[name].tokens.tolist() == expected.tokens.tolist()
        assert done[name].spans == expected.spans
        assert (done[name].finish_reason, done[name].text) == (expected.finish_reason, expected.text)
        np.testing.assert_allclose(done[name].logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_interruption_at_every_token_changes_nothing(temperature: float):
    request = samples.request(tokens=PROMPT, max_tokens=12, temperature=temperature, seed=4)
    served = serve()
    whole = undisturbed(served, [request])["r"]
    for written in range(1, 12):
        first = head(whole, written)
        rest = undisturbed(served, [request.after(first)])["r"]
        assert len(rest.tokens) == 12 - written
        joined = first.then(rest)
        assert joined.tokens.tolist() == whole.tokens.tolist()
        np.testing.assert_allclose(joined.logprobs, whole.logprobs, atol=1e-4)


def head(whole: Completion, count: int) -> Completion:
    """What an interruption after ``count`` tokens leaves of a completion of version 0."""
    return samples.completion(
        tokens=whole.tokens[:count], logprobs=whole.logprobs[:count], finish_reason="abort", text=""
    )


def aborted(served: Served, request: Request, *, steps: int) -> Completion:
    """What a request has after so many steps, the first of which samples two tokens."""
    partial = served.interrupted(request, steps=steps)
    assert (partial.finish_reason, len(partial.tokens)) == ("abort", steps + 1)
    return partial


def test_budget_counts_what_was_written_however_often_it_is_interrupted():
    served = serve()
    request = samples.request(tokens=PROMPT, max_tokens=5)
    parts: list[Completion] = []
    while sum(len(part.tokens) for part in parts) < 5:
        served.core.submit(request)
        outcomes = served.core.step()
        served.core.abort(["r"])
        ((_, part),) = outcomes or served.core.step()
        assert isinstance(part, Completion)
        parts.append(part)
        request = request.after(part)
    assert [(len(part.tokens), part.finish_reason) for part in parts] == [(2, "abort"), (2, "abort"), (1, "length")]
    spent = undisturbed(served, [request])["r"]
    assert (len(spent.tokens), spent.finish_reason, spent.spans) == (0, "length", ())


def test_resumed_request_is_clipped_to_the_context():
    request = samples.request(tokens=np.resize(PROMPT, CONTEXT - 6), max_tokens=50, seed=1)
    served = serve()
    whole = undisturbed(served, [request])["r"]
    first = aborted(served, request, steps=2)
    joined = first.then(undisturbed(served, [request.after(first)])["r"])
    assert joined.tokens.tolist() == whole.tokens.tolist()
    assert (len(joined.tokens), joined.finish_reason) == (6, "length")


def test_resumed_member_of_a_live_group_computes_only_what_it_wrote():
    served = serve()
    group = members(Sampling(max_tokens=40), prompts=1)
    for request in group:
        served.core.submit(request)
    for _ in range(4):
        served.core.step()
    served.core.abort(["0/1"])
    ((_, part),) = served.core.step()
    assert isinstance(part, Completion)
    before = served.core.stats().prefill_tokens
    served.core.submit(group[1].after(part))
    served.core.step()
    assert served.core.stats().prefill_tokens - before == len(part.tokens)
    done = served.finish()
    assert part.then(done["0/1"]).tokens.tolist() == undisturbed(serve(), group)["0/1"].tokens.tolist()


def test_tokens_that_are_computed_again_are_counted():
    served = serve()
    request = samples.request(tokens=PROMPT, max_tokens=20)
    part = aborted(served, request, steps=5)
    before = served.core.stats()
    undisturbed(served, [request.after(part)])
    after = served.core.stats()
    assert after.prefill_tokens - before.prefill_tokens == len(PROMPT) + 6
    assert after.decode_tokens - before.decode_tokens == 14
    assert after.busy_s > before.busy_s


def test_written_tokens_must_leave_a_prompt():
    served = serve()
    for written, message in ((len(PROMPT), "empty"), (len(PROMPT) + 1, "empty"), (-1, "written is -1")):
        with pytest.raises(GenerationError, match=message):
            served.core.submit(samples.request(tokens=PROMPT, written=written))
    assert served.core.idle


def test_completion_that_was_over_stays_over():
    """An engine that ends on a token another engine went on from does not sample past it."""
    served = serve()
    request = samples.request(tokens=np.append(PROMPT, [300, 7]), stop_token_ids=(7,), written=2)
    done = undisturbed(served, [request])["r"]
    assert (len(done.tokens), done.finish_reason) == (0, "stop")


# ---- partials ------------------------------------------------------------------------------------------------------------


def test_partials_tell_what_live_requests_have_and_change_nothing():
    requests = members(Sampling(max_tokens=9), prompts=1, each=4)
    whole = undisturbed(serve(), requests)
    served = serve(max_sequences=3)
    for request in requests:
        served.core.submit(request)
    assert served.core.partials([r.id for r in requests]) == {}
    for _ in range(3):
        served.core.step()
    told = served.core.partials(["0/0", "0/2", "0/3", "nobody"])
    assert set(told) == {"0/0", "0/2"}
    for name, partial in told.items():
        assert partial.tokens.tolist() == whole[name].tokens[:4].tolist()
        assert (partial.finish_reason, len(partial.logprobs)) == ("abort", 4)
    done = served.finish()
    assert {n: c.tokens.tolist() for n, c in done.items()} == {n: c.tokens.tolist() for n, c in whole.items()}
    assert served.core.partials([r.id for r in requests]) == {}


# ---- stop strings --------------------------------------------------------------------------------------------------------


def test_stop_string_half_before_and_half_after_an_interruption_ends_the_completion(tmp_path: Path):
    path, model = spell(tmp_path)
    served = Served(path, model)
    free = undisturbed(served, [samples.request(tokens=PROMPT, max_tokens=12, seed=2)])["r"]
    across = free.text[11:15]
    request = samples.request(tokens=PROMPT, max_tokens=12, stop=("zzzz", across), seed=2)
    whole = undisturbed(served, [request])["r"]
    assert (whole.finish_reason, whole.text) == ("stop", free.text[: free.text.index(across)])
    for written in range(1, len(whole.tokens)):
        first = head(whole, written)
        rest = undisturbed(served, [request.after(first)])["r"]
        assert (rest.finish_reason, rest.text) == ("stop", whole.text)
        assert first.then(rest).tokens.tolist() == whole.tokens.tolist()


def test_text_of_a_resumed_completion_is_the_whole(tmp_path: Path):
    path, model = spell(tmp_path)
    served = Served(path, model)
    request = samples.request(tokens=PROMPT, max_tokens=12, seed=2)
    whole = undisturbed(served, [request])["r"]
    first = aborted(served, request, steps=4)
    assert first.text == whole.text[:10]
    assert undisturbed(served, [request.after(first)])["r"].text == whole.text


def _decode(ids: Any) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def _noticed(watch: StopStrings, tokens: Sequence[int]) -> list[bool]:
    return [watch.push(token) for token in tokens]


@settings(max_examples=200, deadline=None)
@given(
    st.text("ab∑é", max_size=60), st.lists(st.text("ab∑é", min_size=1, max_size=4), min_size=1, max_size=2), st.data()
)
def test_watch_that_catches_up_is_where_it_would_have_been(text: str, stops: list[str], data: st.DataObject):
    """One byte a token, so that interruptions fall inside characters."""
    tokens = list(text.encode())
    at = data.draw(st.integers(0, len(tokens)))
    steady, late = StopStrings(stops, _decode), StopStrings(stops, _decode)
    before = _noticed(steady, tokens[:at])
    assert late.catch_up(tokens[:at]) == any(before)
    assert _noticed(late, tokens[at:]) == _noticed(steady, tokens[at:])
