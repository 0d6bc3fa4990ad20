"""Which objectives and corrections stay stable on stale samples: runs at a forced lag, several seeds each.

    python benchmarks/corrections.py examples/addition2.toml --steps 60 --json out.json
    python benchmarks/corrections.py CONFIG --steps 2 --lags 0 2 --seeds 0 --variants reinforce dppo_tv --prompts 8

The lag is exact, not a bound: batches wait in a line of --lag places, so every token of a step was sampled by the version that
many steps before; over the first steps the lag rises from 0 to it. Engine and learner take turns in this process: what is
measured is learning, not time. All variants see the same prompts and seeds.

A run has diverged when a loss or gradient was not finite, or when its held-out reward ended below half of the best it had
before, the untrained model's included. It ends early where no group is left to learn from: solved, or collapsed. Printed per
variant and lag: how many seeds stayed stable; over those, held-out reward at the end (mean and range); over all, of the last
quarter, reward, ESS, largest ratio, and part of the tokens that was cut.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import anyio
import msgspec
import runs
import torch
from variants import CORE, VARIANTS

from corrente.algo import checks
from corrente.algo.grouped import GroupedAlgorithm
from corrente.config import RunConfig
from corrente.config.load import load_config
from corrente.controller.rollout import episode_seed
from corrente.data.types import Batch, Completion, Episode, Group, Prompt, Request, Turn
from corrente.errors import DivergedError
from corrente.models import cache as model_cache
from corrente.prompts.build import build, build_eval
from corrente.prompts.tokenizer import Tokenizer
from corrente.runtime import cores
from corrente.score.functions import FunctionsScorer
from corrente.score.resolve import resolve_function
from corrente.sync import pack
from corrente.sync.base import Update

Record = dict[str, Any]


class Loop:
    """One engine and one learner, joined by two weight buffers, and a line of batches between them."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        tokenizer = Tokenizer(Path(config.model.path))
        self.prompts = build(config, tokenizer.encode)
        self.held_out = build_eval(config, tokenizer.encode)
        self.algorithm = GroupedAlgorithm(config)
        functions = [resolve_function(name) for name in config.reward.functions]
        self.scorer = FunctionsScorer(functions, weights=config.reward.weights, offload=_here)
        self.engine, self.learner = cores.engine(config), cores.learner(config)
        self.layout = self.engine.layout()
        self.buffers = cores.attach(self.layout, device=self.engine.device)
        self.engine.attach(self.buffers)
        self.version, self.admitted = -1, 0
        self.publish()

    def publish(self) -> None:
        self.version += 1
        slot = self.version % 2
        pack.write(self.layout, self.learner.tensors(), self.buffers[slot])
        self.engine.apply(Update(version=self.version, slot=slot, nbytes=self.layout.nbytes), "swap")

    def groups(self) -> list[Group]:
        """One step's groups, sampled by the version that is live: those that teach nothing are replaced, as in a run."""
        out: list[Group] = []
        run = self.config.run
        for _ in range(self.config.filter.patience):
            taken = [self.prompts.next() for _ in range(run.prompts_per_step)]
            played = self.play([p for p in taken if p is not None], each=run.group_size)
            out += [group for group in played if not self.algorithm.trainable(group)]
            if len(out) >= run.prompts_per_step:
                return out[: run.prompts_per_step]
        return out

    def play(self, prompts: Sequence[Prompt], *, each: int, greedy: bool = False) -> list[Group]:
        sampling = self.config.sampling
        if greedy:
            sampling = msgspec.structs.replace(sampling, temperature=0.0)
        done: dict[str, Completion] = {}
        for number, prompt in enumerate(prompts):
            for index in range(each):
                seed = episode_seed(self.config.run.seed, prompt.id, index)
                self.engine.submit(
                    Request(
                        id=f"{number}/{index}", tokens=prompt.tokens, sampling=sampling, seed=seed, group=str(number)
                    )
                )
        while not self.engine.idle:
            for key, outcome in self.engine.step():
                if not isinstance(outcome, Completion):
                    raise outcome
                done[key] = outcome
        groups = [self._group(prompt, [done[f"{n}/{i}"] for i in range(each)]) for n, prompt in enumerate(prompts)]
        return anyio.run(self._score, groups)

    def _group(self, prompt: Prompt, said: Sequence[Completion]) -> Group:
        number, self.admitted = self.admitted, self.admitted + 1
        episodes = tuple(
            Episode(
                prompt_id=prompt.id,
                group_id=number,
                index=index,
                turns=(
                    Turn(speaker="user", tokens=prompt.tokens),
                    Turn(speaker="policy", tokens=completion.tokens, completion=completion, parent=0),
                ),
            )
            for index, completion in enumerate(said)
        )
        return Group(id=number, prompt=prompt, episodes=episodes, admitted_version=self.version)

    async def _score(self, groups: Sequence[Group]) -> list[Group]:
        return [await self.scorer.score(group) for group in groups]

    def evaluate(self) -> float:
        return _reward(self.play(self.held_out, each=1, greedy=True))

    def batch(self, groups: Sequence[Group], *, step: int) -> Batch:
        oldest = [None] * len(groups)
        return self.algorithm.batch(groups, step=step, version=self.version, oldest_trainable=oldest)


