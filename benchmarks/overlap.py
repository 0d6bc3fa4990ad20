"""How much of the time both sides are busy, against the bound max(generate, train): plain, with slow rewards, with long tails.

A side's busy seconds are those it computed (engine/busy_s; learner/busy_s and staging). The busier side is the bottleneck, and a
run cannot take less than its busy seconds: `over the bound` is elapsed time over those. Where both sides share all cores, busy
seconds include waiting for a core the other side uses; `cores` is the part of all cores' time the whole run used, start-up and
end included, and says whether there was anything left to win.

    python benchmarks/overlap.py MODEL_DIR --json out.json

plain       1-digit additions, at most 8 new tokens
slow        the same, and each group's reward takes 2 s
long-tail   one prompt in eight is a sentence to continue, ten times as long as a sum
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import runs

CONFIG = """
[run]
steps = {steps}
prompts_per_step = 8
group_size = 8

[model]
path = "{model}"

[prompts]
kind = "jsonl"
path = "prompts.jsonl"
epochs = 0

[reward]
functions = ["rewards.py:{reward}"]

[sampling]
max_tokens = {max_tokens}
stop = ["\\n"]

[filter]
zero_variance = "skip"
patience = 1000

[eval]
every = 0

[checkpoint]
every = 0
"""
REWARDS = '''
import time


def quick(completions, answer):
    """Sums: the exact line. Sentences, which have no answer: variety of letters, so that groups differ."""
    return [
        float(text.strip() == want) if want else len(set(text)) / max(len(text), 1)
        for text, want in zip(completions, answer)
    ]


def slow(completions, answer):
    time.sleep(2)
    return quick(completions, answer)
'''
SHOTS = "2 + 3 = 5\n6 + 1 = 7\n"
SENTENCES = [
    f"A long letter about the {thing}, written without a pause. It began on a morning when nobody was awake, and it"
    for thing in ("sea", "harbour", "mountains", "market", "railway", "garden", "library", "winter")
]
SCENARIOS = {"plain": ("quick", 8, False), "slow": ("slow", 8, False), "long-tail": ("quick", 40, True)}
"""Reward function, budget of new tokens, whether sentences are mixed in."""


def prompts(*, sentences: bool) -> str:
    sums = [{"prompt": f"{SHOTS}{a} + {b} =", "answer": str(a + b)} for a in range(10) for b in range(10)]
    mixed = [{"prompt": text, "answer": ""} for text in SENTENCES[: len(sums) // 8]] if sentences else []
    rows = sums[: 7 * len(mixed)] + mixed if sentences else sums
    return "".join(json.dumps(row) + "\n" for row in rows)


def measure(args: argparse.Namespace, scenario: str, sets: list[str]) -> dict[str, Any]:
    reward, max_tokens, sentences = SCENARIOS[scenario]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "prompts.jsonl").write_text(prompts(sentences=sentences))
        (folder / "rewards.py").write_text(REWARDS)
        config = CONFIG.format(steps=args.steps, model=args.model, reward=reward, max_tokens=max_tokens)
        done = runs.run(config, folder, name="overlap", sets=sets)
    elapsed_s = done.span("time/elapsed_s")
    engine_s = done.span("engine/busy_s")
    learner_s = done.total("learner/busy_s") + done.total("time/stage_s")
    bound_s = max(engine_s, learner_s)
    cores = runs.machine()["cores"]
    return {
        "scenario": scenario,
        "settings": sets,
        "elapsed_s": round(elapsed_s, 2),
        "engine_busy": round(engine_s / elapsed_s, 3),
        "learner_busy": round(learner_s / elapsed_s, 3),
        "bottleneck": "engine" if engine_s >= learner_s else "learner",
        "over_the_bound": round(elapsed_s / bound_s, 3),
        "cores_busy": round(done.processor_s / (cores * done.wall_s), 3),
        "completion_tokens_mean": round(sum(done.curve("completion/tokens_mean")) / len(done.steps), 1),
        "completion_tokens_max": max(done.curve("completion/tokens_max")),
        "wait_learner_groups": round(done.total("wait/learner_groups_fraction") / len(done.steps_s), 3),
        "wait_learner_publish": round(done.total("wait/learner_publish_fraction") / len(done.steps_s), 3),
        "wait_feed_slot": round(done.total("wait/feed_slot_fraction") / len(done.steps_s), 3),
        "samples_per_s": round(64 * len(done.steps_s) / elapsed_s, 2),
    }


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{'':11}{'elapsed':>9}{'engine':>9}{'learner':>9}{'bottleneck':>12}{'over the bound':>16}{'cores':>8}"
        f"{'samples/s':>11}{'tokens':>14}"
    )
    for row in rows:
        tokens = f"{row['completion_tokens_mean']} (max {row['completion_tokens_max']:.0f})"
        print(
            f"{row['scenario']:11}{row['elapsed_s']:>7.1f} s{row['engine_busy']:>9.1%}{row['learner_busy']:>9.1%}"
            f"{row['bottleneck']:>12}{row['over_the_bound']:>15.3f}x{row['cores_busy']:>8.1%}{row['samples_per_s']:>11.2f}"
            f"{tokens:>14}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of the converted SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--set", dest="sets", action="append", default=[], help="passed on to corrente run")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.model = str(Path(args.model).resolve())

    result: dict[str, Any] = {"machine": runs.machine(), "steps": args.steps}
    result["rows"] = [measure(args, scenario, args.sets) for scenario in args.scenarios]
    show(result["rows"])
    runs.write(args.json, result)


if __name__ == "__main__":
    main()
