"""Small valid values of the data types and of a config, for suites and tests: ``from corrente.testing import samples``.

Every builder is keyword-only and has a default for everything, so that a test names only what it is about. Sequences of numbers
become arrays of the right dtype. numpy only: nothing here imports torch.

Shapes: T0 tokens of a prompt, T tokens of one completion, L tokens of one training row (prompt + completion).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from corrente.config import LearnerConfig, Run, RunConfig
from corrente.config.section import Section
from corrente.data.types import (
    Batch,
    Completion,
    Episode,
    FinishReason,
    Group,
    Prompt,
    Request,
    Row,
    Sampling,
    Span,
    Tokens,
    Turn,
)

Ids = Sequence[int] | NDArray[np.integer]
Ints = int | Ids
Floats = float | Sequence[float] | NDArray[np.floating]
PROMPT = (11, 12, 13, 14)
"""Tokens of a prompt (T0,), unless others are given."""


def config(*, model: object = None, **sections: Section | Mapping[str, Any]) -> RunConfig:
    """A run of 4 steps of 2 groups of 2, with a learning rate at which a tiny model visibly moves.

    ``sections``: those of RunConfig, each a section or its table (``algo={"loss": "dppo"}``; a section of several kinds needs its
    ``kind``). ``model``: the path or name of the model. Tables are converted, not checked: ``check_config`` does that.
    """
    hints = get_type_hints(RunConfig)
    values: dict[str, Any] = {
        "run": Run(steps=4, prompts_per_step=2, group_size=2),
        "learner": LearnerConfig(lr=1e-2),
        **sections,
    }
    if model is not None:
        values["model"] = {"path": str(model)}
    tables = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    return RunConfig(**values | {name: msgspec.convert(table, hints[name]) for name, table in tables.items()})


def prompt(
    *,
    id: str = "0/0",
    tokens: Ids = PROMPT,
    text: str = "1 + 1 =",
    messages: Sequence[dict[str, Any]] = (),
    fields: dict[str, Any] | None = None,
) -> Prompt:
    """A prompt of ``tokens`` (T0,). ``fields``: the dataset's other columns; by default an ``answer``."""
    columns = {"answer": "2"} if fields is None else fields
    return Prompt(id=id, tokens=_ids(tokens), text=text, messages=tuple(messages), fields=columns)


def request(
    *,
    id: str = "r",
    tokens: Ids = PROMPT,
    seed: int = 0,
    group: str = "",
    written: int = 0,
    sampling: Sampling | None = None,
    **draws: Any,
) -> Request:
    """A request for a completion of ``tokens`` (T0,). ``draws``: fields of Sampling, in place of a whole ``sampling``."""
    sampling = Sampling(**{"max_tokens": 8, **draws}) if sampling is None else sampling
    return Request(id=id, tokens=_ids(tokens), sampling=sampling, seed=seed, group=group, written=written)


def completion(
    *,
    tokens: Ids | None = None,
    versions: Ints = 0,
    logprobs: Floats = -0.5,
    text: str | None = None,
    finish_reason: FinishReason = "stop",
    **values: Any,
) -> Completion:
    """A sampled completion: ``tokens`` (T,), each with a log-prob and the version that sampled it (T,), or one for all.

    Without ``tokens`` they count from 0: one per entry of ``versions``, else one per character of ``text``, else three.
    ``values``: support and routing.
    """
    if tokens is None:
        tokens = range(np.size(versions) if np.ndim(versions) else 3 if text is None else len(text))
    count = len(tokens)
    return Completion(
        tokens=_ids(tokens),
        logprobs=_along(logprobs, count, np.float32),
        spans=_spans(_along(versions, count, np.int32)),
        finish_reason=finish_reason,
        text=" ".join(str(int(token)) for token in tokens) if text is None else text,
        **values,
    )


def turn(of: Completion | Ids = PROMPT, *, speaker: str = "", parent: int | None = None) -> Turn:
    """A turn: a completion that the policy sampled, or the tokens (T,) that "user" gave; ``speaker`` names another."""
    if isinstance(of, Completion):
        return Turn(speaker=speaker or "policy", tokens=of.tokens, completion=of, parent=parent)
    return Turn(speaker=speaker or "user", tokens=_ids(of), parent=parent)


