"""The staleness axis: the tokens that may be trained on, and their weight."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from corrente.config.section import Natural, NonNegative, PositiveFloat, Section


class Staleness(Section, frozen=True, kw_only=True):
    """Gate, reject, mask and correct; any combination. The order of corrections is that of docs/reference/algorithms.md."""

    max: Natural = 1
    """S: versions the generator may run ahead. Fixed by buffer.kind none (0) and double (1), unused by stream."""
    reject: Natural | None = None
    """Drop a group whose oldest trained token is older than this many versions when it would be trained on."""
    mask: Natural | None = None
    """Withhold from the loss tokens older than this many versions; the reward stays in the baseline."""
    decay: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Weight of a token in the loss per version of its age; 1: age does not matter."""
    veto: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Leave out a sequence in which any token's ratio to the behaviour policy is below this."""
    band: Literal["none", "geometric", "product", "k2", "k3"] = "none"
    """Leave out sequences whose ratio to the behaviour policy is outside band_low and band_high: geometric mean, product,
    or the mean over tokens of an estimate of the divergence."""
    band_low: NonNegative = 0.0
    """Least value of the band's statistic that is kept."""
    band_high: PositiveFloat = 2.0
    """Largest value of the band's statistic that is kept."""
    off_policy_mask_threshold: PositiveFloat | None = None
    """Leave out tokens with a negative advantage in sequences whose mean log-ratio, behaviour over current, is above this."""
    correct: Literal["none", "tis", "mis", "icepop"] = "none"
    """Importance weight of sampled tokens in the loss: none beyond the objective's own ratio; truncated at correct_cap;
    left out beyond correct_cap; left out outside correct_floor and correct_cap."""
    correct_level: Literal["token", "sequence", "geometric"] = "token"
    """The ratio that is weighed: each token's ratio, the product over its sequence, or the geometric mean over its sequence."""
    correct_cap: PositiveFloat = 2.0
    """The largest weight: tis truncates there, mis and icepop leave out tokens above it."""
    correct_cap_negative: PositiveFloat | None = None
    """The cap where the advantage is negative. None: correct_cap."""
    correct_floor: NonNegative = 0.0
    """The least weight: tis raises to it, icepop leaves out tokens below it."""
    normalise: bool = False
    """Divide the weights of a step by their mean over the tokens that are kept. Costs a forward pass before the first update."""
