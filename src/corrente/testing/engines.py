"""The contract of every Engine, whatever generates."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import anyio
import msgspec
import numpy as np

from corrente.data.types import ApplyMode, Completion, Request, Sampling, Tokens
from corrente.engine.base import Engine
from corrente.errors import GenerationError, SyncError
from corrente.sync.base import Receiver, Update
from corrente.sync.offers import SharedOffer
from corrente.testing.expect import Pending, expect, expect_raises, pending


class ServingEngine(Engine, Receiver, Protocol):
    """Both doors of an engine: requests come in by one, weights by the other."""


class EngineCase(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A started engine without weights, and how to feed it.

    ``stage`` brings weights of a version into the slot that the engine has to spare, by way of ``reserve`` and ``receive``, and
    says where; it need not change their values (``stage_in_place`` does just that). ``flip`` makes a staged update live where
    somebody keeps account of it; None: ``engine.apply`` does. ``prompt`` is a context after which the model does not stop within
    ``long_tokens``, drawn or greedy. ``context`` is the longest prompt and completion together. ``broken``: stage an update
    that ``apply`` must refuse with SyncError; None where there is no such thing. ``tick_s`` is how long to wait between two looks
    at the engine's progress. What not every engine can: ``by_position``, a token's draw depends on seed and position alone, so
    that drawn completions too go on as if they had not been interrupted; ``snapshot``, the mode of that name.
    """

    engine: ServingEngine
    stage: Callable[[int], Awaitable[Update]]
    flip: Callable[[Update, ApplyMode], Awaitable[Any]] | None = None
    prompt: Tokens
    context: int
    long_tokens: int = 24
    broken: Callable[[int], Awaitable[Update]] | None = None
    tick_s: float = 0.001
    by_position: bool = True
    snapshot: bool = True


Make = Callable[[], AbstractAsyncContextManager[EngineCase]]


async def check_engine(make: Make, *, deadline_s: float = 120.0) -> None:
    """Hold the engine that entering ``make()`` gives to the contract of engine/base.py; each clause gets a fresh one."""
    for clause in (
        _completions_are_whole,
        _the_same_request_repeats,
        _the_budget_fits_the_context,
        _abort_returns_what_there_is,
        _a_resumed_request_ends_as_if_undisturbed,
        _partials_are_told_and_requests_go_on,
        _a_cancelled_call_frees_the_sequence,
        _tokens_carry_the_version_that_sampled_them,
        _a_snapshot_leaves_live_sequences_their_weights,
        _the_slot_in_use_is_not_to_be_had,
        _a_failed_apply_changes_nothing,
        _score_has_one_number_per_token_but_the_first,
    ):
        with anyio.fail_after(deadline_s):
            async with make() as case:
                await clause(case)


async def stage_in_place(
    engine: Receiver, version: int, *, write: Callable[[int], None] | None = None, nbytes: int = 0
) -> Update:
    """Bring a version into the slot that ``engine`` has to spare: reserve it, ``write`` into it, offer it as it is."""
    slot = 0
    try:
        await engine.reserve(slot)
    except SyncError:
        slot = 1
        await engine.reserve(slot)
    if write is not None:
        write(slot)
    await engine.receive(SharedOffer(version=version, slot=slot, nbytes=nbytes))
    return Update(version=version, slot=slot, nbytes=nbytes)


def _request(
    case: EngineCase, name: str, *, tokens: int, seed: int = 0, group: str = "", temperature: float = 1.0
) -> Request:
    sampling = Sampling(max_tokens=tokens, temperature=temperature)
    return Request(id=name, tokens=case.prompt, sampling=sampling, seed=seed, group=group)


async def _hold(case: EngineCase, version: int) -> Update:
    update = await case.stage(version)
    if case.flip is None:
        pause_s = await case.engine.apply(update, "swap")
        expect(pause_s >= 0, "apply returns the pause in seconds", pause_s)
    else:
        await case.flip(update, "swap")
    seen = (await case.engine.stats()).version
    expect(seen == version, "after apply the engine reports the new version", seen)
    return update


async def _flip(case: EngineCase, update: Update, mode: ApplyMode) -> None:
    await (case.flip or case.engine.apply)(update, mode)


