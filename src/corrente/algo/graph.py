"""Rows from the graph of turns of an episode: one per end of the conversation that holds something of its own. numpy only.

A turn's context is the path of its ancestors: a turn without a parent follows the one before it, and with parent -1 it begins
anew. Where a conversation forked, because a template rewrote its history or because several agents each have a view of their
own, a sampled turn may be on several paths. It is trained on the first, and is context, like all that was given, on the others:
no sampled token is lost, and none counts twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from corrente.algo.teacher_logprobs import align_with_row
from corrente.data.routing import Experts, unknown_experts
from corrente.data.support import join_supports
from corrente.data.types import Completion, Episode, Mask, Row, Turn, concat_tokens
from corrente.errors import AlignmentError


class TurnSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, stop) of a row are those of ``turn``. ``own``: it was sampled, and no row before this one has it."""

    turn: int
    start: int
    stop: int
    own: bool


def paths(turns: Sequence[Turn]) -> list[list[TurnSpan]]:
    """Per end of the conversation that has a sampled turn of its own, the turns that lead there, in order.

    Raises AlignmentError for a parent that does not stand before its turn.
    """
    parents = [at - 1 if turn.parent is None else turn.parent for at, turn in enumerate(turns)]
    for at, parent in enumerate(parents):
        if not -1 <= parent < at:
            raise AlignmentError(f"turn {at} follows {parent}, which is not before it")
    taken: set[int] = set()
    out: list[list[TurnSpan]] = []
    for end in sorted(set(range(len(turns))) - set(parents)):
        line = [end]
        while parents[line[-1]] >= 0:
            line.append(parents[line[-1]])
        places: list[TurnSpan] = []
        at = 0
        for turn in reversed(line):
            stop = at + len(turns[turn].tokens)
            places.append(
                TurnSpan(turn=turn, start=at, stop=stop, own=turns[turn].completion is not None and turn not in taken)
            )
            at = stop
        if any(place.own for place in places):
            taken.update(line)
            out.append(places)
    return out


def rows(group: int, episode: Episode, *, advantages_T: NDArray[np.float64], oldest: int | None) -> list[Row]:
    """The conversation as sequences to train on. ``advantages_T`` (T,): of the episode's sampled tokens, turn after turn; of
    those, none older than version ``oldest`` is trained on. An agent counts as one sequence, in however many rows."""
    first, at = {}, 0
    for number, turn in enumerate(episode.turns):
        if turn.completion is not None:
            _check_same_tokens(turn.completion, turn.tokens, episode)
            first[number] = at
            at += len(turn.tokens)
    lines = paths(episode.turns)
    made = [_row(group, episode, path, advantages_T, first, oldest) for path in lines]
    trained = [_by_agent(episode, path, row.loss_mask) for path, row in zip(lines, made, strict=True)]
    sampled = [
        _by_agent(episode, path, np.ones(len(row.tokens), np.bool_)) for path, row in zip(lines, made, strict=True)
    ]
    shares, sampled_shares = _shares(trained), _shares(sampled)
    return [
        msgspec.structs.replace(row, share=share, sequence_tokens=own.total() / sampled_share if sampled_share else 0.0)
        for row, share, own, sampled_share in zip(made, shares, sampled, sampled_shares, strict=True)
    ]


def _by_agent(episode: Episode, path: Sequence[TurnSpan], flags: Mask) -> Counter[str]:
    """Flagged tokens of a row by the agent that sampled them, of those that have any."""
    counts: Counter[str] = Counter()
    for place in path:
        if place.own and (count := int(flags[place.start : place.stop].sum())):
            counts[episode.turns[place.turn].speaker] += count
    return counts


def _shares(counts: Sequence[Counter[str]]) -> list[float]:
    """Per row, the sum over its agents of the part of the agent's tokens, in all rows, that is in it."""
    whole = sum(counts, Counter[str]())
    return [sum(count / whole[agent] for agent, count in of_row.items()) for of_row in counts]


def _row(
    group: int,
    episode: Episode,
    path: Sequence[TurnSpan],
    advantages_T: NDArray[np.float64],
    first: dict[int, int],
    oldest: int | None,
) -> Row:
    tokens = concat_tokens([episode.turns[place.turn].tokens for place in path])
    mask, logprobs = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.float32)
    versions, advantages = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), np.float32)
    mixed = np.zeros(len(tokens), np.bool_)
    for place in path:
        completion = episode.turns[place.turn].completion
        if place.own and completion is not None:
            here, earned = slice(place.start, place.stop), first[place.turn]
            versions[here] = completion.versions
            mixed[here] = versions[here] > versions[place.start : place.start + 1]
            logprobs[here] = completion.logprobs
            mask[here] = True
            advantages[here] = advantages_T[earned : earned + place.stop - place.start]
    if oldest is not None:
        mask &= versions >= oldest
    said = [episode.turns[place.turn].completion if place.own else None for place in path]
    return Row(
        group=group,
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.where(mask, logprobs, np.float32(0)),
        versions=np.where(mask, versions, np.int32(0)),
        advantages=np.where(mask, advantages, np.float32(0)),
        teachers=align_with_row(episode, mask, {place.turn: place.start for place in path if place.own}),
        support=join_supports(
            [completion and completion.support for completion in said], [place.stop - place.start for place in path]
        ),
        mixed=mixed & mask if (mixed & mask).any() else None,
        experts=_experts(episode, path, len(tokens)),
    )


def _experts(episode: Episode, path: Sequence[TurnSpan], length: int) -> Experts | None:
    """The experts each token of a row was sent to when it was read (L, layers, k): as in the pass that sampled what follows
    it, else as the engine said of the context; None where no turn says anything."""
    out: Experts | None = None
    for place in path:
        completion = episode.turns[place.turn].completion
        routing = completion.routing if completion is not None else None
        if routing is None:
            continue
        shape = routing.experts.shape[1:]
        if out is None:
            out = unknown_experts(length, shape)
        if out.shape[1:] != shape:
            raise AlignmentError(f"turns of episode {episode.index} of {episode.prompt_id} have experts of {shape}")
        read = len(routing.context)
        if read not in (0, place.start - 1):
            raise AlignmentError(
                f"{read} tokens of context have experts where {place.start} precede turn {place.turn} of episode {episode.index} "
                f"of {episode.prompt_id}"
            )
        unknown = (out[:read] < 0).all(axis=(1, 2))
        out[:read][unknown] = routing.context[unknown]
        if place.start:
            out[place.start - 1 : place.stop - 1] = routing.experts
    return out


def _check_same_tokens(completion: Completion, tokens: np.ndarray, episode: Episode) -> None:
    if not np.array_equal(completion.tokens, tokens):
        raise AlignmentError(
            f"a turn of episode {episode.index} of {episode.prompt_id} has tokens other than those its completion sampled"
        )
