"""The adapters axis: what is trained, hence what is shipped."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from corrente.config.section import Kind, Positive, PositiveFloat


class Full(Kind, frozen=True, kw_only=True, tag="full"):
    """All parameters are trained and shipped."""


class _Lora(Kind, frozen=True, kw_only=True):
    rank: Positive = 16
    """Of the two factors."""
    alpha: PositiveFloat = 32.0
    """The product of the factors is scaled by alpha / rank."""
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Of an adapter's input, in training; above 0 the policy that is trained is not quite the one that sampled."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names, or ends of names, of the layers that get an adapter; "all-linear": every linear layer but the output."""
    target_parameters: tuple[str, ...] = ()
    """Names, or ends of names, of parameters that are no layer's weight, like the fused experts of a mixture."""
    init: str = ""
    """A peft directory to start from; empty: a new adapter, which changes nothing until it is trained."""


class Lora(_Lora, frozen=True, kw_only=True, tag="lora"):
    """Low-rank adapters are trained (Hu et al. 2021, arXiv:2106.09685), and only they are shipped; engines add them unmerged."""


class LoraMerged(_Lora, frozen=True, kw_only=True, tag="lora_merged"):
    """Low-rank adapters are trained and merged into the weights that are shipped: for engines that know no adapters."""
