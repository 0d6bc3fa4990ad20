"""Episodes that wait for tools and environments: do the waits overlap with generation and training?

    python benchmarks/agentic.py [MODEL_DIR] [--steps 10] [--json out.json]

Every call takes 0.5 to 5 s, drawn from a seed (log-normal, median 1.5 s, cut at both ends). Nothing is to be had by making calls
faster, so a run cannot beat its slower side, with calls that cost nothing. How near it comes is how much of its full rate the
slower side reaches (engine, learner: the larger of the two; of_bound in the JSON). Beside it, the same work with buffer.kind =
"none": generate, wait, train, publish, in turn.

The first table is the pipeline that trains, on virtual parts and in virtual time: the engine's full rate is that of 64 sequences
at once, so an engine half of whose sequences are waiting counts as half busy. With too few episodes ahead (S = 1) calls do show.
The second, with MODEL_DIR (SmolLM2), is real: the embedded engine and the learner share this machine, a side's seconds are
those it computed, and an environment sleeps on the event loop. A turn ends with a sentence; one that the budget cuts ends its
episode. Figures leave out the first steps: all slots are admitted at once there, and finish in waves. A short real run is
flattered by what lay finished when it began to count; how busy its slower side was is not.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import runs

from corrente import config as c
from corrente.config import Limits, RunConfig
from corrente.sim.distributions import Distribution, Fixed, LogNormal, generator
from corrente.sim.speed import Speed
from corrente.testing import World, simulate
from corrente.testing.world import flow

LOW_S, HIGH_S, MEDIAN_S, SIGMA = 0.5, 5.0, 1.5, 0.7


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """``body``, cut at both ends."""

    body: Distribution
    low: float
    high: float

    def draw(self, rng: Any) -> float:
        return min(self.high, max(self.low, self.body.draw(rng)))

    @property
    def mean(self) -> float:
        rng = generator(0, "mean")
        return sum(self.draw(rng) for _ in range(10_000)) / 10_000


CALLS = Cut(body=LogNormal(median=MEDIAN_S, sigma=SIGMA), low=LOW_S, high=HIGH_S)


# ---- virtual ----------------------------------------------------------------------------------------------------------------

P, G, TOKENS = 8, 8, 200
"""Groups a step, episodes a group, and median tokens of a turn."""
SKIP = 8
"""Steps until the flow is steady."""
SHARES = (0.5, 1.0, 1.5)
"""Seconds of an optimizer step, in parts of what generation alone takes for it: generation-bound, balanced, training-bound."""


SPEED = Speed(step_s=0.02, per_sequence_s=0.0003, flip_s=0.001)
SEQUENCES = 64
STAGE_S = 0.2


def steady(config: RunConfig, of: World, *, learner_s: float) -> tuple[float, float, float]:
    """Seconds per step once the flow is steady, and how much of its full rate each side reached: engine, learner. The engine's
    full rate is that of ``SEQUENCES`` at once; the learner's is a step every ``learner_s``."""
    run = simulate(config, of)
    assert run.counts["trained"] == config.run.steps * config.run.prompts_per_step
    rows = [values for _, values in run.sink.rows if "engine/decode_tokens" in values][SKIP:]
    elapsed_s = rows[-1]["time/elapsed_s"] - rows[0]["time/elapsed_s"]
    decoded = rows[-1]["engine/decode_tokens"] - rows[0]["engine/decode_tokens"]
    count = len(rows) - 1
    engine = decoded * SPEED.decode_s(SEQUENCES) / SEQUENCES / elapsed_s
    return elapsed_s / count, engine, count * learner_s / elapsed_s


def virtual(*, turns: int, ahead: int, share: float, steps: int) -> dict[str, float]:
    """One setting: ``share`` is the time of a training step in parts of generation's."""
    lengths, limits = LogNormal(median=TOKENS, sigma=0.4), Limits(episode_s=1e5, watchdog_s=1e6)
    generate_s = P * G * turns * lengths.mean * SPEED.decode_s(SEQUENCES) / SEQUENCES
    learner_s = share * generate_s
    of = World(
        lengths=lengths,
        speed=SPEED,
        max_sequences=SEQUENCES,
        turns=turns,
        tool_s=CALLS,
        step_s=Fixed(learner_s - STAGE_S),
        export_s=Fixed(STAGE_S),
        deliver_s=Fixed(0.0),
    )
    config = flow(steps=steps, prompts=P, size=G, ahead=ahead, window=None, limits=limits)
    config = msgspec.structs.replace(config, buffer=c.Window())
    sync = msgspec.structs.replace(config, buffer=c.NoBuffer(), staleness=c.Staleness(max=0))
    run_s, engine, learner = steady(config, of, learner_s=learner_s)
    sync_s, _, _ = steady(sync, of, learner_s=learner_s)
    return {
        "turns": turns,
        "ahead": ahead,
        "train_over_generate": share,
        "generate_s": round(generate_s, 3),
        "train_s": round(learner_s, 3),
        "run_s": round(run_s, 3),
        "sync_s": round(sync_s, 3),
        "engine": round(engine, 3),
        "learner": round(learner, 3),
        "of_bound": round(max(engine, learner), 3),
        "speedup": round(sync_s / run_s, 2),
    }


def show_virtual(rows: list[dict[str, float]]) -> None:
    print(
        f"virtual: {P} x {G} episodes a step, {TOKENS} tokens a turn, a call after each turn but the last; s per step"
    )
    head = ("turns", "S", "generate", "train", "run", "engine", "learner", "sync", "speed-up")
    print("".join(f"{name:>10}" for name in head))
    for row in rows:
        print(
            f"{row['turns']:>10}{row['ahead']:>10}{row['generate_s']:>10.1f}{row['train_s']:>10.1f}{row['run_s']:>10.1f}"
            f"{row['engine']:>10.1%}{row['learner']:>10.1%}{row['sync_s']:>10.1f}{row['speedup']:>9.2f}x"
        )


