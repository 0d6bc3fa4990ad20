"""The best use of the devices within limits: tensor parallelism first, then the split, then how far to run ahead.

Each step tries a few values around the best so far. The search is greedy: what it returns is the best that it tried, and all that
it tried is returned as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from corrente.errors import ConfigError
from corrente.plan.costs import memory_use
from corrente.plan.predict import Prediction, predict
from corrente.plan.setting import Setting, Split

PARALLEL = (1, 2, 4, 8, 16, 32)
"""Tensor-parallel degrees that are tried."""
SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)
"""Fractions of the devices that generate, tried first."""
AHEAD = (1, 2, 3, 4)
LEAST_SEQUENCES = 8
"""Sequences that an engine must hold at once to be worth a try, where another degree holds so many."""
ENOUGH = 1.01
"""A larger number of versions ahead must be so many times as fast: age costs stability."""

Progress = Callable[[str], None]


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a search: the best prediction, all that were made, and the reasons for the choice."""

    best: Prediction
    tried: tuple[Prediction, ...]
    reasons: tuple[str, ...]


def search(
    setting: Setting,
    *,
    max_ahead: int = 4,
    steps: int = 8,
    of_steps: int = 1000,
    progress: Progress = lambda text: None,
) -> Found:
    """Search for the most samples a second. ConfigError when the model fits in no way that is tried."""
    tried: dict[Split, Prediction] = {}

    def rate(split: Split) -> float:
        if split not in tried:
            tried[split] = predict(setting, split, steps=steps, of_steps=of_steps)
            progress(f"{_name(split)}: {tried[split].samples_per_s:.2f} samples/s")
        return tried[split].samples_per_s

    degrees = _degrees(setting)
    candidates = [split for degree in degrees for split in _splits(setting, degree, (0.5,))]
    if not candidates:
        raise ConfigError(
            f"{setting.model.name} does not fit {setting.devices} x {setting.device.name} with engines and learner apart"
        )
    best = max(candidates, key=rate)
    reasons = [_reason_of_degree(best, candidates, rate)]
    candidates = _splits(setting, best.tensor_parallel, SHARES)
    best = max((best, *candidates), key=rate)
    best = _refined(setting, best, rate)
    for ahead in AHEAD:
        if 1 < ahead <= max_ahead:
            further = msgspec.structs.replace(best, ahead=ahead)
            if rate(further) < ENOUGH * rate(best):
                reasons.append(
                    f"staleness.max = {best.ahead}: {ahead} is not {ENOUGH - 1:.0%} faster, and age costs stability"
                )
                break
            best = further
    else:
        reasons.append(f"staleness.max = {best.ahead}: each version more was faster, up to the limit of {max_ahead}")
    best = _refined(setting, best, rate)
    reasons.insert(1, _reason_of_split(tried[best]))
    everything = sorted(tried.values(), key=lambda made: -made.samples_per_s)
    return Found(best=tried[best], tried=tuple(everything), reasons=tuple(reasons))


def _refined(setting: Setting, best: Split, rate: Callable[[Split], float]) -> Split:
    """The split moved towards engines or learner for as long as that is faster, in steps that halve."""
    step = max(best.tensor_parallel, setting.devices // 16)
    while step >= best.tensor_parallel:
        near = [_moved(setting, best, by) for by in (-step, step)]
        found = max((best, *(split for split in near if split is not None)), key=rate)
        if found == best:
            step //= 2
        best = found
    return best


def _degrees(setting: Setting) -> list[int]:
    """Tensor-parallel degrees with which an engine holds enough sequences; else those with which it holds one."""
    held = {}
    for degree in PARALLEL:
        if 2 * degree <= setting.devices:
            split = Split(generating=degree, training=setting.devices - degree, tensor_parallel=degree)
            held[degree] = memory_use(setting, split).sequences
    enough = [degree for degree, sequences in held.items() if sequences >= LEAST_SEQUENCES]
    return (enough or [degree for degree, sequences in held.items() if sequences])[:3]


def _splits(setting: Setting, degree: int, shares: Sequence[float]) -> list[Split]:
    """Splits with about these shares of generating devices whose learner fits."""
    found: dict[int, Split] = {}
    for share in shares:
        generating = max(degree, round(share * setting.devices / degree) * degree)
        split = Split(generating=generating, training=setting.devices - generating, tensor_parallel=degree)
        if split.training > 0 and memory_use(setting, split).fits:
            found[generating] = split
    return list(found.values())


def _moved(setting: Setting, split: Split, by: int) -> Split | None:
    """The split with so many more generating devices, in whole engines; None where it does not fit."""
    generating = split.generating + round(by / split.tensor_parallel) * split.tensor_parallel
    if not 0 < generating < setting.devices or generating == split.generating:
        return None
    moved = msgspec.structs.replace(split, generating=generating, training=setting.devices - generating)
    return moved if memory_use(setting, moved).fits else None


def _reason_of_degree(best: Split, candidates: Sequence[Split], rate: Callable[[Split], float]) -> str:
    others = ", ".join(
        f"{other.tensor_parallel}: {rate(other) / rate(best):.2f}" for other in candidates if other != best
    )
    compared = f" (samples/s relative to it, at an even split: {others})" if others else ", the only degree that fits"
    return f"tensor parallel {best.tensor_parallel}{compared}"


def _reason_of_split(made: Prediction) -> str:
    split = made.split
    return (
        f"{split.generating} devices generate and {split.training} train: a step's generation takes "
        f"{made.engine_busy * made.step_s * split.generating:,.0f} device-seconds, its training "
        f"{made.learner_busy * made.step_s * split.training:,.0f}"
    )


def _name(split: Split) -> str:
    return f"{split.generating}:{split.training}, tensor parallel {split.tensor_parallel}, {split.label}"
