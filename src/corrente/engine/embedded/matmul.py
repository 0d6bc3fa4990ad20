"""weight [out, in] @ x [in, tokens] near the speed limit of a CPU's fp32 GEMM, for the token counts of decoding.

A library's GEMM has many kernels, and shapes and strides decide which one a product gets. Measured in GFLOP/s (AVX2, MKL, one
thread with a peak of 34; ``F.linear`` for comparison; benchmarks/engine.py measures the effect on the engine):

    tokens          4    8   10   14   16   24   28   32   48
    F.linear        7   11   12   15   16   19   20   21   22      weight 3072 x 576
    here           14   18   16   20   22   24   24   27   29

- fewer than FEW tokens: x is passed as the transpose of a row-major matrix. Two to SKINNY tokens on a CPU with AVX-512 go
  through ``F.linear``, which has a kernel for them there and takes half the time (with AVX2 it takes twice the time);
- FEW tokens and more: x is feature-major, and ``padded_columns`` rounds the number of its columns up to whole vectors;
- tall weights (gate and up, the vocabulary) are multiplied as a batch of blocks that stay in cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

FEW = 12
SKINNY = 4 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 0
"""Depends on the CPU's instruction set and not on a measurement, so that a machine gives the same numbers every time."""
MANY = 128
"""From this many tokens on, all kernels are equally fast."""
VECTOR = 8
BLOCK = 192
"""Rows of a block of a tall weight; with 576 columns of float32 a block is about the size of a second-level cache."""
TALL = 1024
"""Weights with at least this many rows are multiplied in blocks."""


def padded_columns(tokens: int, device: torch.device) -> int:
    """The number of columns to compute for ``tokens`` tokens."""
    if device.type != "cpu" or tokens < FEW or tokens >= MANY:
        return tokens
    return -(-tokens // VECTOR) * VECTOR


def matmul(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return weight (out, in) @ x (in, tokens)."""
    rows, tokens = len(weight), x.shape[1]
    if weight.device.type == "cpu" and tokens < FEW:
        return _matmul_few_tokens(weight, x)
    if weight.device.type == "cpu" and tokens < MANY and rows >= TALL and rows % BLOCK == 0:
        blocks = rows // BLOCK
        return torch.bmm(weight.view(blocks, BLOCK, -1), x.expand(blocks, *x.shape)).view(rows, tokens)
    return torch.mm(weight, x)


def add_matmul(target: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> None:
    """Add weight (out, in) @ x (in, tokens) to ``target`` in place."""
    tokens = x.shape[1]
    if weight.device.type != "cpu" or tokens >= FEW:
        target.addmm_(weight, x)
    elif 1 < tokens <= SKINNY:
        target += F.linear(x.t().contiguous(), weight).t()
    else:
        target.addmm_(weight, x.t().contiguous().t())


def _matmul_few_tokens(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    by_token = x.t().contiguous()
    if 1 < len(by_token) <= SKINNY:
        return F.linear(by_token, weight).t().contiguous()
    return torch.mm(weight, by_token.t())
