"""The contracts of every Prompts, Env, Scorer and Sink."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import numpy as np

from corrente.data.types import Completion, Group, Prompt, Request, Turn, concat_tokens
from corrente.env.base import Env
from corrente.errors import GenerationError
from corrente.observe.base import Sink
from corrente.prompts.base import Prompts
from corrente.score.base import Scorer
from corrente.testing import samples
from corrente.testing.expect import expect, expect_raises


def check_prompts(make: Callable[[], Prompts], *, most: int = 50) -> None:
    """Hold ``make()``, the same source from its beginning each time, to the contract of prompts/base.py.

    Looks at the first ``most`` prompts; a source that ends earlier is also checked at its end.
    """
    source = make()
    first = _draw(source, most)
    expect(len(first) > 0, "there is at least one prompt")
    ids = [p.id for p in first]
    expect(len(set(ids)) == len(ids), "every prompt has an id of its own", ids)
    if len(first) < most:
        expect(source.next_prompt() is None, "after the end next gives None, again and again")
    expect(_same(first, _draw(make(), most)), "the order depends on the seed alone: a new source repeats it")
    found = make().find_prompts(list(reversed(ids)))
    expect(_same(first, tuple(reversed(found))), "find rebuilds prompts from their ids, in the order asked for")
    expect(make().find_prompts([]) == (), "find of no ids gives no prompts")
    for at in sorted({0, len(first) // 2, len(first)}):
        before = make()
        _draw(before, at)
        state = json.loads(json.dumps(before.state()))
        after = make()
        after.restore(state)
        rest = _draw(after, len(first) - at)
        expect(
            _same(first[at:], rest),
            "restore(state()), by way of JSON, goes on with the prompt that would have come next",
            at,
        )
    expect(isinstance(make().describe(), str), "describe gives a line of text")


def _draw(source: Prompts, most: int) -> tuple[Prompt, ...]:
    out: list[Prompt] = []
    while len(out) < most and (prompt := source.next_prompt()) is not None:
        out.append(prompt)
    return tuple(out)


def _same(a: tuple[Prompt, ...], b: tuple[Prompt, ...]) -> bool:
    def plain(prompt: Prompt) -> tuple[Any, ...]:
        return prompt.id, prompt.tokens.tolist(), prompt.text, prompt.fields

    return [plain(p) for p in a] == [plain(p) for p in b]


async def check_env(make: Callable[[], Env], prompt: Prompt) -> None:
    """Hold ``make()`` to the contract of env/base.py on one prompt, against a generator that says 0 1 2."""
    requests: list[Request] = []

    async def generate(request: Request) -> Completion:
        requests.append(request)
        await anyio.lowlevel.checkpoint()
        return samples.completion()

    played = await make().play(prompt, generate, key="7/1", group="7", seed=11)
    expect(len(requests) >= 1, "play asks the engine for something")
    ids = [r.id for r in requests]
    expect(all(i.startswith("7/1") for i in ids), "ids of requests begin with the key", ids)
    expect(len(set(ids)) == len(ids), "and differ", ids)
    if played.release is not None:
        await played.release()
    _check_turns(played.turns, requests)
    before, requests[:] = list(requests), []
    await make().play(prompt, generate, key="7/1", group="7", seed=11)
    same = [(r.seed, r.tokens.tolist()) for r in requests] == [(r.seed, r.tokens.tolist()) for r in before]
    expect(same, "the seed makes the requests repeat")

    async def refuse(request: Request) -> Completion:
        raise GenerationError("no")

    await expect_raises(
        GenerationError,
        "an error of the engine leaves play as it is",
        lambda: make().play(prompt, refuse, key="8/0", group="8", seed=0),
    )


def _check_turns(turns: tuple[Turn, ...], requests: list[Request]) -> None:
    sampled = [t for t in turns if t.completion is not None]
    expect(len(sampled) == len(requests), "every completion is one turn", (len(sampled), len(requests)))
    for turn in sampled:
        exact = turn.completion is not None and turn.tokens.tolist() == turn.completion.tokens.tolist()
        expect(exact, "a sampled turn has the tokens exactly as sampled", turn.tokens)
    for at, turn in enumerate(turns):
        expect(turn.parent is None or -1 <= turn.parent < at, "a turn's parent comes before it", turn.parent)
    given = concat_tokens([t.tokens for t in turns[: turns.index(sampled[0])]])
    exact = np.array_equal(given, requests[0].tokens)
    expect(exact, "the first request's context is the turns before the first completion", given)


async def check_scorer(make: Callable[[], Scorer], group: Group) -> None:
    """Hold ``make()`` to the contract of score/base.py on ``group``, whose episodes are all fit to be scored."""
    scorer = make()
    scored = await scorer.score(group)
    _check_scored(group, scored)
    again: list[Group] = []

    async def one(subject: Group) -> None:
        again.append(await scorer.score(subject))

    async with anyio.create_task_group() as tasks:
        for at in range(4):
            tasks.start_soon(one, msgspec.structs.replace(group, id=group.id + at))
    for other in again:
        _check_scored(msgspec.structs.replace(group, id=other.id), other)
    expect(sorted(g.id for g in again) == [group.id + at for at in range(4)], "groups scored at once stay apart")
    _check_scored(
        msgspec.structs.replace(group, episodes=()),
        await scorer.score(msgspec.structs.replace(group, episodes=())),
    )
    stats = scorer.stats()
    expect(all(np.isfinite(value) for value in stats.values()), "stats are finite numbers", stats)


def _check_scored(before: Group, after: Group) -> None:
    expect((after.id, after.prompt.id) == (before.id, before.prompt.id), "score returns the same group", after.id)
    order = [e.index for e in after.episodes]
    expect(order == [e.index for e in before.episodes], "with its episodes in the same order", order)
    for old, new in zip(before.episodes, after.episodes, strict=True):
        expect(new.turns == old.turns, "and their turns as they were", new.turns)
        if new.status == "ok":
            number = new.reward is None or np.isfinite(new.reward)
            expect(bool(number), "a reward is a finite number, or None where no function applies", new.reward)
        else:
            named = new.status in ("failed", "timeout") and bool(new.error)
            expect(named, "an episode whose scoring failed says so, and why", (new.status, new.error))


def check_sink(make: Callable[[], Sink]) -> None:
    """Hold ``make()`` to the contract of observe/base.py: every call accepts plain data and keeps its hands off it."""
    sink = make()
    values = {"reward/mean": 0.5, "lag/max": 2.0, "train/loss": float("nan")}
    sample = {"prompt": "2 + 2 =", "completion": " 4", "reward": None, "versions": [0, 1], "fields": {"answer": 4}}
    kept = (dict(values), dict(sample))
    for step in (1, 2):
        sink.log_metrics(step, values)
        sink.log_span("learn", f"step {step}", float(step), step + 0.5, {"tokens": 3, "mode": "swap"})
        sink.log_sample(step, sample)
        sink.log_event("warning", "something to read\nin two lines")
    sink.log_metrics(2, {})
    expect(repr((values, sample)) == repr(kept), "a sink does not change what it is given", (values, sample))
    sink.close()
