"""The progress of a virtual engine: how many decode steps fit into a time, and how long steps take."""

from __future__ import annotations

import math

from corrente.sim.speed import SpeedModel


class DecodeClock:
    """Counts the steps that an engine has done, and the tokens of context that its sequences have.

    While n sequences run, the context grows by n tokens a step. So the next k steps take ``a k + b k^2`` seconds, where a is the
    time of a step of the present context, and b is half of what one step adds to it.
    """

    def __init__(self, speed: SpeedModel) -> None:
        self._speed = speed
        self.steps = 0.0
        self._context = 0.0

    def add(self, tokens: float) -> None:
        """Count a sequence with ``tokens`` of context in."""
        self._context += tokens

    def remove(self, tokens: float, *, last: bool) -> None:
        """Count a sequence out; ``last``: none is left."""
        self._context = 0.0 if last else max(0.0, self._context - tokens)

    def advance(self, seconds: float, sequences: int) -> None:
        """Let so many seconds pass in which ``sequences`` run."""
        linear_s, quadratic_s = self._costs(sequences)
        if quadratic_s:
            # The root of b k^2 + a k - seconds, in the form that loses no digits where b is small.
            done = 2 * seconds / (linear_s + math.sqrt(linear_s * linear_s + 4 * quadratic_s * seconds))
        else:
            done = seconds / linear_s
        self.steps += done
        self._context += done * sequences

    def seconds_until(self, step: float, sequences: int) -> float:
        """Seconds until ``step`` is done, if ``sequences`` run until then."""
        left = max(0.0, step - self.steps)
        linear_s, quadratic_s = self._costs(sequences)
        return left * (linear_s + left * quadratic_s)

    def _costs(self, sequences: int) -> tuple[float, float]:
        context_token_s = self._speed.context_token_s
        return (
            self._speed.decode_s(sequences) + self._context * context_token_s,
            sequences * context_token_s / 2,
        )
