"""The numbers of a run, derived from its config."""

from __future__ import annotations

import msgspec

from corrente.config import Alarm, Eval, Filter, Limits


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a run. ``max_age``: the largest age in versions of a trained token, asserted at every consumption; None: no
    bound. ``window``: how far past the oldest group consumption looks; 0: it takes in order of completion."""

    steps: int
    prompts_per_step: int
    group_size: int
    seed: int = 0
    publish_every: int = 1
    publish_retries: int = 3
    max_age: int | None = None
    window: int = 1
    checkpoint_every: int = 0
    samples_per_step: int = 0
    limits: Limits = Limits()
    filter: Filter = Filter()
    eval: Eval = Eval()
    alarm: Alarm = Alarm()
