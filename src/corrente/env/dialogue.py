"""One speaker's view of a conversation, in the tokens that were read and sampled.

Sampled tokens are never tokenised again. The context of the next turn is the tokens so far, with those of what the chat template
adds for new messages: the conversation is rendered as text, and where that begins with the text of the tokens so far, only the
rest is encoded. A template may also rewrite what was said (take the thinking out of older turns, trim, print calls in its own
way), and then the policy is to read what it will read in use. With history "rendered" the conversation then *forks*: the whole of
it is encoded as a context that begins anew, and what was sampled before keeps the turns it has. With "kept" the tokens so far
stay, and what is added is what the template writes for the new messages after a turn of any other content.

Does not sample, and does not call tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from corrente.data.messages import content_text
from corrente.data.types import Completion, Tokens, Turn
from corrente.env.calls import ToolCall
from corrente.env.chat_renderer import ChatRenderer
from corrente.errors import RolloutError
from corrente.prompts.base import Message

History = Literal["rendered", "kept"]


class SampledTurn(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A sampled turn: its index among the turns, its chat message, and its calls, those that cannot be read included."""

    turn: int
    message: dict[str, Any]
    calls: tuple[ToolCall, ...]


class Dialogue:
    """The turns and the context of one speaker.

    ``turns`` is the episode's list, which several dialogues may share; each adds its own, with parents. ``opening``: the
    messages before the first turn. ``tokens``: the prompt's, used where they are what the opening is rendered to.

    RolloutError where the template refuses the messages.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        turns: list[Turn],
        opening: Sequence[Message],
        *,
        speaker: str = "policy",
        history: History = "rendered",
        tokens: Tokens | None = None,
    ) -> None:
        self._renderer, self._turns, self._speaker, self._history = renderer, turns, speaker, history
        open_ended = bool(opening) and opening[-1].get("role") == "assistant"
        self._begun = content_text(opening[-1].get("content")) if open_ended else ""
        """Text of the opening that begins the first turn."""
        self._raw: list[Message] = list(opening[:-1] if open_ended else opening)
        """The messages, with sampled text as it was sampled."""
        self._structured: list[Message] = list(self._raw)
        """The messages, with sampled text split into content and calls."""
        self._text, ids = renderer.render_opening(opening)
        self.opening_text = self._text
        """Text of the first context."""
        opened = np.array(ids, np.int32)
        self.opening: Tokens = tokens if tokens is not None and np.array_equal(tokens, opened) else opened
        """The first context (T0,)."""
        self.context: Tokens = self.opening
        """The tokens that the next turn is sampled after (T,)."""
        self.forks = 0
        """Number of times the conversation was rendered anew."""
        self.tokens_spent = 0
        """Tokens since the opening, sampled and not, those that a fork dropped included; of a fork, only the tokens it added."""
        self._ended = False
        self._leaf = self._add(Turn(speaker=_last_role(opening), tokens=self.opening, parent=-1 if turns else None))

    @property
    def after_opening(self) -> int:
        """Tokens of the context beyond the first one."""
        return len(self.context) - len(self.opening)

    def add_sampled_turn(self, completion: Completion) -> SampledTurn:
        """Record a sampled turn."""
        content = self._renderer.completion_text(completion)
        parsed = self._renderer.parse_turn(content, before=self._text)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if self._speaker != "policy":
            message["name"] = self._speaker
        if readable := [call.as_message() for call in parsed.calls if not call.error]:
            message["tool_calls"] = readable
        begun, self._begun = self._begun, ""
        self._raw.append({"role": "assistant", "content": begun + content})
        self._structured.append({**message, "content": begun + parsed.content})
        turn = Turn(speaker=self._speaker, tokens=completion.tokens, completion=completion, parent=self._leaf)
        self._leaf = self._add(turn)
        self.context = np.concatenate([self.context, completion.tokens])
        self.tokens_spent += len(completion.tokens)
        text = self._renderer.decode_tokens(completion.tokens)
        self._text, self._ended = self._text + text, text != content
        return SampledTurn(turn=self._leaf, message=message, calls=parsed.calls)

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Add the messages of others; afterwards the context ends where the next turn begins."""
        self._raw += messages
        self._structured += messages
        role, refused = _last_role(messages), None
        anew = ""
        for history in (self._raw, self._structured) if self._renderer.shows_tools else (self._raw,):
            try:
                anew = self._renderer.render(history)
            except RolloutError as error:
                refused = error
                continue
            if anew.startswith(self._text):
                return self._append(anew[len(self._text) :], role)
        if self._history == "kept":
            return self._append(self._added(messages), role)
        if not anew:
            raise refused or RolloutError("the chat template renders the conversation to nothing")
        return self._fork(anew, role)

    def _append(self, added: str, role: str) -> None:
        tokens = np.array(self._renderer.encode(added), np.int32)
        self._leaf = self._add(Turn(speaker=role, tokens=tokens, parent=self._leaf))
        self.context, self._text = np.concatenate([self.context, tokens]), self._text + added
        self.tokens_spent += len(tokens)

    def _fork(self, text: str, role: str) -> None:
        self.forks += 1
        before, self.context = len(self.context), np.array(self._renderer.encode(text), np.int32)
        self.tokens_spent, self._text = self.tokens_spent + max(0, len(self.context) - before), text
        self._leaf = self._add(Turn(speaker=role, tokens=self.context, parent=-1))

    def _added(self, messages: Sequence[Message]) -> str:
        """Text that the template adds for ``messages`` after a turn, without the end token that was sampled."""
        added = self._renderer.after_turn(messages)
        return added[len(self._renderer.leading_special(added)) :] if self._ended else added

    def _add(self, turn: Turn) -> int:
        self._turns.append(turn)
        return len(self._turns) - 1


def _last_role(messages: Sequence[Message]) -> str:
    return str(messages[-1].get("role", "user")) if messages else "user"
