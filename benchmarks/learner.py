"""What a training step costs: corrente's learner against a plain padded Hugging Face loop, same batch, same gradient.

    python benchmarks/learner.py MODEL [--case arithmetic|groups] [--threads 2] [--repeats 3] [--clock wall|cpu]
                                       [--json FILE]

The plain loop is what most trainers do: rows padded to the longest, logits where completions are, the same loss, gradient
clipping and fused AdamW. Its gradient is compared with ours before anything is timed. Each repeat times a matrix product, one
step of either kind, and the product again; ratios are taken within a repeat and their median is reported. On a machine that
others use, --clock cpu with --threads 1 counts the seconds this process computed instead of those that passed.

Cases, in groups of 8: "arithmetic", 64 answers of a few tokens to one-digit sums behind two examples (half of the answers right,
a fifth run on into another sum), and "groups", 32 random completions of 8 to 24 tokens behind random prompts of 48: the rows
of a group share their prompt and nothing else is shared.

The GEMM fraction is the arithmetic that the forwarded positions need (6 operations a parameter and position; output weights
only where a trained token is predicted), over step time, over the measured rate of a 2048-cube fp32 product.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from corrente import config as c
from corrente.algo.base import Trained
from corrente.algo.losses import PolicyObjective
from corrente.data.types import Batch, Row
from corrente.learner.core import TorchLearner
from corrente.learner.model import load_model
from corrente.learner.packing import as_tree, plan_packs
from corrente.learner.policy import Policy

MEMBERS = 8


def arithmetic(model: Path, rng: np.random.Generator) -> list[Row]:
    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    rows = []
    for group in range(8):
        a, b = rng.integers(0, 10, 2)
        prompt = encode(f"2 + 3 = 5\n6 + 1 = 7\n{a} + {b} =")
        for _ in range(MEMBERS):
            answer = a + b if rng.random() < 0.5 else rng.integers(0, 19)
            more = "{} + {} =".format(*rng.integers(0, 10, 2)) if rng.random() < 0.2 else ""
            rows.append(row(group, prompt, encode(f" {answer}\n{more}")[:8], rng))
    return rows


def groups(model: Path, rng: np.random.Generator) -> list[Row]:
    rows = []
    for group in range(4):
        prompt = rng.integers(100, 20_000, 48).tolist()
        rows += [
            row(group, prompt, rng.integers(100, 20_000, rng.integers(8, 25)).tolist(), rng) for _ in range(MEMBERS)
        ]
    return rows


def row(group: int, prompt: list[int], completion: list[int], rng: np.random.Generator) -> Row:
    tokens = np.array(prompt + completion, np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Row(
        group=group,
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.zeros(len(tokens), np.int32),
        advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
    )


def on_policy(model: Any, batch: Batch) -> Batch:
    """Behaviour log-probs near the model's own, so that few tokens are clipped and the gradient is that of training."""
    rng = np.random.default_rng(1)
    with torch.no_grad():
        logprobs = padded_logprobs(model, batch.rows).numpy()
    rows = []
    for r, one in enumerate(batch.rows):
        own = np.zeros(len(one.tokens), np.float32)
        own[1:] = logprobs[r, : len(one.tokens) - 1]
        noisy = np.where(one.loss_mask, own + rng.normal(0, 0.02, len(own)), 0).astype(np.float32)
        rows.append(msgspec.structs.replace(one, logprobs=noisy))
    return msgspec.structs.replace(batch, rows=tuple(rows))


# ---- the plain loop ---------------------------------------------------------------------------------------------------------


