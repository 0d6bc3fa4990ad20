"""How one optimizer step is executed. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Backend(Protocol):
    """Contract.

    - ``accumulate`` adds the gradient of one micro-batch's loss; losses of a step simply add up (the denominator is in them).
    - ``norm`` returns the norm of the accumulated gradient, over all of it, and leaves it as it is.
    - ``step`` scales the gradient to ``max_norm`` if it is longer (0: never), moves the weights at rate ``lr``, and clears it.
    - ``discard`` clears the gradient; weights and optimizer state stay as they were.
    - ``state`` and ``restore`` are the optimizer's state as plain tensors and numbers; ``restore`` refuses one that does not
      fit (ValueError) before it changes anything.
    """

    def accumulate(self, loss: Tensor) -> None: ...

    def norm(self) -> float: ...

    def step(self, *, lr: float, norm: float, max_norm: float) -> None: ...

    def discard(self) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...
