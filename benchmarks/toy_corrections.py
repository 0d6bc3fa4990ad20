"""corrections.py where a whole run takes seconds: the same objectives and corrections on a model trained from scratch.

    python benchmarks/toy_corrections.py --json benchmarks/baseline/toy-corrections.json
    python benchmarks/toy_corrections.py --variants "clip, dual" "dppo_tv" --lags 0 8 --seeds 0 --steps 30

The task is to say three letters backwards ("abc>" and "cba"), one character a token, reward 1 for the exact answer and 0 for any
other. The model, a transformer of two layers, is trained on answers until it samples some of them right; reinforcement learning
does the rest. Objective, corrections and advantages are corrente's own; the sampler and the optimizer step are written out here,
for the engine and the learner spend their time on what a model of this size does not have. The lag is exact: a step trains on
what the weights of --lag steps before sampled. At lag 0 every ratio is 1 and all variants are one, so only one is run.

A run has diverged when a loss or gradient was not finite, or when its held-out reward ended below half of its best.
Printed are, per variant and lag: how many seeds stayed stable; held-out reward of all at the end (mean, range); of the
last quarter of the steps mean ESS, k3 KL to the behaviour policy, largest ratio, part of the tokens cut.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import runs
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from variants import CORE, VARIANTS

from corrente.algo import checks
from corrente.algo.advantages import as_rewards
from corrente.algo.base import Trained
from corrente.algo.grpo import normalised
from corrente.algo.losses import PolicyObjective
from corrente.config import RunConfig
from corrente.config.load import parse_config
from corrente.data.types import Batch, Row

LETTERS, LENGTH = 8, 3
STOP, ASK = LETTERS, LETTERS + 1
PROMPTS, GROUP, HELD_OUT = 8, 8, 64
TRAINED_TO = 0.2
"""Probability of a right answer at which training on answers ends and reinforcement learning begins."""

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """B completions: tokens (B, prompt + T), log-probs and mask (B, T), rewards (B,), and the version that sampled them."""

    tokens: Tensor
    logprobs: Tensor
    mask: Tensor
    rewards: Tensor
    version: int


def tasks() -> tuple[Tensor, Tensor]:
    """All words once, in a fixed order: those to train on and those held out (N, LENGTH)."""
    words = list(product(range(LETTERS), repeat=LENGTH))
    random.Random(0).shuffle(words)
    return torch.tensor(words[HELD_OUT:]), torch.tensor(words[:HELD_OUT])


def asked(words: Tensor) -> Tensor:
    return torch.cat([words, torch.full((len(words), 1), ASK)], 1)


class Model(nn.Module):
    """A causal transformer: two layers, pre-norm, learned positions, tied embeddings. Tokens (B, L) to logits (B, L, V)."""

    def __init__(self, *, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.words = nn.Embedding(LETTERS + 2, width)
        self.places = nn.Embedding(2 * LENGTH + 3, width)
        self.mixes = nn.ModuleList([nn.Linear(width, 3 * width, bias=False) for _ in range(layers)])
        self.joins = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(layers)])
        self.feeds = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)]
        )

    def forward(self, tokens: Tensor) -> Tensor:
        count, length = tokens.shape
        x = self.words(tokens) + self.places.weight[:length]
        for mix, join, feed in zip(self.mixes, self.joins, self.feeds, strict=True):
            qkv = mix(F.layer_norm(x, x.shape[-1:])).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
            x = x + join(seen.transpose(1, 2).reshape(count, length, -1))
            x = x + feed(F.layer_norm(x, x.shape[-1:]))
        return F.layer_norm(x, x.shape[-1:]) @ self.words.weight.T


def beginner(words: Tensor) -> Model:
    """The model every run begins with."""
    torch.manual_seed(0)
    model = Model()
    optimizer, right = torch.optim.AdamW(model.parameters(), lr=3e-3), 0.0
    while right < TRAINED_TO:
        some = words[torch.randint(len(words), (64,))]
        tokens = torch.cat([asked(some), some.flip(1), torch.full((64, 1), STOP)], 1)
        logprobs, _ = spoken(model, tokens)
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        optimizer.step()
        right = 0.9 * right + 0.1 * float(logprobs.detach().sum(1).exp().mean())
    return model


def spoken(model: Model, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs (B, T) of what comes after the question, and the entropy there."""
    logprobs = torch.log_softmax(model(tokens[:, :-1])[:, LENGTH:], -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, tokens[:, LENGTH + 1 :, None])[..., 0], entropy


