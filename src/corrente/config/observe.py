"""Settings of a run's records, and of its alarms."""

from __future__ import annotations

from typing import Literal

from corrente.config.section import Fraction, Natural, NonNegative, Section


class Observe(Section, frozen=True, kw_only=True):
    samples: Natural = 4
    """Episodes a step written to samples.jsonl."""
    timeline: bool = True
    """Write timeline.jsonl."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that get numbers and samples as well as the run folder; one that fails costs a warning."""
    project: str = "corrente"
    """Project of wandb and trackio."""
    run_name: str = ""
    """Name of the run there; empty: that of the run folder."""


class Alarm(Section, frozen=True, kw_only=True):
    """Bands that what a step reports of its samples should stay in; a warning, once, where it does not."""

    ess_min: Fraction = 0.5
    """Least effective sample size of a step (ratio/ess), as a part of its tokens. 0: no alarm."""
    mismatch_max: NonNegative = 0.1
    """Largest mean gap, in nats, between engine and learner about tokens of the same weights. 0: no alarm."""
    action: Literal["warn", "stop"] = "warn"
    """stop: end the run at the next version, with a checkpoint and an error."""
