"""How long things take and how long completions are: small frozen descriptions that draw from a generator they are given.

They own no randomness. ``generator(seed, *names)`` makes one that depends on what is drawn for and not on when, so that a
simulation's numbers do not change with the order in which its tasks happen to run.
"""

from __future__ import annotations

import math
import random
from typing import Protocol

import msgspec


def generator(seed: int, *names: object) -> random.Random:
    """A generator of its own for (seed, names): the same names give the same draws, in whatever order they are asked for."""
    return random.Random("/".join(map(str, (seed, *names))))


class Distribution(Protocol):
    """Contract: ``draw`` uses nothing but ``rng``; ``mean`` is that of the draws."""

    def draw(self, rng: random.Random) -> float: ...

    @property
    def mean(self) -> float: ...


class Fixed(msgspec.Struct, frozen=True):
    """Always ``value``."""

    value: float

    def draw(self, rng: random.Random) -> float:
        return self.value

    @property
    def mean(self) -> float:
        return self.value


class Uniform(msgspec.Struct, frozen=True, kw_only=True):
    """Evenly between ``low`` and ``high``."""

    low: float
    high: float

    def draw(self, rng: random.Random) -> float:
        return rng.uniform(self.low, self.high)

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2


class LogNormal(msgspec.Struct, frozen=True, kw_only=True):
    """exp(N(log median, sigma)): many short ones and a few that are very long. sigma 1 puts 2% beyond eight medians."""

    median: float
    sigma: float = 1.0

    def draw(self, rng: random.Random) -> float:
        return self.median * math.exp(rng.gauss(0.0, self.sigma))

    @property
    def mean(self) -> float:
        return self.median * math.exp(self.sigma**2 / 2)


class LongTail(msgspec.Struct, frozen=True, kw_only=True):
    """``body`` mostly; ``factor`` times that for the fraction ``share`` of draws."""

    body: Distribution
    factor: float = 10.0
    share: float = 0.05

    def draw(self, rng: random.Random) -> float:
        stretched = rng.random() < self.share
        return self.body.draw(rng) * (self.factor if stretched else 1.0)

    @property
    def mean(self) -> float:
        return self.body.mean * (1.0 + self.share * (self.factor - 1.0))
