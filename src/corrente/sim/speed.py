"""The cost model of a virtual engine, in seconds."""

from __future__ import annotations

import msgspec


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of generation: a decode step of n sequences takes ``step_s + n * per_sequence_s``; a prompt stalls all of them
    for ``prefill_token_s`` per token, once for a group; a flip stalls them for ``flip_s``."""

    step_s: float = 0.02
    per_sequence_s: float = 0.0005
    prefill_token_s: float = 0.0
    flip_s: float = 0.0

    def decode_s(self, sequences: int) -> float:
        return self.step_s + sequences * self.per_sequence_s
