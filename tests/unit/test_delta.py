"""A change brings exactly the new bits, and as few bytes as it can."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corrente.errors import SyncError
from corrente.sync import delta, digest
from corrente.sync.layout import Slab, arrange

DTYPES = ("float32", "bfloat16", "float16", "int64", "int32", "bool")


def _layout(*sizes: tuple[str, int]):
    return arrange(
        [
            Slab(name=f"t{at}", shape=(size,), dtype=dtype, offset=0, sources=(f"t{at}",))
            for at, (dtype, size) in enumerate(sizes)
        ]
    )


def _noise(layout, seed: int) -> torch.Tensor:
    """Any bits at all in the tensors, zeros between them."""
    whole = torch.zeros(layout.nbytes, dtype=torch.uint8)
    random = torch.Generator().manual_seed(seed)
    for slab in layout.slabs:
        high = 2 if slab.dtype == "bool" else 256
        drawn = torch.randint(0, high, (slab.nbytes,), generator=random, dtype=torch.uint8)
        whole[slab.offset : slab.offset + slab.nbytes] = drawn
    return whole


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 70)), min_size=1, max_size=4),
    st.integers(0, 1000),
    st.floats(0, 1),
)
def test_change_turns_the_old_bits_into_the_new(sizes: list[tuple[str, int]], seed: int, fraction: float):
    layout = _layout(*sizes)
    old = _noise(layout, seed)
    kept = torch.rand(old.shape, generator=torch.Generator().manual_seed(seed)) >= fraction
    new = torch.where(kept, old, _noise(layout, seed + 1))
    changes = delta.encode(layout, old, new)
    target = torch.full_like(old, 255)
    delta.apply(layout, changes, old, target)
    assert target.tolist() == new.tolist()
    assert digest.of(layout, target) == digest.of(layout, new)


def test_nan_equals_itself_and_signs_of_zero_differ():
    layout = _layout(("float32", 200))
    old = torch.zeros(200)
    old[:3] = torch.tensor([torch.nan, 0.0, torch.inf])
    new = old.clone()
    new[1] = -0.0
    before, after = (weights.view(torch.uint8) for weights in (old, new))
    assert delta.encode(layout, before, before.clone()) == {}
    changes = delta.encode(layout, before, after)
    assert {name: value.tolist() for name, value in changes.items()} == {"0.at": [1], "0.values": [-(2**31)]}


@pytest.mark.parametrize(
    ("changed", "parts", "nbytes"),
    [
        (0, set(), 0),
        (10, {"0.at", "0.values"}, 10 * (4 + 2)),
        (500, {"0.bits", "0.values"}, 1600 // 8 + 500 * 2),
        (1600, {"0.whole"}, 1600 * 2),
    ],
)
def test_change_takes_the_smallest_of_its_forms(changed: int, parts: set[str], nbytes: int):
    layout = _layout(("bfloat16", 1600), ("float32", 9))
    old = _noise(layout, 1)
    new = old.clone()
    words = new[: 2 * 1600].view(torch.int16)
    words[:changed] ^= 1
    changes = delta.encode(layout, old, new)
    assert set(changes) == parts
    assert delta.nbytes(changes) == nbytes


@pytest.mark.parametrize(
    "changes",
    [
        {"7.whole": torch.zeros(9, dtype=torch.int32)},
        {"x.whole": torch.zeros(9, dtype=torch.int32)},
        {"0.whole": torch.zeros(8, dtype=torch.int32)},
        {"0.whole": torch.zeros(9, dtype=torch.int16)},
        {"0.values": torch.zeros(1, dtype=torch.int32)},
        {"0.at": torch.tensor([9], dtype=torch.int32), "0.values": torch.zeros(1, dtype=torch.int32)},
        {"0.at": torch.tensor([-1], dtype=torch.int32), "0.values": torch.zeros(1, dtype=torch.int32)},
        {"0.at": torch.tensor([0, 1], dtype=torch.int32), "0.values": torch.zeros(1, dtype=torch.int32)},
        {"0.bits": torch.tensor([255, 0], dtype=torch.uint8), "0.values": torch.zeros(7, dtype=torch.int32)},
        {"0.bits": torch.tensor([255], dtype=torch.uint8), "0.values": torch.zeros(8, dtype=torch.int32)},
    ],
)
def test_change_of_something_else_is_refused(changes: dict[str, torch.Tensor]):
    layout = _layout(("float32", 9))
    old = _noise(layout, 1)
    with pytest.raises(SyncError):
        delta.apply(layout, changes, old, torch.zeros_like(old))


def test_digest_sees_every_bit_of_a_tensor_and_none_beside():
    layout = _layout(("bfloat16", 3), ("bool", 1))
    whole = _noise(layout, 3)
    before = digest.of(layout, whole)
    whole[10] ^= 1
    assert digest.of(layout, whole) == before
    whole[5] ^= 1
    assert digest.of(layout, whole) != before
    assert digest.of(_layout(("float16", 3), ("bool", 1)), whole) != digest.of(layout, whole)