async def _until_decoding(case: EngineCase, call: Pending, request: Request) -> None:
    """Wait until the engine has sampled something of a request, whose call is in flight."""
    while not call.done:
        partials = await case.engine.partial_completions([request.id])
        if request.id in partials and len(partials[request.id].tokens):
            return
        await anyio.sleep(case.tick_s)
    if call.result is not None:
        reason = call.result.finish_reason
        expect(reason != "abort", "a request whose partial is asked for goes on, to its own end", reason)
    raise AssertionError(
        f"the request ended too early; case.long_tokens = {case.long_tokens} is too small: {call.error}"
    )


def _check_whole(done: Completion, budget: int) -> None:
    expect(len(done.tokens) <= budget, "no completion is longer than its budget", len(done.tokens))
    expect(len(done.logprobs) == len(done.tokens), "every token has a log-prob", len(done.logprobs))
    finite = bool(np.isfinite(done.logprobs).all() and (done.logprobs <= 1e-6).all())
    expect(finite, "log-probs are finite and not positive", done.logprobs)
    if done.finish_reason == "length":
        expect(len(done.tokens) == budget, 'finish_reason "length" means that the budget is used up', len(done.tokens))


async def _completions_are_whole(case: EngineCase) -> None:
    await _hold(case, 0)
    for tokens in (1, 5):
        done = await case.engine.generate(_request(case, f"whole/{tokens}", tokens=tokens))
        _check_whole(done, tokens)
        expect(set(done.versions.tolist()) <= {0}, "every token is labelled with the version in use", done.spans)
    stats = await case.engine.stats()
    expect((stats.running, stats.waiting) == (0, 0), "an engine without requests runs nothing", stats)


async def _the_same_request_repeats(case: EngineCase) -> None:
    await _hold(case, 0)
    alone = await case.engine.generate(_request(case, "alone", tokens=8, seed=7))
    beside: list[Completion | None] = [None] * 6

    async def one(at: int, seed: int) -> None:
        beside[at] = await case.engine.generate(_request(case, f"beside/{at}", tokens=8, seed=seed, group="g"))

    async with anyio.create_task_group() as tasks:
        for at, seed in enumerate((1, 2, 7, 3, 4, 7)):
            tasks.start_soon(one, at, seed)
    for again in (beside[2], beside[5]):
        assert again is not None
        same = again.tokens.tolist() == alone.tokens.tolist()
        expect(same, "equal requests under equal weights give equal tokens, whatever runs beside them", again.tokens)
        close = bool(np.allclose(again.logprobs, alone.logprobs, atol=1e-3))
        expect(close, "and equal log-probs", (again.logprobs, alone.logprobs))


async def _the_budget_fits_the_context(case: EngineCase) -> None:
    await _hold(case, 0)
    room = 3
    long = np.resize(case.prompt, case.context - room)
    request = Request(id="tight", tokens=long, sampling=Sampling(max_tokens=50))
    _check_whole(await case.engine.generate(request), room)
    full = msgspec.structs.replace(request, id="full", tokens=np.resize(case.prompt, case.context))
    clause = "a prompt that leaves no room raises GenerationError"
    await expect_raises(GenerationError, clause, lambda: case.engine.generate(full))
    _check_whole(await case.engine.generate(_request(case, "after", tokens=2)), 2)


async def _abort_returns_what_there_is(case: EngineCase) -> None:
    await _hold(case, 0)
    request = _request(case, "aborted", tokens=case.long_tokens)
    async with pending(lambda: case.engine.generate(request)) as call:
        await _until_decoding(case, call, request)
        await case.engine.abort(["nobody", "aborted"])
        await call.finished.wait()
    done: Completion = call.result
    expect(done is not None, "an aborted generate returns what it has", call.error)
    expect(done.finish_reason == "abort", 'with finish_reason "abort"', done.finish_reason)
    expect(0 < len(done.tokens) < case.long_tokens, "which is more than nothing and less than all", len(done.tokens))
    await case.engine.abort(["aborted", "never"])
    _check_whole(await case.engine.generate(_request(case, "aborted", tokens=2)), 2)