async def _here(call: Any) -> Any:
    return call()


def _reward(groups: Sequence[Group]) -> float:
    return mean([e.reward or 0.0 for group in groups for e in group.episodes])


def one(args: argparse.Namespace, *, variant: str, lag: int, seed: int) -> Record:
    """One run. Generation of the next batches goes on with old weights until ``lag`` of them wait."""
    sets = [
        f"run.seed={seed}",
        f"run.steps={args.steps}",
        f"eval.prompts={args.prompts}",
        *args.sets,
        *VARIANTS[variant],
    ]
    config = load_config(args.config, sets)
    checks.check(config)
    config = msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, path=str(model_cache.resolve(config.model.path)))
    )
    torch.manual_seed(seed)
    loop, line = Loop(config), deque[list[Group]]()
    record: Record = {"variant": variant, "lag": lag, "seed": seed, "held_out": {0: loop.evaluate()}, "steps": []}
    record["diverged"] = ""
    for step in range(args.steps):
        while len(line) <= lag:
            line.append(loop.groups())
        groups = line.popleft()
        if not groups:
            record["ended"] = f"all rewards of a group were equal, group after group, before step {step + 1}"
            record["held_out"][step] = loop.evaluate()
            break
        batch = loop.batch(groups, step=step)
        try:
            report = loop.learner.step(batch)
        except DivergedError as error:
            record["diverged"] = str(error)
            break
        loop.publish()
        lags = batch.lags()
        names = ("ratio/ess", "ratio/mean", "ratio/max", "kl/behaviour_k3", "train/entropy", "train/grad_norm")
        names += ("train/clip_fraction", "train/rejected_fraction")
        kept = {name: round(report[name], 5) for name in names if name in report}
        kept["reward"] = round(_reward(groups), 4)
        record["steps"].append(kept | {"lag": [int(lags.min()), int(lags.max())] if len(lags) else []})
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            record["held_out"][step + 1] = loop.evaluate()
    best, last = max(record["held_out"].values()), list(record["held_out"].values())[-1]
    if not record["diverged"] and last < best / 2:
        record["diverged"] = f"held-out reward fell from {best:.3f} to {last:.3f}"
    return record


def show(found: Sequence[Record]) -> None:
    heads = ("variant", "lag", "stable", "held-out, stable", "reward, last", "ess", "ratio max", "cut")
    print(
        f"\n{heads[0]:32}{heads[1]:>4}{heads[2]:>8}{heads[3]:>22}{heads[4]:>14}{heads[5]:>8}{heads[6]:>11}{heads[7]:>7}"
    )
    for variant, lag in dict.fromkeys((record["variant"], record["lag"]) for record in found):
        of = [record for record in found if (record["variant"], record["lag"]) == (variant, lag)]
        stable = [list(record["held_out"].values())[-1] for record in of if not record["diverged"]]
        held = f"{mean(stable):.3f} ({min(stable):.2f}-{max(stable):.2f})" if stable else "-"
        last = partial(_last, of)
        row = f"{last('reward'):>14.3f}{last('ratio/ess'):>8.3f}{last('ratio/max'):>11.2f}{last('train/clip_fraction'):>7.3f}"
        print(f"{variant:32}{lag:>4}{f'{len(stable)} of {len(of)}':>8}{held:>22}{row}")
    for record in found:
        if record["diverged"]:
            print(f"{record['variant']}, lag {record['lag']}, seed {record['seed']}: {record['diverged']}")


def _last(found: Sequence[Record], name: str) -> float:
    """Mean over the last quarter of the steps of every run."""
    values = [
        step[name] for record in found for step in record["steps"][-max(1, len(record["steps"]) // 4) :] if name in step
    ]
    return mean(values) if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--prompts", type=int, default=100, help="held-out prompts of one evaluation")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=CORE)
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], help="a key of every run, as for corrente run"
    )
    parser.add_argument(
        "--json", type=Path, help="results, written after each run; runs that are in it are not repeated"
    )
    args = parser.parse_args()

    settings: Record = {"config": args.config.name, "steps": args.steps, "sets": args.sets}
    found = _known(args.json, settings)
    for seed in args.seeds:
        for lag in args.lags:
            for variant in args.variants:
                if (variant, lag, seed) not in {(run["variant"], run["lag"], run["seed"]) for run in found}:
                    found.append(one(args, variant=variant, lag=lag, seed=seed))
                    runs.write(args.json, {"machine": runs.machine(), **settings, "runs": found})
    show(found)


def _known(path: Path | None, settings: Record) -> list[Record]:
    """Runs of an earlier call with the same settings."""
    if path is None or not path.exists():
        return []
    earlier = json.loads(path.read_text())
    if any(earlier.get(name) != value for name, value in settings.items()):
        raise SystemExit(f"{path} holds runs with other settings; name another file")
    return earlier["runs"]


if __name__ == "__main__":
    main()