def episode(
    *,
    group: int = 0,
    index: int = 0,
    prompt_id: str = "0/0",
    turns: Sequence[Turn | Completion | Ids] | None = None,
    versions: Ints = (0, 0, 0),
    reward: float | None = None,
    **values: Any,
) -> Episode:
    """One playing of a prompt. ``turns``: turns, or what ``turn`` makes one of, each following the one before.

    Without ``turns``: the prompt, and a completion of ``versions``; the prompt alone when ``versions`` is empty.
    ``values``: other fields of Episode.
    """
    if turns is None:
        turns = [PROMPT, *_sampled(versions)]
    made = tuple(of if isinstance(of, Turn) else turn(of) for of in turns)
    if reward is not None and "scores" not in values:
        values["scores"] = {"reward": reward}
    return Episode(prompt_id=prompt_id, group_id=group, index=index, turns=made, reward=reward, **values)


def group(
    *,
    id: int = 0,
    prompt: Prompt | None = None,
    episodes: Sequence[Episode] | None = None,
    texts: Sequence[str] | None = None,
    size: int = 2,
    versions: Ints = (0, 0, 0),
    rewards: Sequence[float | None] | None = None,
    admitted_version: int = 0,
    **values: Any,
) -> Group:
    """Episodes of one prompt: those given; else one per completion of ``texts``; else one per reward; else ``size`` of them.

    The prompt's id is "0/``id``" unless one is given. ``values``: other fields of every episode that is made here.
    """
    prompt = _prompt(id=f"0/{id}") if prompt is None else prompt
    if episodes is None:
        earned: Sequence[float | None] = [None] * (size if texts is None else len(texts))
        answers = _sampled(versions)
        episodes = [
            episode(
                group=id,
                index=at,
                prompt_id=prompt.id,
                turns=[prompt.tokens, *(answers if texts is None else [completion(text=texts[at])])],
                reward=reward,
                **values,
            )
            for at, reward in enumerate(earned if rewards is None else rewards)
        ]
    return Group(id=id, prompt=prompt, episodes=tuple(episodes), admitted_version=admitted_version)


def row(
    *,
    group: int = 0,
    tokens: Ids = (*PROMPT, 5, 6, 7),
    prompt_tokens: int = len(PROMPT),
    loss_mask: Sequence[bool] | None = None,
    logprobs: Floats = -0.5,
    versions: Ints = 0,
    advantages: Floats = 1.0,
    **values: Any,
) -> Row:
    """A training row of ``tokens`` (L,), trained on all but the first ``prompt_tokens``, or where ``loss_mask`` (L,) says.

    ``logprobs``, ``versions`` and ``advantages`` are (L,), or one for all; zero where the mask is not set. ``values``: other
    fields of Row.
    """
    count = len(tokens)
    mask = np.arange(count) >= prompt_tokens if loss_mask is None else np.asarray(loss_mask, np.bool_)
    return Row(
        group=group,
        tokens=_ids(tokens),
        loss_mask=mask,
        logprobs=np.where(mask, _along(logprobs, count, np.float32), np.float32(0)),
        versions=np.where(mask, _along(versions, count, np.int32), np.int32(0)),
        advantages=np.where(mask, _along(advantages, count, np.float32), np.float32(0)),
        **values,
    )


def batch(
    *,
    rows: Sequence[Row] | None = None,
    step: int = 0,
    version: int = 0,
    sequences: int | None = None,
    tokens: int | None = None,
) -> Batch:
    """The rows of one step; by default two of one group, of advantage 1 and -1.

    ``sequences`` and ``tokens``, the denominators, count the rows and their trained tokens unless they are given.
    """
    rows = (row(advantages=1.0), row(advantages=-1.0)) if rows is None else rows
    trained = sum(int(one.loss_mask.sum()) for one in rows)
    return Batch(
        step=step,
        version=version,
        rows=tuple(rows),
        sequences=len(rows) if sequences is None else sequences,
        tokens=trained if tokens is None else tokens,
    )


_prompt = prompt  # the name is a parameter in group


def _ids(tokens: Ids) -> Tokens:
    return np.asarray(tokens, np.int32)


def _along(values: Any, count: int, dtype: type[np.generic]) -> Any:
    """An array of its own of ``values``, one per token, or one for all ``count`` of them."""
    return np.full(count, values, dtype) if np.ndim(values) == 0 else np.array(values, dtype)


def _sampled(versions: Ints) -> list[Completion]:
    """A completion of one token per version; none of no versions."""
    return [] if np.size(versions) == 0 else [completion(versions=versions)]


def _spans(versions: Tokens) -> tuple[Span, ...]:
    spans: list[Span] = []
    for version, run in itertools.groupby(versions.tolist()):
        start = spans[-1].stop if spans else 0
        spans.append(Span(version, start, start + len(list(run))))
    return tuple(spans)