@torch.no_grad()
def sample(model: Model, words: Tensor, *, draws: torch.Generator, version: int) -> Sampled:
    tokens, live = asked(words), torch.ones(len(words), dtype=torch.bool)
    logprobs, masks = [], []
    for _ in range(LENGTH + 2):
        z = torch.log_softmax(model(tokens)[:, -1], -1)
        chosen = torch.multinomial(z.exp(), 1, generator=draws)
        logprobs.append(z.gather(1, chosen)[:, 0])
        masks.append(live)
        tokens = torch.cat([tokens, chosen], 1)
        live = live & (chosen[:, 0] != STOP)
    said = tokens[:, LENGTH + 1 :]
    right = (said[:, :LENGTH] == words.flip(1)).all(1) & (said[:, LENGTH] == STOP)
    return Sampled(
        tokens=tokens,
        logprobs=torch.stack(logprobs, 1),
        mask=torch.stack(masks, 1),
        rewards=right.float(),
        version=version,
    )


@torch.no_grad()
def held_out_reward(model: Model, words: Tensor) -> float:
    """Mean probability of the right answer."""
    tokens = torch.cat([asked(words), words.flip(1), torch.full((len(words), 1), STOP)], 1)
    return float(spoken(model, tokens)[0].sum(1).exp().mean())


def as_batch(sampled: Sampled, advantages_B: Sequence[float], *, step: int) -> Batch:
    """The rows of the step, for the objective's denominators."""
    rows: list[Row] = []
    for tokens, logprobs, mask, advantage in zip(
        sampled.tokens.numpy(), sampled.logprobs.numpy(), sampled.mask.numpy(), advantages_B, strict=True
    ):
        trained = np.concatenate([np.zeros(LENGTH + 1, np.bool_), mask])
        padded = np.concatenate([np.zeros(LENGTH + 1, np.float32), logprobs])
        rows.append(
            Row(
                group=len(rows) // GROUP,
                tokens=tokens.astype(np.int32),
                loss_mask=trained,
                logprobs=np.where(trained, padded, 0).astype(np.float32),
                versions=np.where(trained, sampled.version, 0).astype(np.int32),
                advantages=np.where(trained, advantage, 0).astype(np.float32),
            )
        )
    return Batch(step=step, version=step, rows=tuple(rows), sequences=len(rows), tokens=int(sampled.mask.sum()))


def learn(
    model: Model, optimizer: torch.optim.Optimizer, objective: PolicyObjective, sampled: Sampled, step: int
) -> Record:
    """One optimizer step; NaN in "grad_norm" where it was not taken."""
    rewards = [as_rewards(group.tolist()) for group in sampled.rewards.split(GROUP)]
    lengths = [group.sum(1).numpy() for group in sampled.mask.split(GROUP)]
    advantages_B = np.concatenate(ESTIMATORS["grpo"](rewards, lengths, "group", 1e-6))
    weights_B = torch.from_numpy(objective.row_weights(as_batch(sampled, advantages_B, step=step)))
    mask = sampled.mask
    logprobs, entropy = spoken(model, sampled.tokens)
    row_BT = torch.arange(len(mask))[:, None].expand_as(mask)
    part = Trained(
        logprobs_K=logprobs[mask],
        behaviour_K=sampled.logprobs[mask],
        advantages_K=torch.from_numpy(advantages_B).float()[:, None].expand_as(mask)[mask],
        weights_K=weights_B.float()[:, None].expand_as(mask)[mask],
        row_K=row_BT[mask],
        lags_K=torch.full((int(mask.sum()),), step - sampled.version),
        entropy_K=entropy[mask],
    )
    constants = objective.survey([part])[0] if objective.needs_survey else None
    loss = objective(part, constants=constants)
    optimizer.zero_grad()
    loss.total.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    if math.isfinite(norm):
        optimizer.step()
    log_ratio = (part.logprobs_K.detach() - part.behaviour_K).double()
    ratio = log_ratio.clamp(-20, 20).exp()
    return {
        "reward": float(sampled.rewards.mean()),
        "ess": float(ratio.sum() ** 2 / (len(ratio) * ratio.square().sum())),
        "kl_k3": float((ratio - 1 - log_ratio).mean()),
        "ratio_max": float(ratio.max()),
        "cut": float(loss.cut_K.double().mean()),
        "entropy": float(part.entropy_K.detach().mean()),
        "grad_norm": norm,
    }


