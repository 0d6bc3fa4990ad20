"""The policy objectives by the names of ``algo.loss``."""

from __future__ import annotations

from collections.abc import Mapping

from corrente.algo import cispo, clip, dppo, dro, gmpo, gspo, kimi, reinforce, sapo, topr, vespo
from corrente.algo.policy import PolicyFunction

OBJECTIVES: Mapping[str, PolicyFunction] = {
    "dapo": clip.clip,
    "grpo": clip.clip,
    "bnpo": clip.clip,
    "dr_grpo": clip.clip,
    "luspo": clip.clip,
    "gspo": gspo.gspo,
    "gspo_token": gspo.gspo_token,
    "gmpo": gmpo.gmpo,
    "cispo": cispo.cispo,
    "sapo": sapo.sapo,
    "vespo": vespo.vespo,
    "topr": topr.topr,
    "kimi_k15": kimi.kimi_k15,
    "kimi_k2": kimi.kimi_k2,
    "dppo_tv": dppo.dppo_tv,
    "dppo_kl": dppo.dppo_kl,
    "ipo": dppo.ipo,
    "dro": dro.dro,
    "reinforce": reinforce.reinforce,
}
