"""The buffer axis: what waits between generation and training, and how deep."""

from __future__ import annotations

from corrente.config.section import Kind, Natural


class NoBuffer(Kind, frozen=True, kw_only=True, tag="none"):
    """Strictly alternating: generate a batch, train on it, publish."""


class Double(Kind, frozen=True, kw_only=True, tag="double"):
    """One version ahead: the next batch is generated while this one is trained on."""


class Window(Kind, frozen=True, kw_only=True, tag="window"):
    """Bounded; admission order with a look-ahead window anchored at the oldest group."""

    window: Natural = 0
    """W groups; 1: strict FIFO; 0: max(1, floor(0.3 B)) of the B slots."""


class Stream(Kind, frozen=True, kw_only=True, tag="stream"):
    """Unbounded, in order of completion; only version control (staleness.reject or staleness.mask) bounds age."""

    inflight: Natural = 0
    """Groups generated at once; 0: twice prompts_per_step."""
