"""Record and replay the experts that the routers of a mixture of experts choose.

A router's own code runs unchanged. A torch function mode intercepts its one call of ``torch.topk``: recording stores the result,
replaying replaces it with the given experts and the values (probabilities or logits) at them. Softmax and renormalisation stay
the model's own, and gradients flow to the router's weights through the experts that were used. Nothing is patched, and
recomputed activations (gradient checkpointing) are routed the same way.

It applies to routers that Hugging Face models declare (``_can_record_outputs``) and that choose by one topk over all experts; a
trial call finds out which ones do. Routers that first choose among groups of experts (DeepSeek-V3) are refused.

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
    """All routers of one model; see ``find_routers``. ``layers`` is L, ``choices`` k and ``experts`` E."""

    def __init__(self, found: list[nn.Module]) -> None:
        self.layers = len(found)
        self.recording = False
        self._replayed: Tensor | None = None
        self._recorded: list[Tensor | None] = [None] * len(found)
        self.choices, self.experts = _router_shape(found[0])
        self._logits: dict[int, Tensor] | None = None
        for layer, router in enumerate(found):
            TopkHook(self, layer).attach_to(router)

    @property
    def shape(self) -> tuple[int, int]:
        """(L, k): layers and choices of one token."""
        return self.layers, self.choices

    def replay_experts(self, experts: Tensor | None) -> None:
        """Use these experts (M, L, k) in the next forward pass and in its recomputation.

        A negative entry leaves that choice to the router; None ends the replay. AlignmentError for another L or k.
        """
        if experts is not None and tuple(experts.shape[1:]) != self.shape:
            raise AlignmentError(
                f"experts of {tuple(experts.shape[1:])} layers and choices; the model has {self.shape}"
            )
        self._replayed = experts

    def recorded_experts(self) -> Experts:
        """The experts used in the latest forward pass (M, L, k), int16; AlignmentError when a router did not run."""
        chosen = [one for one in self._recorded if one is not None]
        if len(chosen) < self.layers:
            raise AlignmentError(f"{len(chosen)} of {self.layers} routers were asked in one forward pass")
        return torch.stack(chosen, 1).cpu().numpy().astype(np.int16)

    def start_recording_logits(self) -> None:
        """Record the router logits of all forward passes from now on."""
        self._logits = {}

    def recorded_logits(self) -> list[Tensor]:
        """Logits (M, E) of each router in the latest forward pass, before any replay; AlignmentError when a router did not run.

        Call ``start_recording_logits`` first.
        """
        logits = self._logits or {}
        if len(logits) < self.layers:
            raise AlignmentError(f"{len(logits)} of {self.layers} routers were asked in one forward pass")
        return [logits[layer] for layer in range(self.layers)]

    def record_logits(self, layer: int, logits: Tensor) -> None:
        if self._logits is not None:
            self._logits[layer] = logits

    def is_active(self) -> bool:
        return self.recording or self._replayed is not None

    def answer_topk(self, layer: int, values: Tensor, chosen: Any) -> Any:
        """The result that the router gets from its topk over ``values`` (M, E); ``chosen`` is torch's own result."""
        best, indices = chosen
        if self._replayed is not None:
            wanted = self._replayed[:, layer]
            if wanted.shape != indices.shape:
                raise AlignmentError(f"experts of {len(wanted)} tokens were given for {len(indices)} tokens")
            indices = torch.where(wanted < 0, indices, wanted)
            best = values.gather(-1, indices)
        if self.recording:
            self._recorded[layer] = indices
        return torch.return_types.topk((best, indices))


class TopkHook(TorchFunctionMode):
    """Intercepts ``torch.topk`` while one router runs, and passes its values and result to ``owner.answer_topk``."""

    def __init__(self, owner: Any, layer: int) -> None:
        super().__init__()
        self._owner, self._layer = owner, layer
        self._entered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return self._owner.answer_topk(self._layer, args[0], out) if func in _TOPK else out

    def attach_to(self, router: nn.Module) -> None:
        router.register_forward_pre_hook(self._before_forward)
        router.register_forward_hook(self._after_forward, always_call=True)

    def _before_forward(self, *_: Any) -> None:
        if self._owner.is_active():  # a mode that is not needed is not entered: it costs every torch call of the router
            self.__enter__()
            self._entered = True

    def _after_forward(self, _router: nn.Module, _inputs: Any, output: Any) -> None:
        if self._entered:
            self._entered = False
            self.__exit__(None, None, None)
        if output is not None:
            self._owner.record_logits(self._layer, output[0])


def find_routers(model: nn.Module) -> Routers | str:
    """Return the routers of ``model``, the same object at each call, or a text that says why they cannot be recorded."""
    known = getattr(model, _ATTRIBUTE, None)
    if known is not None:
        return known
    found = _declared_routers(model)
    if not found:
        return "it is no mixture of experts whose routers transformers declares"
    for router in found:
        if reason := _unsupported_reason(router):
            return f"{type(router).__name__} {reason}"
    if len({_router_shape(router) for router in found}) > 1:
        return "its layers differ in their experts"
    routers = Routers(found)
    object.__setattr__(model, _ATTRIBUTE, routers)
    return routers


def _declared_routers(model: nn.Module) -> list[nn.Module]:
    """The modules that the model declares as sources of router logits, in order of depth."""
    kinds: list[type] = []
    for module in model.modules():
        declared = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for one in declared if isinstance(declared, list | tuple) else [declared]:
            kind = getattr(one, "target_class", one)
            if isinstance(kind, type):
                kinds.append(kind)
    return [module for module in model.modules() if isinstance(module, tuple(kinds))]


def _router_shape(router: nn.Module) -> tuple[int, int]:
    weight: Any = router.weight
    choices: Any = router.top_k
    return int(choices), int(weight.shape[0])


class _TrialRouters:
    """Stands in for Routers during one trial call, and replays shifted experts to see what the router does with them."""

    def __init__(self) -> None:
        self.calls = 0
        self.replayed: Tensor | None = None

    def answer_topk(self, _layer: int, values: Tensor, chosen: Any) -> Any:
        self.calls += 1
        replayed: Tensor = (chosen[1] + 1) % values.shape[-1]
        self.replayed = replayed
        return torch.return_types.topk((values.gather(-1, replayed), replayed))


def _unsupported_reason(router: nn.Module) -> str:
    """The reason why a router's choice cannot be replayed, found by a trial call with random weights; empty when it can."""
    weight = getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not isinstance(getattr(router, "top_k", None), int):
        return "has no weight and top_k of the usual kind"
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        for name, tensor in (*router.named_parameters(), *router.named_buffers())
    }
    trial = _TrialRouters()
    try:
        with torch.no_grad(), TopkHook(trial, 0):
            hidden = torch.randn((3, weight.shape[1]), generator=generator)
            out = torch.func.functional_call(router, state, (hidden,))
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        return f"cannot be tried out: {error}"
    if trial.calls != 1:
        return f"calls topk {trial.calls} times, not once"
    replayed = trial.replayed
    if replayed is None or not isinstance(out, tuple) or not any(_equals_tensor(part, replayed) for part in out):
        return "does not return the experts it chose"
    return ""


def _equals_tensor(part: Any, replayed: Tensor) -> bool:
    return isinstance(part, Tensor) and torch.equal(part, replayed)
