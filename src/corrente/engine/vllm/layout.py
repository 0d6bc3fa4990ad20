"""The layout of a vLLM model: its parameters, and the checkpoint tensors that each is made of.

vLLM fuses tensors that are separate in the checkpoint (q, k, v; gate, up) and pads the vocabulary. The model's own mapper says
which tensor belongs to which parameter; this module turns that into slabs. It needs names and shapes only, neither torch nor
vLLM.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from corrente.errors import ConfigError
from corrente.sync.layout import Layout, Slab, arrange

Shape = tuple[int, ...]
LocateParameter = Callable[[str], tuple[str, Any] | None]
"""A checkpoint name -> the parameter it is part of and which part ("q", "k", "v", a number, None for all of it), or None."""

_FUSED_ORDER: dict[Any, int] = {"q": 0, "k": 1, "v": 2}
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
"""Suffixes of tensors in older checkpoints that no model needs."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter of the running model.

    ``shape`` None: vLLM packed the parameter and freed its memory. ``pads``: it may have more rows than the checkpoint.
    ``aliases``: other names of the same tensor (tied embeddings).
    """

    name: str
    shape: Shape | None
    pads: bool = False
    aliases: tuple[str, ...] = ()


def checkpoint_shapes(folder: Path) -> dict[str, Shape]:
    """Read the names and shapes in the safetensors files of a model directory. ConfigError when there are none."""
    shapes: dict[str, Shape] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    if not shapes:
        raise ConfigError(f"model.path = {str(folder)!r}: a vLLM engine needs a directory with safetensors files")
    return shapes


def build_layout(
    parameters: list[Parameter], shapes: Mapping[str, Shape], locate: LocateParameter, *, dtype: str
) -> Layout:
    """Build one slab per parameter, with its sources in the order in which vLLM fuses them.

    ConfigError when a parameter has no source, or sources of another size: then vLLM converts or shards the model on loading,
    which this layout cannot express.
    """
    sources: dict[str, list[tuple[int, str]]] = {parameter.name: [] for parameter in parameters}
    owner = {alias: parameter.name for parameter in parameters for alias in (parameter.name, *parameter.aliases)}
    for name in shapes:
        placed = locate(name)
        if placed is None or name.endswith(_IGNORED_SUFFIXES):
            continue
        target, part = placed
        if target not in owner:
            raise ConfigError(
                f"engine.kind = 'vllm': {name!r} of the checkpoint has no place in vLLM's model ({target!r})"
            )
        if target in sources:
            sources[target].append((_FUSED_ORDER.get(part, part or 0), name))
    return arrange(
        [_parameter_slab(parameter, sorted(sources[parameter.name]), shapes, dtype) for parameter in parameters]
    )


def checkpoint_layout(shapes: Mapping[str, Shape], *, dtype: str) -> Layout:
    """The layout of the checkpoint itself, one slab per tensor, for vLLM's own loading code."""
    return arrange(
        [
            Slab(name=name, shape=shape, dtype=dtype, offset=0, sources=(name,))
            for name, shape in shapes.items()
            if not name.endswith(_IGNORED_SUFFIXES)
        ]
    )


def _parameter_slab(
    parameter: Parameter, sources: list[tuple[int, str]], shapes: Mapping[str, Shape], dtype: str
) -> Slab:
    if not sources:
        raise ConfigError(f"engine.kind = 'vllm': {parameter.name!r} of vLLM's model is not in the checkpoint")
    found = [shapes[name] for _, name in sources]
    shape = (sum(s[0] for s in found), *found[0][1:]) if len(found) > 1 else found[0]
    if parameter.shape is not None and not _shape_fits(shape, parameter):
        raise ConfigError(
            f"engine.kind = 'vllm': {parameter.name!r} has shape {parameter.shape} in vLLM and {shape} in the checkpoint; "
            "models that vLLM shards or converts on loading are not supported"
        )
    return Slab(name=parameter.name, shape=shape, dtype=dtype, offset=0, sources=tuple(name for _, name in sources))


def _shape_fits(shape: Shape, parameter: Parameter) -> bool:
    if parameter.shape == shape:
        return True
    same_rest = parameter.shape is not None and len(shape) > 0 and parameter.shape[1:] == shape[1:]
    return (
        parameter.pads
        and same_rest
        and math.prod(shape[:1]) <= math.prod(parameter.shape[:1] if parameter.shape else ())
    )
