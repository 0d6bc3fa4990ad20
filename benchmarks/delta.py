"""How much of the weights a training step leaves as it was, bit for bit, and what a change then takes to ship.

    python benchmarks/delta.py MODEL [--lr 1e-6 1e-5] [--steps 6] [--json FILE]

A real run in one process: the model samples sums, exact answers are rewarded, AdamW steps on float32 weights. Before each step's
weights are published they are compared with those published before, as an engine stores them: in float32, and cast to bfloat16.
The first step is the largest of all (AdamW's running means are empty), so it is reported apart from the mean of the others.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import anyio
import msgspec
import torch

from corrente import config as c
from corrente.controller import pipeline
from corrente.entrypoints.assemble import open_parts
from corrente.sync import delta, pack
from corrente.sync.layout import Layout, Slab, arrange
from corrente.sync.weight_slots import slab_views

DTYPES = ("float32", "bfloat16")


class Watch:
    """A Sync that compares what it is asked to export with what it exported before."""

    def __init__(self, sync: Any, tensors: Any) -> None:
        self._sync, self._tensors = sync, tensors
        self._layouts: dict[str, Layout] = {}
        self._before: dict[str, torch.Tensor] = {}
        self.steps: dict[str, list[dict[str, float]]] = {dtype: [] for dtype in DTYPES}

    async def export(self, version: int) -> None:
        for dtype in DTYPES:
            self._compare(dtype)
        await self._sync.export(version)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sync, name)

    def _compare(self, dtype: str) -> None:
        params = distinct(self._tensors())
        if dtype not in self._layouts:
            slabs = [
                Slab(name=name, shape=tuple(tensor.shape), dtype=dtype, offset=0, sources=(name,))
                for name, tensor in params.items()
            ]
            self._layouts[dtype] = arrange(slabs)
        layout = self._layouts[dtype]
        now = torch.zeros(layout.nbytes, dtype=torch.uint8)
        pack.write(layout, params, now)
        if dtype in self._before:
            self.steps[dtype].append(compared(layout, self._before[dtype], now))
        self._before[dtype] = now


def distinct(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Floating-point weights, each once: tied ones share memory."""
    by_place = {tensor.data_ptr(): (name, tensor) for name, tensor in tensors.items() if tensor.is_floating_point()}
    return dict(by_place.values())


def compared(layout: Layout, before: torch.Tensor, now: torch.Tensor) -> dict[str, float]:
    views, old = slab_views(layout, now), slab_views(layout, before)
    words = delta.WORDS[2 if layout.slabs[0].dtype == "bfloat16" else 4]
    same = sum(int((views[name].view(words) == old[name].view(words)).sum()) for name in views)
    total = sum(view.numel() for view in views.values())
    shipped = delta.nbytes(delta.encode(layout, before, now))
    return {"unchanged": same / total, "bytes_over_full": shipped / layout.nbytes}


async def measure(model: Path, *, lr: float, steps: int, given: argparse.Namespace) -> dict[str, float]:
    config = c.RunConfig(
        run=c.Run(steps=steps, prompts_per_step=given.prompts, group_size=given.group),
        model=c.Model(path=str(model)),
        runtime=c.Inline(),
        sync=c.Inproc(),
        sampling=c.Sampling(max_tokens=given.tokens),
        learner=c.LearnerConfig(lr=lr),
        eval=c.Eval(every=0),
        checkpoint=c.Checkpoint(every=0),
        filter=c.Filter(zero_variance=given.zero_variance),
    )
    async with open_parts(config) as parts:
        watch = Watch(parts.sync, parts.learner.core.tensors)  # pyright: ignore
        await pipeline.run(msgspec.structs.replace(parts, sync=watch))
    figures: dict[str, float] = {}
    for dtype, found in watch.steps.items():
        for name in ("unchanged", "bytes_over_full"):
            values = [step[name] for step in found]
            figures[f"{dtype} {name}, first step"] = values[0]
            if values[1:]:
                figures[f"{dtype} {name}, later steps"] = sum(values[1:]) / len(values[1:])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--zero-variance", choices=["replace", "keep"], default="replace")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    result: dict[str, dict[str, float]] = {}
    for lr in given.lr:
        result[f"{lr:g}"] = anyio.run(lambda lr=lr: measure(given.model, lr=lr, steps=given.steps, given=given))
        for name, value in result[f"{lr:g}"].items():
            sys.stdout.write(f"lr {lr:<8g} {name:40} {value:10.5f}\n")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
