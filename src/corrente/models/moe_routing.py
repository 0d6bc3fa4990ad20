"""The routers of a mixture of experts: which experts they choose can be recorded, and laid down.

A router's own code runs unchanged, but its one call of ``torch.topk`` is overheard: recording notes the answer, replaying gives
another one, the probabilities (or logits) at the experts that are laid down. What the router makes of them, softmax and
renormalisation, stays the model's own, and gradients flow to the router's weights through the experts that were used. Nothing
is patched, and recomputed activations (gradient checkpointing) are routed the same way.

It applies to routers that Hugging Face's models declare (``_can_record_outputs``) and that choose by one topk over all experts;
whether one does is found out by calling it. Choosing among groups of experts first (DeepSeek-V3) is refused.

Shapes: M tokens of a forward pass, L routers, k experts of a token, E experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from corrente.data.routing import Experts
from corrente.errors import AlignmentError

_TOPK = (torch.topk, torch.Tensor.topk)
_ATTRIBUTE = "_corrente_routers"


class Routers:
    """See ``routers_of``. ``layers`` L, ``choices`` k and ``experts`` E describe them."""

    def __init__(self, found: list[nn.Module]) -> None:
        self.layers = len(found)
        self.recording = False
        self._replayed: Tensor | None = None
        self._recorded: list[Tensor | None] = [None] * len(found)
        self.choices, self.experts = _shape(found[0])
        self._logits: dict[int, Tensor] | None = None
        for layer, router in enumerate(found):
            TopkHook(self, layer).attach(router)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and choices of one token."""
        return self.layers, self.choices

    def replay(self, experts: Tensor | None) -> None:
        """Lay down the experts (M, L, k) of the next forward pass, and of its recomputation; a negative one leaves the choice of
        that token to the router. None: all choose for themselves."""
        if experts is not None and tuple(experts.shape[1:]) != self.shape:
            raise AlignmentError(
                f"experts of {tuple(experts.shape[1:])} layers and choices; the model has {self.shape}"
            )
        self._replayed = experts

    def recorded(self) -> Experts:
        """What was chosen in the latest forward pass (M, L, k)."""
        chosen = [one for one in self._recorded if one is not None]
        if len(chosen) < self.layers:
            raise AlignmentError(f"{len(chosen)} of {self.layers} routers were asked in one forward pass")
        return torch.stack(chosen, 1).cpu().numpy().astype(np.int16)

    def listen(self) -> None:
        """Have the logits of the forward passes from now on."""
        self._logits = {}

    def heard(self) -> list[Tensor]:
        """Logits (M, E) of each router in the latest forward pass since ``listen``, before anything is laid down."""
        logits = self._logits or {}
        if len(logits) < self.layers:
            raise AlignmentError(f"{len(logits)} of {self.layers} routers were asked in one forward pass")
        return [logits[layer] for layer in range(self.layers)]

    def hear(self, layer: int, logits: Tensor) -> None:
        if self._logits is not None:
            self._logits[layer] = logits

    def active(self) -> bool:
        return self.recording or self._replayed is not None

    def choose(self, layer: int, values: Tensor, chosen: Any) -> Any:
        """The answer of one topk over ``values`` (M, E)."""
        best, indices = chosen
        if self._replayed is not None:
            wanted = self._replayed[:, layer]
            if wanted.shape != indices.shape:
                raise AlignmentError(f"experts of {len(wanted)} tokens laid down for {len(indices)}")
            indices = torch.where(wanted < 0, indices, wanted)
            best = values.gather(-1, indices)
        if self.recording:
            self._recorded[layer] = indices
        return torch.return_types.topk((best, indices))


class TopkHook(TorchFunctionMode):
    """Overhears one router while it runs."""

    def __init__(self, owner: Any, layer: int) -> None:
        super().__init__()
        self._owner, self._layer = owner, layer
        self._open = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return self._owner.choose(self._layer, args[0], out) if func in _TOPK else out

    def attach(self, router: nn.Module) -> None:
        router.register_forward_pre_hook(self._enter)
        router.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: Any) -> None:
        if self._owner.active():
            self.__enter__()
            self._open = True

    def _leave(self, _router: nn.Module, _inputs: Any, output: Any) -> None:
        if self._open:
            self._open = False
            self.__exit__(None, None, None)
        if output is not None:
            self._owner.hear(self._layer, output[0])


def routers_of(model: nn.Module) -> Routers | str:
    """The routers of ``model``, the same object at each call; or why their choices cannot be kept."""
    known = getattr(model, _ATTRIBUTE, None)
    if known is not None:
        return known
    found = _find(model)
    if not found:
        return "it is no mixture of experts whose routers transformers declares"
    for router in found:
        if reason := _unfit(router):
            return f"{type(router).__name__} {reason}"
    if len({_shape(router) for router in found}) > 1:
        return "its layers differ in their experts"
    routers = Routers(found)
    object.__setattr__(model, _ATTRIBUTE, routers)
    return routers


def _find(model: nn.Module) -> list[nn.Module]:
    """Modules that some part of the model declares to be where router logits come from, in order of depth."""
    kinds: list[type] = []
    for module in model.modules():
        declared = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for one in declared if isinstance(declared, list | tuple) else [declared]:
            kind = getattr(one, "target_class", one)
            if isinstance(kind, type):
                kinds.append(kind)
    return [module for module in model.modules() if isinstance(module, tuple(kinds))]


def _shape(router: nn.Module) -> tuple[int, int]:
    weight: Any = router.weight
    choices: Any = router.top_k
    return int(choices), int(weight.shape[0])


class _Trial:
    """What one router does with its topk: takes the place of Routers for one call."""

    def __init__(self) -> None:
        self.calls = 0
        self.laid: Tensor | None = None

    def choose(self, _layer: int, values: Tensor, chosen: Any) -> Any:
        self.calls += 1
        laid: Tensor = (chosen[1] + 1) % values.shape[-1]
        self.laid = laid
        return torch.return_types.topk((values.gather(-1, laid), laid))


def _unfit(router: nn.Module) -> str:
    """Why a router's choice cannot be laid down, found out by calling it with random weights; empty when it can."""
    weight = getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not isinstance(getattr(router, "top_k", None), int):
        return "has no weight and top_k of the usual kind"
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        for name, tensor in (*router.named_parameters(), *router.named_buffers())
    }
    trial = _Trial()
    try:
        with torch.no_grad(), TopkHook(trial, 0):
            hidden = torch.randn((3, weight.shape[1]), generator=generator)
            out = torch.func.functional_call(router, state, (hidden,))
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        return f"cannot be tried out: {error}"
    if trial.calls != 1:
        return f"calls topk {trial.calls} times, not once"
    laid = trial.laid
    if laid is None or not isinstance(out, tuple) or not any(_equal(part, laid) for part in out):
        return "does not return the experts it chose"
    return ""


def _equal(part: Any, laid: Tensor) -> bool:
    return isinstance(part, Tensor) and torch.equal(part, laid)
