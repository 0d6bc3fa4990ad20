"""Parameters into a buffer and out again as views."""

from __future__ import annotations

import pytest
import torch

from corrente.errors import SyncError
from corrente.sync import pack
from corrente.sync.layout import ALIGN, Layout, Slab, arrange
from corrente.sync.weight_slots import slab_views


def slab(name: str, shape: tuple[int, ...], *sources: str, dtype: str = "float32", transpose: bool = False) -> Slab:
    return Slab(name=name, shape=shape, dtype=dtype, offset=0, sources=sources or (name,), transpose=transpose)


def buffer_of(layout: Layout) -> torch.Tensor:
    return torch.full((layout.nbytes,), 255, dtype=torch.uint8)


PARAMS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(10.0, 19.0).view(3, 3),
    "v": torch.arange(5.0),
    "scalar": torch.tensor(3.5),
}


def test_write_concatenates_transposes_and_casts():
    layout = arrange(
        [
            slab("v", (5,)),
            slab("ab", (5, 3), "a", "b"),
            slab("ba_t", (3, 5), "b", "a", transpose=True),
            slab("half", (2, 3), "a", dtype="bfloat16"),
            slab("scalar", ()),
        ]
    )
    buffer = buffer_of(layout)
    pack.write(layout, PARAMS, buffer)
    out = slab_views(layout, buffer)
    assert torch.equal(out["v"], PARAMS["v"])
    assert torch.equal(out["ab"], torch.cat([PARAMS["a"], PARAMS["b"]]))
    assert torch.equal(out["ba_t"], torch.cat([PARAMS["b"], PARAMS["a"]]).t())
    assert torch.equal(out["half"], PARAMS["a"].to(torch.bfloat16))
    assert out["scalar"].item() == 3.5


def test_views_alias_the_buffer_at_aligned_offsets():
    layout = arrange([slab("v", (5,)), slab("a", (2, 3))])
    buffer = buffer_of(layout)
    for one in layout.slabs:
        view = slab_views(layout, buffer)[one.name]
        assert view.data_ptr() == buffer.data_ptr() + one.offset
        assert one.offset % ALIGN == 0
        assert view.is_contiguous()
        assert tuple(view.shape) == one.shape


def test_write_leaves_trained_parameters_alone_and_needs_no_gradient():
    layout = arrange([slab("w", (2, 2))])
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    buffer = buffer_of(layout)
    pack.write(layout, {"w": parameter}, buffer)
    with torch.no_grad():
        parameter += 1
    assert slab_views(layout, buffer)["w"].tolist() == [[1, 1], [1, 1]]
    assert not slab_views(layout, buffer)["w"].requires_grad


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (slab("missing", (2, 2)), "does not have"),
        (slab("a", (3, 3)), "shape"),
        (slab("ab", (4, 3), "a", "b"), "room for"),
        (slab("ab", (6, 3), "a", "b"), "wants 6 rows"),
    ],
)
def test_write_refuses_what_does_not_fit(wanted: Slab, message: str):
    layout = arrange([wanted])
    with pytest.raises(SyncError, match=message):
        pack.write(layout, PARAMS, buffer_of(layout))


def test_views_refuse_a_buffer_that_is_too_small():
    layout = arrange([slab("a", (2, 3))])
    with pytest.raises(SyncError, match="24 bytes"):
        slab_views(layout, torch.zeros(8, dtype=torch.uint8))
