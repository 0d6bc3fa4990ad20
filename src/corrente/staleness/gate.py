"""The gate: how many groups may be admitted, and the age that follows from it. Pure functions of the config.

Q = prompts_per_step x sync.every groups are trained per version, B = (S + 1) Q groups hold a slot at most, W is the look-ahead
window. Then at consumption no token is older than

    S + ceil((W - 1) / Q)      versions, and 0 for S = 0 whatever W is.

Derived in docs/explanation/staleness.md, asserted by the pipeline at every consumption.
"""

from __future__ import annotations

from corrente.config import Double, NoBuffer, RunConfig, Stream, Window


def groups_per_version(config: RunConfig) -> int:
    """Q: groups trained between two versions."""
    return config.run.prompts_per_step * config.sync.every


def versions_ahead(config: RunConfig) -> int | None:
    """S: versions the generator may run ahead; None for stream, whose admission does not look at versions."""
    match config.buffer:
        case NoBuffer():
            return 0
        case Double():
            return 1
        case Window():
            return config.staleness.max
        case Stream():
            return None


def slots(config: RunConfig) -> int:
    """B: groups that may be admitted and whose weights are not live yet; 0: no limit."""
    ahead = versions_ahead(config)
    return 0 if ahead is None else (ahead + 1) * groups_per_version(config)


def window(config: RunConfig) -> int:
    """W: how far past the oldest group consumption may look; 0 for stream, which takes in order of completion."""
    match config.buffer:
        case Window(window=0):
            return max(1, (3 * slots(config)) // 10)
        case Window(window=given):
            return given
        case Stream():
            return 0
        case _:
            return 1


def generating(config: RunConfig) -> int:
    """Groups that generate at once at most: all that have a slot, or for stream ``buffer.inflight``; unset, two steps' worth."""
    match config.buffer:
        case Stream(inflight=inflight):
            return inflight or 2 * config.run.prompts_per_step
        case _:
            return slots(config)


def age_bound(*, ahead: int, window: int, groups_per_version: int) -> int:
    """The theorem: S + ceil((W - 1) / Q); 0 for S = 0."""
    return 0 if ahead == 0 else ahead + -((1 - window) // groups_per_version)


def max_age(config: RunConfig) -> int | None:
    """Largest age of a trained token that this config can produce; None: unbounded."""
    ahead = versions_ahead(config)
    bounds = [b for b in (config.staleness.reject, config.staleness.mask) if b is not None]
    if ahead is not None:
        bounds.append(age_bound(ahead=ahead, window=window(config), groups_per_version=groups_per_version(config)))
    return min(bounds, default=None)
