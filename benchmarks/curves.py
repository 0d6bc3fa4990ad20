"""Held-out accuracy over equal numbers of trained samples, synchronous and asynchronous, several seeds each.

    python benchmarks/curves.py examples/addition2.toml --steps 40 --every 8 --seeds 0 1 2 --json out.json

Every variant trains on the same number of samples from the same config, alternating, so that a change in the machine's load
meets them all. A point is the greedy accuracy on held-out prompts of the version it is labelled with. Evaluation goes on beside
training, so that later versions, up to `newest`, may have had a part in it; the last point is of the last version alone. `reward`
is the mean over the samples of the last quarter of the steps. Prints, per variant, the mean and the range over the seeds.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import runs

VARIANTS = {
    "sync": ["buffer.kind=none"],
    "double": ["buffer.kind=double"],
    "window S=1": ["buffer.kind=window", "staleness.max=1"],
    "window S=2": ["buffer.kind=window", "staleness.max=2"],
    "window S=3": ["buffer.kind=window", "staleness.max=3"],
}


def one(args: argparse.Namespace, folder: Path, *, variant: str, seed: int) -> dict[str, Any]:
    sets = [*VARIANTS[variant], f"run.steps={args.steps}", f"run.seed={seed}", f"eval.every={args.every}"]
    sets += [f"eval.prompts={args.prompts}", "checkpoint.every=0", *args.sets]
    name = f"{variant.replace(' ', '-').replace('=', '')}-{seed}"
    done = runs.run(args.config.read_text(), folder, name=name, sets=sets)
    rewards = done.curve("reward/mean")
    return {
        "variant": variant,
        "seed": seed,
        "held_out": {int(r["eval/version"]): round(r["eval/reward"], 4) for r in done.evaluations},
        "newest": {int(r["eval/version"]): int(r["eval/version_max"]) for r in done.evaluations},
        "reward": rewards,
        "reward_last": round(mean(rewards[-max(1, len(rewards) // 4) :]), 4),
        "lag_mean": round(mean(done.curve("lag/mean")), 3),
        "lag_max": max(done.curve("lag/max")),
        "step_s": round(done.step_s, 3),
        "filtered": done.steps[-1].get("groups/filtered", 0.0),
    }


def show(found: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(run["variant"] for run in found))
    versions = sorted({version for run in found for version in run["held_out"]})
    heads = "".join(f"{f'v{version}':>20}" for version in versions)
    print(f"\n{'held-out':12}{heads}{'reward, last':>20}{'lag':>8}{'max':>5}{'s/step':>8}")
    for name in names:
        of = [run for run in found if run["variant"] == name]
        cells = [_spread([run["held_out"][v] for run in of if v in run["held_out"]]) for v in versions]
        last = _spread([run["reward_last"] for run in of])
        lag, most = mean(run["lag_mean"] for run in of), max(run["lag_max"] for run in of)
        row = "".join(f"{cell:>20}" for cell in cells)
        print(f"{name:12}{row}{last:>20}{lag:>8.2f}{most:>5.0f}{mean(run['step_s'] for run in of):>8.2f}")


def _spread(values: list[float]) -> str:
    return f"{mean(values):.3f} ({min(values):.2f}-{max(values):.2f})" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=8, help="versions between evaluations")
    parser.add_argument("--prompts", type=int, default=200, help="held-out prompts of one evaluation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--set", dest="sets", action="append", default=[], help="passed on to corrente run")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    result: dict[str, Any] = {"machine": runs.machine(), "config": args.config.name, "sets": args.sets, "runs": []}
    with tempfile.TemporaryDirectory() as place:
        for seed in args.seeds:
            for variant in args.variants:
                result["runs"].append(one(args, Path(place), variant=variant, seed=seed))
                runs.write(args.json, result)
    show(result["runs"])


if __name__ == "__main__":
    main()