async def _a_resumed_request_ends_as_if_undisturbed(case: EngineCase) -> None:
    await _hold(case, 0)
    for temperature in (0.0, 1.0) if case.by_position else (0.0,):
        request = _request(case, f"resumed/{temperature}", tokens=case.long_tokens, seed=3, temperature=temperature)
        whole = await case.engine.generate(request)
        async with pending(lambda request=request: case.engine.generate(request)) as call:
            await _until_decoding(case, call, request)
            await case.engine.abort([request.id])
            await call.finished.wait()
        first: Completion = call.result
        expect(first is not None, "an aborted generate returns what it has", call.error)
        rest = await case.engine.generate(request.resumed_after(first))
        joined = first.joined_with(rest)
        clause = "a request that goes on returns what is new, and ends as it would have ended undisturbed"
        expect(joined.tokens.tolist() == whole.tokens.tolist(), clause, (first.tokens, rest.tokens, whole.tokens))
        expect(joined.finish_reason == whole.finish_reason, clause, joined.finish_reason)
        close = bool(np.allclose(joined.logprobs, whole.logprobs, atol=1e-3))
        expect(close, "with the log-probs it would have had", (joined.logprobs, whole.logprobs))
        expect(rest.text == whole.text, "its text is the whole", rest.text)
    spent = msgspec.structs.replace(_request(case, "spent", tokens=2), written=2)
    full = msgspec.structs.replace(spent, tokens=np.resize(case.prompt, case.context))
    for request in (spent, full):
        nothing = await case.engine.generate(request)
        expect(len(nothing.tokens) == 0, "what was written counts against the budget", nothing.tokens)
        expect(nothing.finish_reason == "length", "a budget that is used up is a length reached", nothing.finish_reason)


async def _partials_are_told_and_requests_go_on(case: EngineCase) -> None:
    await _hold(case, 0)
    request = _request(case, "told", tokens=case.long_tokens)
    async with pending(lambda: case.engine.generate(request)) as call:
        await _until_decoding(case, call, request)
        told = await case.engine.partial_completions(["nobody", "told"])
        await call.finished.wait()
    if call.error:
        raise call.error
    done: Completion = call.result
    expect(set(told) == {"told"}, "partials has the live requests among those named, and no others", set(told))
    some = told["told"]
    expect(
        0 < len(some.tokens) < case.long_tokens, "a partial is more than nothing and less than all", len(some.tokens)
    )
    expect(some.finish_reason == "abort", 'its finish_reason is "abort"', some.finish_reason)
    count = len(some.tokens)
    expect(done.tokens[:count].tolist() == some.tokens.tolist(), "the request goes on from its partial", some.tokens)
    expect(bool((done.logprobs[:count] == some.logprobs).all()), "with the log-probs it had", some.logprobs)
    expect(done.finish_reason != "abort", "to its own end", done.finish_reason)
    _check_whole(done, case.long_tokens)
    gone = await case.engine.partial_completions(["told"])
    expect(not gone, "a request that ended has no partial", gone)


async def _a_cancelled_call_frees_the_sequence(case: EngineCase) -> None:
    await _hold(case, 0)
    request = _request(case, "cancelled", tokens=case.long_tokens)
    before = (await case.engine.stats()).decode_tokens
    async with pending(lambda: case.engine.generate(request)) as call:
        await _until_decoding(case, call, request)
        await call.cancel()
    stats, looks = await case.engine.stats(), 0
    while (stats.running or stats.waiting) and looks < 1000:
        await anyio.sleep(case.tick_s)
        stats, looks = await case.engine.stats(), looks + 1
    expect(stats.running == stats.waiting == 0, "cancelling generate frees the sequence", stats)
    sampled = stats.decode_tokens - before
    expect(sampled < case.long_tokens, "cancelling generate frees the sequence before its end", sampled)


