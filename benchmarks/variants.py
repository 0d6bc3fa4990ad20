"""Objectives and corrections that corrections.py and toy_corrections.py compare, as keys of a config."""

from __future__ import annotations

UNBOUND = ["algo.objective.delta=none", "algo.objective.epsilon=0.99", "algo.objective.epsilon_high=1e6"]
VARIANTS: dict[str, list[str]] = {
    "reinforce": ["algo.objective.kind=reinforce"],
    "reinforce, untruncated weight": ["algo.objective.kind=reinforce", "staleness.correct=tis", "staleness.correct_cap=1e6"],
    "reinforce, tis 2": ["algo.objective.kind=reinforce", "staleness.correct=tis"],
    "reinforce, sequence tis 2": ["algo.objective.kind=reinforce", "staleness.correct=tis", "staleness.correct_level=sequence"],
    "reinforce, mis 2": ["algo.objective.kind=reinforce", "staleness.correct=mis"],
    "no clip": UNBOUND,
    "clip": ["algo.objective.delta=none"],
    "clip, dual": [],
    "clip, opsm": ["staleness.off_policy_mask_threshold=0.5"],
    "decoupled, tis 2": ["algo.proximal=recompute", "staleness.correct=tis"],
    "decoupled, icepop": [
        "algo.proximal=recompute",
        "staleness.correct=icepop",
        "staleness.correct_floor=0.5",
        "staleness.correct_cap=5.0",
    ],
    "decoupled, interpolated": ["algo.proximal=interpolate", "staleness.correct=tis"],
    "geometric band, tis 2": ["staleness.band=geometric", "staleness.band_low=0.5", "staleness.correct=tis"],
    "cispo 5": ["algo.objective.kind=cispo", "algo.objective.epsilon_high=5.0"],
    "gspo": ["algo.objective.kind=gspo", "algo.objective.epsilon=3e-4", "algo.objective.epsilon_high=4e-4"],
    "gmpo": ["algo.objective.kind=gmpo", "algo.objective.epsilon=0.33", "algo.objective.epsilon_high=0.49"],
    "sapo": ["algo.objective.kind=sapo"],
    "topr": ["algo.objective.kind=topr"],
    "kimi_k15": ["algo.objective.kind=kimi_k15"],
    "dppo_tv": ["algo.objective.kind=dppo_tv"],
    "dppo_kl": ["algo.objective.kind=dppo_kl", "algo.objective.mask_low=0.05", "algo.objective.mask_high=0.05"],
    "ipo": ["algo.objective.kind=ipo"],
}

CORE = ("reinforce", "reinforce, untruncated weight", "reinforce, tis 2", "clip", "clip, dual", "decoupled, tis 2")
CORE += ("decoupled, icepop", "dppo_tv", "ipo")
"""What is run unless --variants says otherwise: each way to bound a weight once, and two without a bound."""
