"""Samples per second of a whole run, beside TRL's synchronous GRPOTrainer on the same task, alternating in one session.

The setting is the peer script's: 1-digit addition behind two worked examples, 8 prompts x 8 completions per step, at most 8 new
tokens, a line ends an answer, temperature 1, learning rate 1e-5, float32. Groups whose rewards are all equal stay part of the
step on both sides, so a step is 64 samples everywhere. Both sides are timed by their own clocks, without their first step.

    python benchmarks/endtoend.py MODEL_DIR --peer-python ENV/bin/python --peer-script trl_grpo_cpu.py --json out.json

Without a peer, corrente alone is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import runs

CONFIG = """
[run]
steps = {steps}
seed = {seed}
prompts_per_step = 8
group_size = 8

[model]
path = "{model}"
dtype = "float32"

[prompts]
kind = "arithmetic"
digits = 1
shots = 2

[sampling]
max_tokens = 8
temperature = 1.0
stop = ["\\n"]

[learner]
lr = 1e-5

[filter]
zero_variance = "skip"
patience = 1000

[eval]
every = 0

[checkpoint]
every = 0
"""
VARIANTS = {
    "sync": ["buffer.kind=none"],
    "double": ["buffer.kind=double"],
    "window": ["buffer.kind=window", "staleness.max=1"],
}
"""What `corrente run` is given on top; the peer is synchronous."""

SAMPLES = 64


def corrente(args: argparse.Namespace, folder: Path, *, variant: str, seed: int) -> dict[str, Any]:
    config = CONFIG.format(steps=args.steps, seed=seed, model=args.model)
    done = runs.run(config, folder, name=f"{variant}-{seed}", sets=VARIANTS[variant], threads=args.threads)
    return {
        "who": f"corrente {variant}",
        "step_s": round(done.step_s, 3),
        "samples_per_s": round(SAMPLES / done.step_s, 2),
        "samples_per_s_overall": round(SAMPLES * len(done.steps_s) / sum(done.steps_s), 2),
        "completion_tokens": round(median(done.curve("completion/tokens_mean")), 2),
        "reward": done.curve("reward/mean"),
        "lag_mean": done.curve("lag/mean"),
    }


def peer(args: argparse.Namespace, folder: Path, *, seed: int) -> dict[str, Any]:
    command = [args.peer_python, str(args.peer_script), args.model, "--steps", str(args.steps), "--seed", str(seed)]
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    command += ["--threads", str(args.threads)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    rewards = re.findall(r"'reward': '?([\d.]+)", done.stdout)
    return {
        "who": summary["peer"],
        "step_s": summary["step_s"],
        "samples_per_s": summary["samples_per_s"],
        "completion_tokens": summary["mean_completion_tokens"],
        "reward": [float(reward) for reward in rewards],
    }


def show(result: dict[str, Any]) -> None:
    print(f"\n{'':18}{'step':>9}{'samples/s':>11}{'tokens':>8}   reward per step")
    for one in result["runs"]:
        curve = " ".join(f"{reward:.2f}" for reward in one["reward"])
        row = f"{one['who']:18}{one['step_s']:>7.2f} s{one['samples_per_s']:>11.2f}{one['completion_tokens']:>8.2f}"
        print(f"{row}   {curve}")
    for who, ratio in result["ratios"].items():
        print(f"{who}: {ratio:.2f}x the peer's samples per second (median of rounds)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of the converted SmolLM2-135M-Instruct")
    parser.add_argument("--peer-python", help="a Python that has TRL")
    parser.add_argument("--peer-script", type=Path, help="the script that runs TRL's trainer")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2, help="times each side is run, alternating; a seed each")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["sync", "window"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.model = str(Path(args.model).resolve())
    if args.peer_script:
        args.peer_script = args.peer_script.resolve()

    result: dict[str, Any] = {"machine": runs.machine(), "steps": args.steps, "runs": []}
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as place:
        for seed in range(args.rounds):
            found = [corrente(args, Path(place), variant=v, seed=seed) for v in args.variants]
            if args.peer_python:
                found.append(peer(args, Path(place), seed=seed))
            result["runs"] += found
            rounds.append({one["who"]: one["samples_per_s"] for one in found})
    theirs = [name for name in rounds[0] if not name.startswith("corrente")]
    result["ratios"] = {
        who: round(median(r[who] / r[theirs[0]] for r in rounds), 2)
        for who in rounds[0]
        if theirs and who not in theirs
    }
    show(result)
    runs.write(args.json, result)


if __name__ == "__main__":
    main()
