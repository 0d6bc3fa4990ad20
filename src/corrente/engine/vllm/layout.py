"""The layout of a vLLM model: its own parameters, and the checkpoint's names they are made of.

vLLM fuses what the checkpoint keeps apart (q, k, v; gate, up) and pads the vocabulary. Which name goes where is for the model's
own mapper to say; here its answers are turned into slabs. No torch and no vLLM: names and shapes only.
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
Place = Callable[[str], tuple[str, Any] | None]
"""A checkpoint name -> the parameter it is part of and which part ("q", "k", "v", a number, None for all of it), or None."""

_ORDER: dict[Any, int] = {"q": 0, "k": 1, "v": 2}
_DERIVED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
"""Ends of names that older checkpoints hold and no model needs."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """What the running model has. ``shape`` None: its memory was given up once it was packed. ``pads``: rows may be more than
    the checkpoint has. ``aliases``: other names of the same tensor (tied embeddings)."""

    name: str
    shape: Shape | None
    pads: bool = False
    aliases: tuple[str, ...] = ()


def checkpoint_shapes(folder: Path) -> dict[str, Shape]:
    """Names and shapes in the safetensors files of a model directory. ConfigError when there are none."""
    shapes: dict[str, Shape] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    if not shapes:
        raise ConfigError(f"model.path = {str(folder)!r}: a vLLM engine needs a directory with safetensors files")
    return shapes


def build(parameters: list[Parameter], shapes: Mapping[str, Shape], place: Place, *, dtype: str) -> Layout:
    """One slab per parameter, its sources in the order in which vLLM fuses them.

    ConfigError when a parameter has no source, or sources of another size: then vLLM does more on loading than to put tensors
    together, or the model is cut into shards, and neither can be undone here.
    """
    sources: dict[str, list[tuple[int, str]]] = {parameter.name: [] for parameter in parameters}
    owner = {alias: parameter.name for parameter in parameters for alias in (parameter.name, *parameter.aliases)}
    for name in shapes:
        placed = place(name)
        if placed is None or name.endswith(_DERIVED):
            continue
        target, part = placed
        if target not in owner:
            raise ConfigError(
                f"engine.kind = 'vllm': {name!r} of the checkpoint has no place in vLLM's model ({target!r})"
            )
        if target in sources:
            sources[target].append((_ORDER.get(part, part or 0), name))
    return arrange([_slab(parameter, sorted(sources[parameter.name]), shapes, dtype) for parameter in parameters])


def plain(shapes: Mapping[str, Shape], *, dtype: str) -> Layout:
    """The checkpoint as it is, tensor for tensor: what vLLM's own loading wants."""
    return arrange(
        [
            Slab(name=name, shape=shape, dtype=dtype, offset=0, sources=(name,))
            for name, shape in shapes.items()
            if not name.endswith(_DERIVED)
        ]
    )


def _slab(parameter: Parameter, sources: list[tuple[int, str]], shapes: Mapping[str, Shape], dtype: str) -> Slab:
    if not sources:
        raise ConfigError(f"engine.kind = 'vllm': {parameter.name!r} of vLLM's model is not in the checkpoint")
    found = [shapes[name] for _, name in sources]
    shape = (sum(s[0] for s in found), *found[0][1:]) if len(found) > 1 else found[0]
    if parameter.shape is not None and not _fits(shape, parameter):
        raise ConfigError(
            f"engine.kind = 'vllm': {parameter.name!r} has shape {parameter.shape} in vLLM and {shape} in the checkpoint; "
            "models that vLLM shards or converts on loading are not supported"
        )
    return Slab(name=parameter.name, shape=shape, dtype=dtype, offset=0, sources=tuple(name for _, name in sources))


def _fits(shape: Shape, parameter: Parameter) -> bool:
    if parameter.shape == shape:
        return True
    same_rest = parameter.shape is not None and len(shape) > 0 and parameter.shape[1:] == shape[1:]
    return (
        parameter.pads
        and same_rest
        and math.prod(shape[:1]) <= math.prod(parameter.shape[:1] if parameter.shape else ())
    )