# ---- real -------------------------------------------------------------------------------------------------------------------

CONFIG = """
[run]
steps = {steps}
prompts_per_step = {prompts}
group_size = 8

[model]
path = "{model}"

[prompts]
kind = "seeds"

[env]
kind = "environment"
factory = "environment.py:Slow"
max_turns = 2
history = "kept"

[reward]
functions = []

[sampling]
max_tokens = {max_tokens}
stop = [".", "\\n"]

[buffer]
kind = "{buffer}"
{ahead}

[filter]
zero_variance = "skip"
patience = 1000

[eval]
every = 0

[checkpoint]
every = 0
"""
ENVIRONMENT = '''
import math
import random

import anyio

from corrente.env.environment import Observation

THINGS = ("sea", "harbour", "mountain", "market", "railway", "garden", "library", "winter")


class Slow:
    """Two turns; the answer to each takes its time. The reward is variety of letters: it needs no answer, and groups differ."""

    async def reset(self, task, *, seed):
        self._rng = random.Random(random.Random(seed).random() + id(self))
        self._turn = 0
        thing = THINGS[seed % len(THINGS)]
        return Observation(messages=({"role": "user", "content": f"Write a sentence about the {thing}."},))

    async def step(self, message):
        self._turn += 1
        drawn = MEDIAN_S * math.exp(self._rng.gauss(0.0, SIGMA))
        await anyio.sleep(min(HIGH_S, max(LOW_S, drawn)))
        said = str(message["content"])
        reward = len(set(said)) / max(len(said), 1)
        return Observation(reward=reward, done=self._turn == 2, messages=({"role": "user", "content": "Write another."},))

    async def close(self):
        pass
'''


def measure(args: argparse.Namespace, *, buffer: str) -> dict[str, Any]:
    """One run as a user would start it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        numbers = f"LOW_S, HIGH_S, MEDIAN_S, SIGMA = {LOW_S}, {HIGH_S}, {MEDIAN_S}, {SIGMA}\n"
        (folder / "environment.py").write_text(numbers + ENVIRONMENT)
        ahead = f"\n[staleness]\nmax = {args.ahead}" if buffer == "window" else ""
        config = CONFIG.format(
            steps=args.steps,
            prompts=args.prompts,
            model=args.model,
            max_tokens=args.max_tokens,
            buffer=buffer,
            ahead=ahead,
        )
        done = runs.run(config, folder, name="agentic", sets=args.sets)
    elapsed_s = done.span("time/elapsed_s")
    engine_s = done.span("engine/busy_s")
    learner_s = done.total("learner/busy_s") + done.total("time/stage_s")
    return {
        "buffer": buffer,
        "step_s": round(elapsed_s / len(done.steps_s), 3),
        "engine_busy": round(engine_s / elapsed_s, 3),
        "learner_busy": round(learner_s / elapsed_s, 3),
        "of_bound": round(max(engine_s, learner_s) / elapsed_s, 3),
        "turns": round(sum(done.curve("env/turns")) / len(done.steps), 2),
        "wall_s": round(done.wall_s, 1),
    }


def show_real(rows: list[dict[str, Any]], *, calls_s: float) -> None:
    print(f"\nreal: {rows[0]['turns']} turns an episode, a call of {calls_s:.2f} s on average after each; s per step")
    print(f"{'':>8}{'run':>9}{'engine':>9}{'learner':>9}{'of bound':>10}")
    for row in rows:
        name = "sync" if row["buffer"] == "none" else "run"
        print(
            f"{name:>8}{row['step_s']:>9.2f}{row['engine_busy']:>9.1%}{row['learner_busy']:>9.1%}{row['of_bound']:>10.3f}"
        )
    if len(rows) == 2:
        print(f"speed-up {rows[1]['step_s'] / rows[0]['step_s']:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", help="directory of the converted SmolLM2-135M-Instruct; none: virtual alone"
    )
    parser.add_argument("--steps", type=int, default=10, help="of each real run")
    parser.add_argument("--prompts", type=int, default=4, help="groups of 8 a step, of the real runs")
    parser.add_argument("--max-tokens", type=int, default=24, help="of a turn, in the real runs")
    parser.add_argument("--ahead", type=int, default=3, help="staleness.max of the real run")
    parser.add_argument("--virtual-steps", type=int, default=20, help="0: no virtual runs")
    parser.add_argument("--turns", type=int, nargs="+", default=[3], help="of the virtual runs")
    parser.add_argument("--versions", type=int, nargs="+", default=[1, 3], help="staleness.max of the virtual runs")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=SHARES, help="train over generate, of the virtual runs"
    )
    parser.add_argument("--buffers", nargs="+", default=["window", "none"], choices=["window", "none"])
    parser.add_argument("--set", dest="sets", action="append", default=[], help="passed on to corrente run")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    result: dict[str, Any] = {"machine": runs.machine(), "calls_mean_s": round(CALLS.mean, 3)}
    if args.virtual_steps:
        result["virtual"] = [
            virtual(turns=turns, ahead=ahead, share=share, steps=args.virtual_steps)
            for turns in args.turns
            for ahead in args.versions
            for share in args.shares
        ]
        show_virtual(result["virtual"])
    if args.model:
        args.model = str(Path(args.model).resolve())
        result["real"] = [measure(args, buffer=buffer) for buffer in args.buffers]
        show_real(result["real"], calls_s=CALLS.mean)
    runs.write(args.json, result)


if __name__ == "__main__":
    main()
