"""Changes between two versions, bit for bit, and their application.

Weights are compared as integers, so that a NaN equals itself and -0.0 is not 0.0. Changed elements of a slab travel as positions
and values, as a bitmap and values, or as the slab, whichever is smallest; a slab without a change does not travel. After an AdamW
step of 1e-6 most bfloat16 weights are the same bits as before (measured in docs/reference/transports.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from corrente.errors import SyncError
from corrente.sync.layout import ITEMSIZE, Layout, Slab

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer as wide as an element."""
AT, BITS, VALUES, WHOLE = "at", "bits", "values", "whole"


def encode(
    layout: Layout, old: torch.Tensor, new: torch.Tensor, *, check: Callable[[], object] | None = None
) -> dict[str, torch.Tensor]:
    """The change from ``old`` to ``new``, both uint8 (layout.nbytes,) on the host: tensors named by slab number and part.

    ``check`` is called before each slab; what it raises ends the work.
    """
    changes: dict[str, torch.Tensor] = {}
    for number, slab in enumerate(layout.slabs):
        if check is not None:
            check()
        before, after = _words(slab, old), _words(slab, new)
        changed = before != after
        count = int(changed.count_nonzero())
        if count:
            changes |= {f"{number}.{part}": value for part, value in _smallest(after, changed, count).items()}
    return changes


def apply(layout: Layout, changes: Mapping[str, torch.Tensor], old: torch.Tensor, target: torch.Tensor) -> None:
    """Make ``target`` the version that ``changes`` turn ``old`` into; they may be the same memory. SyncError when the changes are
    none of this layout's; ``target`` is then in an undefined state."""
    parts: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in changes.items():
        number, _, part = name.partition(".")
        if not number.isdecimal() or int(number) >= len(layout.slabs):
            raise SyncError(f"the change names {name!r}, and the layout has {len(layout.slabs)} tensors")
        parts.setdefault(int(number), {})[part] = value
    target.copy_(old)
    for number, given in parts.items():
        _change(layout.slabs[number], _words(layout.slabs[number], target), given)


def nbytes(changes: Mapping[str, torch.Tensor]) -> int:
    return sum(value.nbytes for value in changes.values())


def _smallest(after: torch.Tensor, changed: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
    total, item = after.numel(), after.element_size()
    by_place = count * (4 + item) if total < 2**31 else total * item
    by_bitmap = -(-total // 8) + count * item
    if total * item <= min(by_place, by_bitmap):
        return {WHOLE: after}
    values = after[changed]
    if by_place <= by_bitmap:
        return {AT: changed.nonzero().flatten().to(torch.int32), VALUES: values}
    return {BITS: torch.from_numpy(np.packbits(changed.numpy())), VALUES: values}


def _change(slab: Slab, words: torch.Tensor, given: Mapping[str, torch.Tensor]) -> None:
    """Overwrite what changed in ``words``."""
    values = given.get(WHOLE, given.get(VALUES))
    if values is not None and values.dtype == words.dtype and values.ndim == 1:
        kinds = set(given)
        if kinds == {WHOLE} and len(values) == len(words):
            words.copy_(values)
            return
        if kinds == {AT, VALUES} and _within(given[AT], count=len(values), size=len(words)):
            words[given[AT].long()] = values
            return
        if kinds == {BITS, VALUES} and given[BITS].numel() == -(-len(words) // 8):
            changed = torch.from_numpy(np.unpackbits(given[BITS].numpy(), count=len(words)).view(bool))
            if int(changed.count_nonzero()) == len(values):
                words[changed] = values
                return
    raise SyncError(f"the change of {slab.name!r} does not fit it: {', '.join(sorted(given))}")


def _within(at: torch.Tensor, *, count: int, size: int) -> bool:
    return at.dtype == torch.int32 and at.shape == (count,) and count > 0 and 0 <= int(at.min()) <= int(at.max()) < size


def _words(slab: Slab, whole: torch.Tensor) -> torch.Tensor:
    """The elements of a slab as integers, in one dimension; a view."""
    return whole[slab.offset : slab.offset + slab.nbytes].view(WORDS[ITEMSIZE[slab.dtype]])
