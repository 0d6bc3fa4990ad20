"""The contract of an adapter kind: which parameters are trained, what is shipped, how it is saved. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
"""Prefix of all names in a peft directory, before those of the model."""

Load = Callable[[Path], Any]
"""A function that loads the Hugging Face causal LM of a directory as the learner needs it."""


class Frozen(NamedTuple):
    """The policy a KL is measured to: ``model``, while the context is entered."""

    model: Any
    context: Callable[[], AbstractContextManager[None]]


class Adapters(Protocol):
    """Contract.

    - An implementation is called with the adapters' section, ``source`` (the directory of the model), ``load`` and ``seed``, and
      raises ConfigError for what the model does not have. ``model`` is then the policy in training: the parameters that
      require a gradient are those that are trained. A backend may shard ``model`` in place after ``frozen`` was called, which
      replaces its parameters by others: an implementation reads them from ``model`` each time and holds on to none.
    - ``tensors`` are those to ship, by name, of the present weights; copies only where there is no other way. Reading them
      changes nothing.
    - ``frozen`` is the initial policy. It is called once, before the first step and before a backend has prepared the model; its
      context is entered without gradient.
    - ``write`` puts files that others can load into an existing directory; ``read`` returns what ``assign`` takes, and changes
      nothing: CheckpointError when it is not of this model and these settings. ``assign`` copies in place.
    """

    model: Any

    def tensors(self) -> Mapping[str, Tensor]: ...

    def frozen(self) -> Frozen: ...

    def write(self, path: Path) -> None: ...

    def read(self, path: Path) -> Mapping[str, Tensor]: ...

    def assign(self, weights: Mapping[str, Tensor]) -> None: ...


class Factor(NamedTuple):
    """One adapter tensor as an engine needs to know it: its shape, and the scale of the product it belongs to."""

    shape: tuple[int, ...]
    scaling: float


def shape_mismatch(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """Describe the first tensor, by name, that one side lacks or has in another shape: "name is ..., not ..."; empty for none."""
    shapes, others = ({name: tuple(tensor.shape) for name, tensor in of.items()} for of in (own, given))
    wrong = sorted(name for name in shapes.keys() | others.keys() if shapes.get(name) != others.get(name))
    return f"{wrong[0]} is {others.get(wrong[0])}, not {shapes.get(wrong[0])}" if wrong else ""


def matches_layer(target: str, names: Iterable[str]) -> bool:
    """Tell whether ``target`` is one of ``names``, or the end of one."""
    return any(name == target or name.endswith(f".{target}") for name in names)


def unmatched_message(key: str, target: str, names: Iterable[str], *, parts: int = 1) -> str:
    """The error message for a ``target`` of ``key`` that matches none of ``names``: the nearest by their last ``parts`` parts."""
    ends = sorted({".".join(name.split(".")[-parts:]) for name in names} - {""})
    wanted = ".".join(target.split(".")[-parts:])
    near = get_close_matches(wanted, ends, n=3, cutoff=0.4) or [end for end in ends if not end.isdigit()][:8]
    return f"{key} = {target!r}: no layer of the model has that name; nearest are {', '.join(near)}"
