"""How long completions are: a log-normal body cut at the budget, with a part that all completions of a prompt share.

Answers to one prompt resemble one another in length (Seer, arXiv:2511.14617), and a group ends with its longest member, so the
spread between prompts matters beside the spread within them.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable

import msgspec

from corrente.data.types import Request
from corrente.errors import ConfigError
from corrente.sim.distributions import Distribution, Fixed, LogNormal, generator

Z99 = 2.3263478740408408
"""The normal quantile that 1 in 100 exceeds."""
LARGEST_SIGMA = 2.0
SPREAD = 0.6
"""The sigma of a length of which only the mean is given: 1 in 100 is then 3.4 times the mean."""


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of completions: their mean after the cut, the length that 1 in 100 exceeds (0: not said), the cut (0: none).

    ``shared``: the part of the variance of the logarithm that completions of one prompt share.
    """

    mean: float
    tail: float = 0.0
    maximum: int = 0
    shared: float = 0.5

    @property
    def sigma(self) -> float:
        """The standard deviation of the logarithm.

        Mean m and 99th percentile q of a log-normal give ``ln(q / m) = z s - s^2 / 2``, solved for the smaller s.
        """
        tail = self.tail
        if not tail:
            return SPREAD
        ratio = math.log(max(1.0, tail / self.mean))
        root = Z99 * Z99 - 2 * ratio
        return LARGEST_SIGMA if root <= 0 else min(LARGEST_SIGMA, Z99 - math.sqrt(root))

    @property
    def location(self) -> float:
        """The mean of the logarithm, such that the mean after the cut is ``mean``; found by bisection."""
        sigma, mean = self.sigma, self.mean
        plain = math.log(mean) - sigma * sigma / 2
        if not self.maximum or sigma == 0:
            return plain
        low, high = plain, math.log(self.maximum) + 4 * sigma
        if self._cut_mean(high) < mean:
            return high
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._cut_mean(middle) < mean else (low, middle)
        return (low + high) / 2

    def _cut_mean(self, location: float) -> float:
        """E[min(X, c)] of a log-normal: exp(mu + s^2/2) N((ln c - mu - s^2)/s) + c (1 - N((ln c - mu)/s))."""
        sigma, cut = self.sigma, float(self.maximum)
        body = math.exp(location + sigma * sigma / 2) * _normal((math.log(cut) - location - sigma * sigma) / sigma)
        return body + cut * (1 - _normal((math.log(cut) - location) / sigma))

    def drawer(self, seed: int) -> Callable[[Request], float]:
        """A function that draws the length of a request's completion, which depends on its prompt and its seed alone."""
        location, sigma = self.location, self.sigma
        between, within = sigma * math.sqrt(self.shared), sigma * math.sqrt(1 - self.shared)
        cut = float(self.maximum or math.inf)

        def draw(request: Request) -> float:
            prompt = zlib.crc32(request.tokens.tobytes())
            common = generator(seed, "length", prompt).gauss(0.0, 1.0) if between else 0.0
            own = generator(seed, "length", prompt, request.seed).gauss(0.0, 1.0) if within else 0.0
            return max(1.0, min(cut, math.exp(location + between * common + within * own)))

        return draw


def _normal(value: float) -> float:
    return 0.5 * (1 + math.erf(value / math.sqrt(2)))


NUMBER = re.compile(r"^(?:(mean|tail|max|shared)\s+)?([0-9.]+)\s*([kKmM]?)$")


def parse_lengths(text: str) -> Lengths:
    """Lengths from "mean 3200, tail 16k, max 32k, shared 0.5" or a bare number. ConfigError for anything else."""
    values: dict[str, float] = {}
    for part in text.split(","):
        match = NUMBER.match(part.strip())
        if match is None:
            raise ConfigError(f'--tokens {text!r}: {part.strip()!r} is not "mean N", "tail N", "max N" or "shared X"')
        key, number, unit = match.groups()
        values[key or "mean"] = float(number) * {"": 1, "k": 1024, "m": 1024 * 1024}[unit.lower()]
    mean, tail, maximum = values.get("mean", 0.0), values.get("tail", 0.0), values.get("max", 0.0)
    if mean < 1:
        raise ConfigError(f"--tokens {text!r}: it must name a mean of at least 1")
    if tail and tail < mean:
        raise ConfigError(f"--tokens {text!r}: the tail, which 1 in 100 exceeds, lies below the mean")
    if maximum and maximum <= mean:
        raise ConfigError(f"--tokens {text!r}: the maximum lies at or below the mean")
    shared = values.get("shared", 0.5)
    if not 0 <= shared <= 1:
        raise ConfigError(f"--tokens {text!r}: shared must lie between 0 and 1")
    return Lengths(mean=mean, tail=tail, maximum=round(maximum), shared=shared)


def parse_seconds(text: str, *, flag: str) -> Distribution:
    """A duration from "2 s" or "2 s, tail 30 s", where 1 in 100 exceeds the tail. ConfigError for anything else."""
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.match(r"^(?:(mean|tail)\s+)?([0-9.]+)\s*s?$", part.strip())
        if match is None:
            raise ConfigError(f'{flag} {text!r}: {part.strip()!r} is not "N s" or "tail N s"')
        found[match[1] or "mean"] = float(match[2])
    mean, tail = found.get("mean", 0.0), found.get("tail", 0.0)
    if not mean or not tail:
        return Fixed(mean)
    if tail < mean:
        raise ConfigError(f"{flag} {text!r}: the tail, which 1 in 100 exceeds, lies below the mean")
    sigma = Lengths(mean=mean, tail=tail).sigma
    return LogNormal(median=mean / math.exp(sigma * sigma / 2), sigma=sigma)
