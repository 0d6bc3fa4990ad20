"""weight [out, in] @ x [in, tokens] near the limit of the fp32 GEMM of a CPU, for the token counts that decoding has.

The libraries' GEMM is one function with many kernels, and which one a product gets depends on shapes and strides. Measured
(AVX2, MKL, one thread, of 34 GFLOP/s; ``F.linear`` for comparison; benchmarks/engine.py shows what it comes to):

    tokens          4    8   10   14   16   24   28   32   48
    F.linear        7   11   12   15   16   19   20   21   22      weight 3072 x 576
    here           14   18   16   20   22   24   24   27   29

- fewer than FEW tokens: x is passed as the transpose of a row-major matrix; two to SKINNY of them, where the CPU has AVX-512,
  go through ``F.linear``, which has a kernel for them there and takes half the time (with AVX2 it takes twice as much);
- from there on: x is feature-major, and ``width`` rounds the number of its columns up to whole vectors;
- tall weights (gate and up, the vocabulary) are multiplied as a batch of blocks that stay in cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

FEW = 12
SKINNY = 4 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 0
"""Decided by what the CPU can, not by a stopwatch: the same machine gives the same numbers every time."""
MANY = 128
"""From here on any way of asking is as good."""
VECTOR = 8
BLOCK = 192
"""Rows of a block of a tall weight; with 576 columns of float32 it fills about a second-level cache."""
TALL = 1024


def width(tokens: int, device: torch.device) -> int:
    """Columns to compute for so many tokens."""
    if device.type != "cpu" or tokens < FEW or tokens >= MANY:
        return tokens
    return -(-tokens // VECTOR) * VECTOR


def product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """weight @ x."""
    rows, tokens = len(weight), x.shape[1]
    if weight.device.type == "cpu" and tokens < FEW:
        return _few(weight, x)
    if weight.device.type == "cpu" and tokens < MANY and rows >= TALL and rows % BLOCK == 0:
        blocks = rows // BLOCK
        return torch.bmm(weight.view(blocks, BLOCK, -1), x.expand(blocks, *x.shape)).view(rows, tokens)
    return torch.mm(weight, x)


def add_product(target: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> None:
    """target += weight @ x, in place."""
    tokens = x.shape[1]
    if weight.device.type != "cpu" or tokens >= FEW:
        target.addmm_(weight, x)
    elif 1 < tokens <= SKINNY:
        target += F.linear(x.t().contiguous(), weight).t()
    else:
        target.addmm_(weight, x.t().contiguous().t())


def _few(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    by_token = x.t().contiguous()
    if 1 < len(by_token) <= SKINNY:
        return F.linear(by_token, weight).t().contiguous()
    return torch.mm(weight, by_token.t())