def one(config: RunConfig, start: Model, args: argparse.Namespace, *, lag: int, seed: int) -> Record:
    """One run. Sampling goes on with old weights until ``lag`` batches wait."""
    model, (train, held_out) = copy.deepcopy(start), tasks()
    objective = PolicyObjective(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    draws, line = torch.Generator().manual_seed(seed), deque[Sampled]()
    rewards, steps, ended = {0: held_out_reward(model, held_out)}, list[Record](), ""
    for step in range(args.steps):
        while len(line) <= lag:
            words = train[torch.randint(len(train), (PROMPTS,), generator=draws)].repeat_interleave(GROUP, 0)
            line.append(sample(model, words, draws=draws, version=step))
        steps.append(learn(model, optimizer, objective, line.popleft(), step))
        if not math.isfinite(steps[-1]["grad_norm"]):
            ended = f"gradient norm {steps[-1]['grad_norm']} at step {step + 1}"
            break
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            rewards[step + 1] = held_out_reward(model, held_out)
    best, last = max(rewards.values()), list(rewards.values())[-1]
    if not ended and last < best / 2:
        ended = f"held-out reward fell from {best:.2f} to {last:.2f}"
    quarter = steps[-max(1, len(steps) // 4) :]
    tail = {name: mean(s[name] for s in quarter) for name in quarter[0] if name != "ratio_max"}
    tail["ratio_max"] = max(s["ratio_max"] for s in quarter)
    return {"lag": lag, "seed": seed, "diverged": ended, "held_out": rewards, "last_quarter": tail}


def show(found: Sequence[Record]) -> None:
    print(f"\n{'variant':32}{'lag':>4}{'stable':>8}{'held-out':>20}{'ess':>7}{'kl':>8}{'ratio max':>11}{'cut':>7}")
    for variant, lag in dict.fromkeys((record["variant"], record["lag"]) for record in found):
        of = [record for record in found if (record["variant"], record["lag"]) == (variant, lag)]
        ends = [list(record["held_out"].values())[-1] for record in of]
        held = f"{mean(ends):.3f} ({min(ends):.2f}-{max(ends):.2f})"
        tail = {name: mean(record["last_quarter"][name] for record in of) for name in of[0]["last_quarter"]}
        stable = f"{sum(not record['diverged'] for record in of)} of {len(of)}"
        numbers = f"{tail['ess']:>7.2f}{tail['kl_k3']:>8.3f}{tail['ratio_max']:>11.1f}{tail['cut']:>7.2f}"
        print(f"{variant:32}{lag:>4}{stable:>8}{held:>20}{numbers}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=2e-3, help="as high as a run at lag 0 bears")
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=CORE)
    parser.add_argument("--json", type=Path, help="results; runs that are in it are not repeated")
    args = parser.parse_args()

    torch.set_num_threads(1)
    start, settings = beginner(tasks()[0]), {"steps": args.steps, "lr": args.lr}
    found: list[Record] = []
    if args.json is not None and args.json.exists():
        earlier = json.loads(args.json.read_text())
        if any(earlier[name] != value for name, value in settings.items()):
            raise SystemExit(f"{args.json} holds runs with other settings; name another file")
        found = earlier["runs"]
    done = {(run["variant"], run["lag"], run["seed"]) for run in found}
    for seed, lag in product(args.seeds, args.lags):
        for variant in args.variants if lag else ["clip, dual"]:
            if (variant, lag, seed) in done:
                continue
            config = parse_config({}, VARIANTS[variant])
            checks.check(config)
            found.append({"variant": variant, **one(config, start, args, lag=lag, seed=seed)})
            runs.write(args.json, {"machine": runs.machine(), **settings, "runs": found})
    show(found)


if __name__ == "__main__":
    main()
