"""Groups to be scored, for the tests of score/."""

from __future__ import annotations

from typing import Any

import numpy as np

from corrente.data.types import Completion, Episode, Group, Prompt, Span, Turn


def said(text: str, tokens: list[int] | None = None) -> Completion:
    ids = np.array(list(range(len(text))) if tokens is None else tokens, np.int32)
    spans = (Span(0, 0, len(ids)),) if len(ids) else ()
    return Completion(tokens=ids, logprobs=np.zeros(len(ids), np.float32), spans=spans, finish_reason="stop", text=text)


def episode(index: int, text: str, *, tokens: list[int] | None = None, prompt: tuple[int, ...] = (), **values: Any):
    completion = said(text, tokens)
    asked = (Turn(speaker="user", tokens=np.array(prompt, np.int32)),) if prompt else ()
    answered = Turn(speaker="policy", tokens=completion.tokens, completion=completion, parent=0 if prompt else None)
    return Episode(prompt_id="0/0", group_id=3, index=index, turns=(*asked, answered), **values)


def group(*texts: str, text: str = "1 + 1 =", version: int = 0, **fields: Any) -> Group:
    prompt = Prompt(id="0/0", tokens=np.array([1, 2], np.int32), text=text, fields=fields or {"answer": "2"})
    episodes = tuple(episode(i, t) for i, t in enumerate(texts))
    return Group(id=3, prompt=prompt, episodes=episodes, admitted_version=version)
