"""How one optimizer step is executed: where parameters live, and how gradients come together. Imports no torch.

One step, as learner/gradient.py and learner/core.py drive it:

    for each micro-batch:   with micro_batch(last=...):   forward -> loss -> accumulate
    then, once:             norm -> step, or discard

Every rank makes these calls in the same order and the same number of times.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from corrente.data.step_totals import StepTotals

if TYPE_CHECKING:
    from torch import Tensor, nn


class StepOptimizer(Protocol):
    """Contract.

    - ``norm`` returns the norm of the accumulated gradient, over all parameters and ranks, and leaves the gradient as it is. It
      is the same on every rank, so all of them clip alike, refuse a norm that is not finite, or leave the weights untouched at 0.
    - ``step`` scales the gradient to ``max_norm`` if it is longer (0: never), moves the weights at rate ``lr``, and clears the
      gradient. ``norm`` is what ``norm()`` returned.
    - ``state`` and ``restore`` are the optimizer's state as plain tensors and numbers; ``restore`` refuses one that does not
      fit (ValueError) before it changes anything.
    """

    def norm(self) -> float: ...

    def step(self, *, lr: float, norm: float, max_norm: float) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Backend(Protocol):
    """Contract. An implementation is made with the ``backend`` section of a config, and ``learner=``, the section of that name.

    - ``totals`` combines the numbers of a step over all ranks that compute it; the identity where there is one.
    - ``prepare`` places a policy, sharded or replicated, and returns the module to call from then on; it may be the same one. It
      is called once for the policy in training and once for a reference with parameters of its own, before their first forward
      pass. Parameters may be other objects afterwards: nobody may hold on to one from before.
    - ``optimizer`` is made once, over the parameters of the prepared policy that require a gradient.
    - ``micro_batch`` is the context of forward and backward pass of one micro-batch; ``last``: no other follows before ``norm``.
    - ``accumulate`` adds the gradient of one micro-batch's loss; losses of a step simply add up (the denominator is in them), so
      gradients are summed over ranks, never averaged.
    - ``discard`` clears the gradient, also after an exception inside ``micro_batch``; weights and optimizer state stay as they
      were, and the next step can begin.
    """

    totals: StepTotals

    def prepare(self, policy: nn.Module) -> nn.Module: ...

    def optimizer(self, policy: nn.Module) -> StepOptimizer: ...

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]: ...

    def accumulate(self, loss: Tensor) -> None: ...

    def discard(self) -> None: ...
