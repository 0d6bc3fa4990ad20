"""What every Engine must do, whatever generates."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import anyio
import msgspec
import numpy as np

from corrente.engine.base import Engine
from corrente.errors import GenerationError, SyncError
from corrente.sync.base import Update
from corrente.testing.expect import Pending, expect, expect_raises, pending
from corrente.types import Completion, Request, Sampling, Tokens


class EngineCase(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A started engine without weights, and how to feed it.

    ``stage`` makes weights of a version visible to the engine and says where; it need not change their values. ``prompt`` is a
    context after which the model does not stop within ``long_tokens``. ``context`` is the longest prompt and completion
    together. ``broken``: stage an update that ``apply`` must refuse with SyncError; None where there is no such thing.
    ``tick_s`` is how long to wait between two looks at the engine's progress.
    """

    engine: Engine
    stage: Callable[[int], Awaitable[Update]]
    prompt: Tokens
    context: int
    long_tokens: int = 24
    broken: Callable[[int], Awaitable[Update]] | None = None
    tick_s: float = 0.001


Make = Callable[[], AbstractAsyncContextManager[EngineCase]]


async def check_engine(make: Make, *, deadline_s: float = 120.0) -> None:
    """Hold the engine that entering ``make()`` gives to the contract of engine/base.py; each clause gets a fresh one."""
    for clause in (
        _completions_are_whole,
        _the_same_request_repeats,
        _the_budget_fits_the_context,
        _abort_returns_what_there_is,
        _a_cancelled_call_frees_the_sequence,
        _tokens_carry_the_version_that_sampled_them,
        _a_failed_apply_changes_nothing,
        _score_has_one_number_per_token_but_the_first,
    ):
        with anyio.fail_after(deadline_s):
            async with make() as case:
                await clause(case)


def _request(case: EngineCase, name: str, *, tokens: int, seed: int = 0, group: str = "") -> Request:
    return Request(id=name, tokens=case.prompt, sampling=Sampling(max_tokens=tokens), seed=seed, group=group)


async def _hold(case: EngineCase, version: int) -> None:
    pause_s = await case.engine.apply(await case.stage(version), "swap")
    expect(pause_s >= 0, "apply returns the pause in seconds", pause_s)
    seen = (await case.engine.stats()).version
    expect(seen == version, "after apply the engine reports the new version", seen)


async def _until_decoding(case: EngineCase, call: Pending) -> None:
    """Wait until the engine has sampled something for the call in flight."""
    before = (await case.engine.stats()).decode_tokens
    while not call.done:
        stats = await case.engine.stats()
        if stats.running and stats.decode_tokens > before:
            return
        await anyio.sleep(case.tick_s)
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
        await _until_decoding(case, call)
        await case.engine.abort(["nobody", "aborted"])
        await call.finished.wait()
    done: Completion = call.result
    expect(done is not None, "an aborted generate returns what it has", call.error)
    expect(done.finish_reason == "abort", 'with finish_reason "abort"', done.finish_reason)
    expect(0 < len(done.tokens) < case.long_tokens, "which is more than nothing and less than all", len(done.tokens))
    await case.engine.abort(["aborted", "never"])
    _check_whole(await case.engine.generate(_request(case, "aborted", tokens=2)), 2)


async def _a_cancelled_call_frees_the_sequence(case: EngineCase) -> None:
    await _hold(case, 0)
    request = _request(case, "cancelled", tokens=case.long_tokens)
    before = (await case.engine.stats()).decode_tokens
    async with pending(lambda: case.engine.generate(request)) as call:
        await _until_decoding(case, call)
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
            await _until_decoding(case, call)
            await case.engine.apply(await case.stage(version), "recompute" if mode == "recompute" else "swap")
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
    logprobs = await case.engine.score(case.prompt)
    expect(
        logprobs.shape == (len(case.prompt) - 1,), "score gives one log-prob per token but the first", logprobs.shape
    )
    valid = bool(np.isfinite(logprobs).all() and (logprobs <= 1e-6).all())
    expect(valid, "scores are finite and not positive", logprobs)
