"""What an episode's requests were answered: put together across interruptions, and played back in a resumed run."""

from __future__ import annotations

import msgspec
import pytest

from corrente.common import serialization
from corrente.controller.ledger import LedgerState
from corrente.controller.partial_rollout import PartialRollout, SavedRequest, partial_rollouts
from corrente.controller.plan import Plan
from corrente.controller.snapshot import Snapshot, Unfinished
from corrente.data.types import Completion, FinishReason, Request, Sampling, Span
from corrente.testing import samples


def request(*tokens: int, seed: int = 1, id: str = "0/0") -> Request:
    return samples.request(id=id, tokens=tokens, seed=seed, group="0")


def part(*tokens: int, version: int = 0, reason: FinishReason = "abort") -> Completion:
    """The log-prob of a token is the token, negated."""
    logprobs = [-float(token) for token in tokens]
    return samples.completion(tokens=tokens, versions=version, logprobs=logprobs, finish_reason=reason)


def test_interrupted_request_goes_on_from_where_it_was_any_number_of_times() -> None:
    entry = PartialRollout().open(request(5, 6))
    assert entry.next.tokens.tolist() == [5, 6]
    entry.add(part(), interrupted=True)
    assert (entry.next.tokens.tolist(), entry.next.written, entry.finished) == ([5, 6], 0, False)
    entry.add(part(7, 8), interrupted=True)
    assert (entry.next.tokens.tolist(), entry.next.written) == ([5, 6, 7, 8], 2)
    entry.add(part(9, version=1), interrupted=True)
    assert (entry.next.tokens.tolist(), entry.next.written) == ([5, 6, 7, 8, 9], 3)
    entry.add(part(4, version=1, reason="stop"), interrupted=True)  # it ended by itself, in the race
    done = entry.completion
    assert entry.finished
    assert done.tokens.tolist() == [7, 8, 9, 4]
    assert done.logprobs.tolist() == [-7, -8, -9, -4]
    assert done.spans == (Span(0, 0, 2), Span(1, 2, 4))
    assert done.finish_reason == "stop"


def test_abort_that_is_not_ours_is_the_end() -> None:
    entry = PartialRollout().open(request(5))
    entry.add(part(7), interrupted=False)
    assert entry.finished
    assert entry.completion.finish_reason == "abort"


def test_record_answers_the_same_requests_in_the_same_order() -> None:
    first = PartialRollout()
    one = first.open(request(1, 2))
    one.add(part(3, reason="stop"), interrupted=False)
    two = first.open(request(1, 2, 3, 4, seed=2, id="0/1"))
    with two.asking():
        two.record_partial(part(5, 6), written=0)
        answers = first.answers()
    again = PartialRollout(answers)
    assert [a.finished for a in again.answers()] == [True, False]
    replayed = again.open(request(1, 2, id="9/0"))
    assert replayed.finished
    assert replayed.completion.tokens.tolist() == [3]
    goes_on = again.open(request(1, 2, 3, 4, seed=2, id="9/1"))
    assert not goes_on.finished
    assert (goes_on.next.id, goes_on.next.tokens.tolist(), goes_on.next.written) == ("9/1", [1, 2, 3, 4, 5, 6], 2)


@pytest.mark.parametrize(
    "asked", [request(1, 9), request(1, 2, seed=7), msgspec.structs.replace(request(1, 2), sampling=Sampling())]
)
def test_record_is_void_from_where_something_else_is_asked(asked: Request) -> None:
    answers = (
        SavedRequest(request=request(1, 2), completion=part(3, reason="stop"), finished=True),
        SavedRequest(request=request(1, 2, 3), completion=part(4, reason="stop"), finished=True),
    )
    again = PartialRollout(answers)
    assert not again.open(asked).finished
    assert not again.open(request(1, 2, 3)).finished
    assert len(again.answers()) == 2


def test_look_that_comes_after_the_call_has_ended_is_void() -> None:
    """The engine's answer to ``partial_completions`` may be older than the interruption that ended the call it tells of."""
    entry = PartialRollout().open(request(1))
    with entry.asking():
        written = entry.written
    entry.add(part(2, 3), interrupted=True)
    with entry.asking():
        entry.record_partial(part(2), written=written)
        assert _tokens(entry.answer()) == [2, 3]
        entry.record_partial(part(4), written=entry.written)
        assert _tokens(entry.answer()) == [2, 3, 4]
    assert entry.next.tokens.tolist() == [1, 2, 3]  # what was looked at has not come back yet


def _tokens(answer: SavedRequest) -> list[int]:
    assert answer.completion is not None
    return answer.completion.tokens.tolist()


def test_records_survive_the_codec() -> None:
    answers = (
        (SavedRequest(request=request(1, 2), completion=part(3, 4, version=6)),),
        (SavedRequest(request=request(1, 2)),),
    )
    snapshot = _snapshot(Unfinished(prompt_id="0/0", answers=answers), version=6)
    back = serialization.decode(serialization.encode(snapshot), Snapshot).unfinished[0].answers
    assert _tokens(back[0][0]) == [3, 4]
    assert back[0][0].request.tokens.tolist() == [1, 2]
    assert back[0][0].oldest_version == 6
    assert back[1][0].completion is None


def _snapshot(*unfinished: Unfinished, version: int) -> Snapshot:
    return Snapshot(step=0, version=version, next_ticket=0, ledger=LedgerState(), prompts={}, unfinished=unfinished)


@pytest.mark.parametrize(
    ("window", "max_age", "kept"),
    [
        # versions of the records: 4, 2, 1 in places 0, 1, 2; version 4 is live, and a version is made of two groups
        (1, 2, [True, True, False]),  # ages 0 + 0, 2 + 0, 3 + 1
        (2, 2, [True, False, False]),  # one may overtake: ages 0 + 0, 2 + 1
        (1, 4, [True, True, True]),
        (3, 0, [True, False, False]),  # strictly on policy: nothing of the live version is lost
        (0, None, [True, True, True]),
    ],
)
def test_record_that_would_be_too_old_is_generated_anew(window: int, max_age: int | None, kept: list[bool]) -> None:
    places = [
        Unfinished(prompt_id=f"0/{v}", answers=((SavedRequest(request=request(1), completion=part(2, version=v)),),))
        for v in (4, 2, 1)
    ]
    plan = Plan(steps=9, prompts_per_step=2, group_size=1, max_age=max_age, window=window)
    again = _snapshot(*places, version=4).admit_again(plan)
    assert [bool(u.answers[0]) for u in again] == kept


def test_partial_rollouts_are_one_for_every_episode() -> None:
    record = (SavedRequest(request=request(1)),)
    made = partial_rollouts(3, (record,))
    assert [len(t.answers()) for t in made] == [1, 0, 0]
