"""Weights through memory shared by learner and engine: a publish copies once, a flip copies nothing.

The learner, in its process, writes version v + 1 into the spare slot in the layout the engine wants, while the engine goes on
decoding from the other; then the engine, between two decode steps, points its tensors at the new slot. This end lives in the
controller and touches no byte of it. One host only, and CPU memory only: an accelerator's engine needs another transport.
"""

from __future__ import annotations

from corrente.sync.slots import SlotSync


class ShmSync(SlotSync):
    """``export`` asks the learner's process to write; ``engine.apply`` asks the engine's process to flip."""