async def _tokens_carry_the_version_that_sampled_them(case: EngineCase) -> None:
    await _hold(case, 0)
    for version, mode in ((1, "swap"), (2, "recompute")):
        request = _request(case, f"flipped/{mode}", tokens=case.long_tokens)
        async with pending(lambda request=request: case.engine.generate(request)) as call:
            await _until_decoding(case, call, request)
            await _flip(case, await case.stage(version), "recompute" if mode == "recompute" else "swap")
            late = await case.engine.generate(_request(case, f"late/{mode}", tokens=2))
            await call.finished.wait()
        if call.error:
            raise call.error
        seen = [span.version for span in call.result.spans]
        clause = f"a sequence that lives through an update ({mode}) has a span per version, in order"
        expect(seen == [version - 1, version], clause, call.result.spans)
        _check_whole(call.result, case.long_tokens)
        clause = "a request made after apply returned is sampled by the new weights alone"
        expect({s.version for s in late.spans} <= {version}, clause, late.spans)


async def _a_snapshot_leaves_live_sequences_their_weights(case: EngineCase) -> None:
    if not case.snapshot:
        return
    await _hold(case, 0)
    request = _request(case, "old", tokens=case.long_tokens)
    async with pending(lambda: case.engine.generate(request)) as call:
        await _until_decoding(case, call, request)
        await _flip(case, await case.stage(1), "snapshot")
        late = await case.engine.generate(_request(case, "new", tokens=2))
        async with pending(lambda: case.stage(2)) as staging:
            too_early = staging.done and not call.done
            await call.finished.wait()
            await staging.finished.wait()
    if call.error:
        raise call.error
    expect(set(late.versions.tolist()) <= {1}, "after a snapshot new requests use the new weights", late.spans)
    expect({s.version for s in call.result.spans} == {0}, "and live ones finish under the old", call.result.spans)
    _check_whole(call.result, case.long_tokens)
    expect(not too_early, "while sequences sample from a slot, reserve does not give it away")
    if staging.error:
        raise staging.error
    await _flip(case, staging.result, "swap")
    last = await case.engine.generate(_request(case, "last", tokens=2))
    expect(set(last.versions.tolist()) <= {2}, "the next version lands as usual", last.spans)


async def _the_slot_in_use_is_not_to_be_had(case: EngineCase) -> None:
    held = await _hold(case, 0)
    clause = "the slot of the version held cannot be reserved"
    await expect_raises(SyncError, clause, lambda: case.engine.reserve(held.slot))
    await case.engine.reserve(1 - held.slot)
    expect(case.engine.members() >= 1, "an engine has at least one member", case.engine.members())


async def _a_failed_apply_changes_nothing(case: EngineCase) -> None:
    if case.broken is None:
        return
    await _hold(case, 3)
    broken = await case.broken(4)
    clause = "an update that cannot be applied raises SyncError"
    await expect_raises(SyncError, clause, lambda: case.engine.apply(broken, "swap"))
    done = await case.engine.generate(_request(case, "old", tokens=2))
    expect({s.version for s in done.spans} == {3}, "and the old weights are still in use", done.spans)
    await _hold(case, 4)


async def _score_has_one_number_per_token_but_the_first(case: EngineCase) -> None:
    await _hold(case, 0)
    logprobs = (await case.engine.score(case.prompt)).logprobs
    expect(
        logprobs.shape == (len(case.prompt) - 1,), "score gives one log-prob per token but the first", logprobs.shape
    )
    valid = bool(np.isfinite(logprobs).all() and (logprobs <= 1e-6).all())
    expect(valid, "scores are finite and not positive", logprobs)
    top = await case.engine.score(case.prompt, top=3)
    shape = (len(case.prompt) - 1, 3)
    expect(top.top_ids.shape == shape, "score gives the likeliest tokens that were asked for", top.top_ids.shape)
    falling = bool((np.diff(top.top_logprobs, axis=1) <= 0).all())
    expect(falling, "likeliest first", top.top_logprobs)
    close = bool(np.allclose(top.logprobs, logprobs, atol=1e-3))
    expect(close, "and the same log-probs as without", (top.logprobs, logprobs))
    bounded = bool((logprobs <= top.top_logprobs[:, 0] + 1e-3).all())
    expect(bounded, "no token is likelier than the likeliest", (logprobs, top.top_logprobs))
    place, rank = np.nonzero(top.top_ids == case.prompt[1:, None])
    agree = bool(np.allclose(top.top_logprobs[place, rank], logprobs[place], atol=1e-3))
    expect(agree, "a token has one log-prob, wherever it is told", (logprobs, top.top_logprobs))
