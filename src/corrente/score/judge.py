"""An LLM as judge: a templated question to any OpenAI-compatible endpoint, and a number parsed from its answer.

Retries are those of endpoint.py. The judge is asked with temperature 0.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Sequence
from typing import Any

import httpx2 as httpx
import msgspec

from corrente.data.types import Group
from corrente.errors import ConfigError, RewardError
from corrente.score.base import ScoreResult
from corrente.score.endpoint import SHOWN_CHARACTERS, Endpoint


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _ChatCompletion(msgspec.Struct):
    """The fields of a chat completion that are read."""

    choices: list[_Choice]


class JudgeScale(msgspec.Struct, frozen=True, kw_only=True):
    """Finds a number in an answer and scales it: ``lowest`` becomes 0 and ``highest`` 1.

    ``field``: the answer holds a JSON object, and the number is this key of it. Else ``pattern``: the number is the group of the
    last match. A number outside the two ends is no answer.
    """

    lowest: float = 0.0
    highest: float = 10.0
    field: str = ""
    pattern: str = r"(-?\d+(?:\.\d+)?)"

    def parse_reward(self, text: str) -> float:
        """Parse the reward of an answer. ValueError, with the reason, where there is none."""
        value = self._number_of_field(text) if self.field else self._number_of_pattern(text)
        if not self.lowest <= value <= self.highest:
            raise ValueError(f"{value:g} is not between {self.lowest:g} and {self.highest:g}")
        return (value - self.lowest) / (self.highest - self.lowest)

    def _number_of_pattern(self, text: str) -> float:
        found = re.findall(self.pattern, text)
        if not found:
            raise ValueError(f"nothing in it matches {self.pattern!r}")
        return _finite_number(found[-1])

    def _number_of_field(self, text: str) -> float:
        begin, end = text.find("{"), text.rfind("}")
        try:
            answer = msgspec.json.decode(text[begin : end + 1], type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ValueError(f"it is no JSON object ({error})") from None
        if self.field not in answer:
            raise ValueError(f"it has no {self.field!r}")
        return _finite_number(answer[self.field])


class JudgeSource:
    """Implements Source with an LLM judge. ``template`` is filled in with {prompt}, {completion} and the prompt's columns.
    ``close`` when done."""

    single = True

    def __init__(
        self,
        *,
        name: str,
        url: str,
        model: str,
        template: str,
        scale: JudgeScale,
        system: str = "",
        token: str = "",
        verify: bool | str = True,
        max_tokens: int = 256,
        patience_s: float = math.inf,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.name = name
        self._endpoint = Endpoint(
            url.rstrip("/") + "/chat/completions",
            name=name,
            token=token,
            verify=verify,
            deadline_s=patience_s,
            transport=transport,
        )
        self._model, self._template, self._system, self._scale = model, template, system, scale
        self._max_tokens = max_tokens

    async def wait_until_ready(self) -> None:
        """See Source."""

    async def close(self) -> None:
        """Close its connections."""
        await self._endpoint.close()

    async def score_episodes(self, group: Group) -> Sequence[ScoreResult]:
        """See Source."""
        (episode,) = group.episodes
        fields = {**group.prompt.fields, "prompt": group.prompt.text, "completion": episode.text}
        answer = await self._ask(self._template.format_map(fields))
        try:
            score = self._scale.parse_reward(answer)
        except ValueError as error:
            raise RewardError(f"{self.name}: the judge said {answer[-SHOWN_CHARACTERS:]!r}: {error}") from None
        return [ScoreResult(score=score, extra={f"{self.name}/said": answer})]

    async def _ask(self, question: str) -> str:
        """Ask the judge. RewardError where it gives no answer, and for anything but a chat completion."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        body = {
            "model": self._model,
            "messages": [*system, {"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self._max_tokens,
        }
        return self._content(await self._endpoint.ask(body))

    def _content(self, body: bytes) -> str:
        try:
            chat = msgspec.json.decode(body, type=_ChatCompletion)
        except msgspec.DecodeError as error:
            raise RewardError(f"{self.name}: {self._endpoint.url} answered with no chat completion: {error}") from None
        if not chat.choices or not chat.choices[0].message.content:
            raise RewardError(f"{self.name}: the judge said nothing")
        return chat.choices[0].message.content


def template_fields(template: str) -> frozenset[str]:
    """Names of the fields in a template. ConfigError when it is no template."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ConfigError(f"template = {template!r}: {error}; braces that are no field are written twice") from None
    if odd := sorted(name for name in names if not name.isidentifier()):
        raise ConfigError(f"template: {{{odd[0]}}} is no name of a column; braces that are no field are written twice")
    return frozenset(names)


def _finite_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{value!r} is no number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not finite")
    return number