def padded(rows: tuple[Row, ...], name: str, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros((len(rows), max(len(one.tokens) for one in rows)), dtype=dtype)
    for r, one in enumerate(rows):
        out[r, : len(one.tokens)] = torch.as_tensor(getattr(one, name), dtype=dtype)
    return out


def padded_logprobs(model: Any, rows: tuple[Row, ...]) -> torch.Tensor:
    """Log-probs (R, L - 1) of every token but the first; 0 before the first completion of the batch begins."""
    ids = padded(rows, "tokens", torch.long)
    lengths = torch.tensor([len(one.tokens) for one in rows])
    attention = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    keep = ids.shape[1] - min(int(one.loss_mask.argmax()) for one in rows) + 1
    logits = model(input_ids=ids, attention_mask=attention, logits_to_keep=keep, use_cache=False).logits[:, :-1]
    values = torch.log_softmax(logits, -1).gather(-1, ids[:, 1 - keep :, None])[..., 0]
    return torch.nn.functional.pad(values, (ids.shape[1] - keep, 0))


def plain_backward(model: Any, objective: PolicyObjective, batch: Batch) -> None:
    mask = padded(batch.rows, "loss_mask", torch.bool)[:, 1:]
    weights = torch.as_tensor(objective.row_weights(batch), dtype=torch.float32)[:, None].expand(mask.shape)
    objective(
        Trained(
            logprobs_K=padded_logprobs(model, batch.rows)[mask],
            behaviour_K=padded(batch.rows, "logprobs", torch.float32)[:, 1:][mask],
            advantages_K=padded(batch.rows, "advantages", torch.float32)[:, 1:][mask],
            weights_K=weights[mask],
        )
    ).total.backward()


# ---- measuring --------------------------------------------------------------------------------------------------------------


def compare_gradients(model_dir: Path, batch: Batch, budget: int) -> float:
    """Relative distance between the plain loop's gradient and that of the folded micro-batches."""
    objective = PolicyObjective(c.RunConfig())
    plain = load_model(model_dir, device="cpu")
    plain_backward(plain, objective, batch)
    ours = load_model(model_dir, device="cpu")
    policy = Policy(ours)
    for pack in plan_packs(batch.rows, weights_R=objective.row_weights(batch), version=0, budget=budget):
        names = ("behaviour_K", "advantages_K", "weights_K")
        tensors = {name: torch.as_tensor(getattr(pack, name), dtype=torch.float32) for name in names}
        objective(Trained(logprobs_K=policy(pack).logprobs_K, **tensors)).total.backward()
    pairs = [(a.grad, b.grad) for a, b in zip(plain.parameters(), ours.parameters(), strict=True)]
    off = sum(float((a - b).square().sum()) for a, b in pairs) / sum(float(a.square().sum()) for a, _ in pairs)
    return off**0.5


def gemm_flops_per_s(now: Callable[[], float], size: int = 2048) -> float:
    a, b = torch.randn(size, size), torch.randn(size, size)
    start = now()
    torch.mm(a, b)
    return 2 * size**3 / (now() - start)


def needed_flops(model: Any, batch: Batch, budget: int) -> float:
    """Of one step: forward once, backward twice that, for the positions forwarded and those whose logits are needed."""
    table = model.get_input_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    body = sum(p.numel() for p in model.parameters() if p.ndim >= 2) - table * (1 if tied else 2)
    packs = plan_packs(batch.rows, weights_R=np.ones(len(batch.rows)), version=0, budget=budget)
    inputs = [as_tree(pack) for pack in packs]
    return 6.0 * sum(body * i.tokens.size + table * len(i.select_M) for i in inputs)


def measure(model_dir: Path, case: str, *, repeats: int, budget: int, now: Callable[[], float]) -> dict[str, Any]:
    rows = {"arithmetic": arithmetic, "groups": groups}[case](model_dir, np.random.default_rng(0))
    tokens = int(sum(one.loss_mask.sum() for one in rows))
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa").eval()
    batch = on_policy(plain, Batch(step=0, version=0, rows=tuple(rows), sequences=len(rows), tokens=tokens))
    error = compare_gradients(model_dir, batch, budget)
    objective = PolicyObjective(c.RunConfig())
    learner = c.LearnerConfig(micro_batch_tokens=budget)
    core = TorchLearner(c.RunConfig(model=c.Model(path=str(model_dir)), learner=learner))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-5, weight_decay=0.0, fused=True)

    def plain_step() -> float:
        start = now()
        plain_backward(plain, objective, batch)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return now() - start

    report, _ = core.step(batch), plain_step()
    rounds = []
    for _ in range(repeats):
        before, start = gemm_flops_per_s(now), now()
        core.step(batch)
        ours_s = now() - start
        rounds.append((ours_s, plain_step(), (before + gemm_flops_per_s(now)) / 2))
    flops = needed_flops(plain, batch, budget)
    return {
        "case": case,
        "rows": len(rows),
        "trained_tokens": tokens,
        "distinct_tokens": report["train/distinct_tokens"],
        "padded_tokens": report["train/padded_tokens"],
        "gradient_relative_error": error,
        "step_s": statistics.median(ours for ours, _, _ in rounds),
        "plain_step_s": statistics.median(plain for _, plain, _ in rounds),
        "tokens_per_s": tokens / statistics.median(ours for ours, _, _ in rounds),
        "speedup": statistics.median(plain / ours for ours, plain, _ in rounds),
        "gemm_fraction": statistics.median(flops / ours / rate for ours, _, rate in rounds),
        "gemm_gflops": statistics.median(rate for _, _, rate in rounds) / 1e9,
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--case", choices=["arithmetic", "groups"], action="append")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--micro-batch-tokens", type=int, default=c.LearnerConfig().micro_batch_tokens)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    now = time.process_time if arguments.clock == "cpu" else time.perf_counter
    results = []
    for case in arguments.case or ["arithmetic", "groups"]:
        found = measure(arguments.model, case, repeats=arguments.repeats, budget=arguments.micro_batch_tokens, now=now)
        results.append(found | {"threads": arguments.threads, "clock": arguments.clock})
        print(
            f"{case}: {found['rows']} rows, {found['trained_tokens']} trained tokens; "
            f"{found['distinct_tokens']:.0f} positions forwarded, {found['padded_tokens']:.0f} when padded\n"
            f"  step {found['step_s']:.2f} s, plain padded loop {found['plain_step_s']:.2f} s: {found['speedup']:.2f}x "
            f"({found['tokens_per_s']:.0f} trained tokens/s); gradients differ by {found['gradient_relative_error']:.1e}\n"
            f"  {found['gemm_fraction']:.2f} of this machine's fp32 GEMM rate ({found['gemm_gflops']:.0f} GFLOP/s)"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
