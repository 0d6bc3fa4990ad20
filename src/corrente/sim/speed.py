"""Cost models of a virtual engine, in seconds."""

from __future__ import annotations

from typing import Protocol

import msgspec


class SpeedModel(Protocol):
    """The cost of generation as a virtual engine sees it.

    A decode step of n sequences with c tokens of context in all takes ``decode_s(n) + c * context_token_s``; a prompt stalls all
    of them for ``prefill_token_s`` per token, once for a group; a flip stalls them for ``flip_s``.
    """

    def decode_s(self, sequences: int) -> float: ...

    @property
    def context_token_s(self) -> float: ...

    @property
    def prefill_token_s(self) -> float: ...

    @property
    def flip_s(self) -> float: ...


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Implements SpeedModel: a decode step of n sequences takes ``step_s + n * per_sequence_s``, and the share of the context."""

    step_s: float = 0.02
    per_sequence_s: float = 0.0005
    context_token_s: float = 0.0
    prefill_token_s: float = 0.0
    flip_s: float = 0.0

    def decode_s(self, sequences: int) -> float:
        return self.step_s + sequences * self.per_sequence_s
