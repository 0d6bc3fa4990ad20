"""The runtime axis: who runs where."""

from __future__ import annotations

from typing import Literal

from corrente.config.section import Kind, Natural, Seconds


class Inline(Kind, frozen=True, kw_only=True, tag="inline"):
    """Everything in this process: the synchronous baseline, and where to set a breakpoint."""

    threads: Natural = 0
    """torch threads; 0: as many as cores."""


class Procs(Kind, frozen=True, kw_only=True, tag="procs"):
    """A controller in this process, engine and learner in children of it."""

    placement: Literal["shared", "pinned", "priority"] = "shared"
    """shared: both sides may use every core. pinned: cores split. priority: shared, the engine goes first."""
    start_deadline_s: Seconds = 300.0
    """Time the workers get to load their models."""
