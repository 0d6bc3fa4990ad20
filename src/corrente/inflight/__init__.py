"""Axis 5, partial rollouts: what happens to a live generation when version v + 1 lands.

- swap: goes on at once with the cache it has. No token lost, shortest pause; later tokens attend to keys of older weights.
- recompute: goes on with a cache rebuilt under the new weights. No token lost; costs one forward of every live prefix.
- resume: is aborted and sent again with what it had written. No token lost; costs what recompute does, and works with any engine
  that can abort.
- drain: requests finish first. No sequence mixes versions; the engine waits for the longest.
- barrier: groups finish first. No group mixes versions; the wait includes turns and tools.
- cancel: goes on as with swap, but groups that are too old are given up as wholes and others admitted. Costs their tokens.
- snapshot: finishes under the weights it began with while new requests use the new ones. No sequence mixes versions and nobody
  waits, until a sequence outlives a second version: that one is not staged before.
"""

from __future__ import annotations

from collections.abc import Mapping

from corrente.config import Barrier, Cancel, Drain, OldWeights, Recompute, Resume, Swap

KINDS: Mapping[type, str] = {
    Swap: "corrente.inflight.policies:SwapPolicy",
    Recompute: "corrente.inflight.policies:RecomputePolicy",
    Resume: "corrente.inflight.policies:ResumePolicy",
    Drain: "corrente.inflight.policies:DrainPolicy",
    Barrier: "corrente.inflight.policies:BarrierPolicy",
    Cancel: "corrente.inflight.policies:CancelPolicy",
    OldWeights: "corrente.inflight.policies:OldWeightsPolicy",
}
"""Section of the config -> dotted path of the policy, which is built with the keys of the section as keyword arguments."""
