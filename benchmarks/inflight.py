"""What each inflight policy costs and does, on the same work: whole runs of the real pipeline, engine and learner.

    python benchmarks/inflight.py MODEL [--steps 12] [--repeats 3] [--json FILE]

Every run generates and trains on the same prompts, each once: STEPS x 4 prompts of 4 completions, one in eight of them eight
times as long as the others, so that weights land while the long ones are being written. Weights are published after every step.
`none` is the run they are compared with: it takes the same steps and publishes nothing, so it keeps the first weights and pays
neither for the copy nor for the flip. Runs of all policies alternate; figures are medians over the repeats.

lost         tokens that were sampled and are in no completion that was handed on, of all that were sampled
recomputed   prompt and completion tokens that went through the engine again, beyond what `none` had to prefill
pause        of the engine at a flip, as the engine measures it; mean and longest
landing      from the moment an update is staged until it is live: what drain and barrier wait
lag          of trained tokens, in versions
mismatch     mean |learner - engine| of the log-probs of lag-0 tokens, behind a prefix of the same weights / of older ones:
             numerics / numerics and keys and values of older weights
mixed        completions sampled by more than one version
throughput   trained tokens per second, relative to `none`
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import runs

from corrente.config.load import parse_config
from corrente.controller import pipeline
from corrente.controller.parts import Parts
from corrente.data.types import Completion, Metrics, Prompt, Sampling
from corrente.engine.base import EngineStats
from corrente.entrypoints.assemble import open_parts
from corrente.entrypoints.inputs import RunInputs
from corrente.env.base import Generate, PlayedEpisode
from corrente.env.single import SingleTurnEnv
from corrente.sim.distributions import generator
from corrente.sync.base import Flip, Sync, Update

KINDS = ("none", "swap", "recompute", "resume", "drain", "barrier", "cancel", "snapshot")
PROMPTS, SIZE = 4, 4
LONG, SHARE = 8, 1 / 8
THINGS = ("sea", "harbour", "mountains", "market", "railway", "garden", "library", "winter")


def variety(completions: list[str], **_: Any) -> list[float]:
    """A reward that needs no answer: groups differ in it."""
    return [len(set(text)) / max(len(text), 1) for text in completions]


class LongTailed:
    """One completion a prompt; an eighth of the episodes get eight times the budget. Keeps what was said."""

    def __init__(self, tokens: int) -> None:
        self._short = SingleTurnEnv(Sampling(max_tokens=tokens))
        self._long = SingleTurnEnv(Sampling(max_tokens=tokens * LONG))
        self.said: list[Completion] = []

    async def play(self, prompt: Prompt, generate: Generate, *, key: str, group: str, seed: int) -> PlayedEpisode:
        env = self._long if generator(seed, "long").random() < SHARE else self._short
        played = await env.play(prompt, generate, key=key, group=group, seed=seed)
        self.said += [turn.completion for turn in played.turns if turn.completion is not None]
        return played


class Still:
    """A sync that brings the first version and, from then on, nothing: versions advance on paper."""

    def __init__(self, inner: Sync) -> None:
        self._inner = inner

    async def export(self, version: int) -> None:
        if version == 0:
            await self._inner.export(version)

    async def deliver(self, version: int) -> Update:
        return await self._inner.deliver(version) if version == 0 else Update(version=version, slot=0)

    async def flip(self, update: Update, mode: Any) -> Flip:
        return await self._inner.flip(update, mode) if update.version == 0 else Flip(pause_s=0.0)

    async def catch_up(self, receiver: Any) -> None:
        await self._inner.catch_up(receiver)

    def stats(self) -> Metrics:
        return self._inner.stats()


class Record:
    """A sink that keeps metrics and what flips and landings cost."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []
        self.pauses_ms: list[float] = []
        self.landings_s: list[float] = []

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(dict(values))

    def log_span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        first = name.endswith(" 0")
        if track == "engine" and not first:
            self.pauses_ms.append(attrs["pause_ms"])
        if name.startswith("publish ") and not first:
            self.landings_s.append(stop_s - start_s)

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        pass

    def log_event(self, level: str, message: str) -> None:
        pass

    def close(self) -> None:
        pass

    def column(self, name: str) -> list[float]:
        return [values[name] for values in self.steps if name in values]


def tables(args: argparse.Namespace, folder: Path, kind: str) -> dict[str, Any]:
    inline = args.runtime == "inline"
    return {
        "run": {"steps": args.steps, "prompts_per_step": PROMPTS, "group_size": SIZE, "dir": str(folder)},
        "model": {"path": args.model},
        "prompts": {"kind": "jsonl", "path": str(folder / "prompts.jsonl"), "epochs": 1},
        "sampling": {"max_tokens": args.tokens * LONG},
        "runtime": {"kind": args.runtime},
        "sync": {"kind": "inproc" if inline else "shm"},
        "staleness": {"max": args.ahead},
        "inflight": {"kind": "swap" if kind == "none" else kind, **({"max_age": 0} if kind == "cancel" else {})},
        "filter": {"zero_variance": "keep"},
        "eval": {"every": 0},
        "checkpoint": {"every": 0},
    }


def write_prompts(args: argparse.Namespace, folder: Path) -> None:
    texts = [f"Day {at}. A long letter about the {THINGS[at % 8]}. It began" for at in range(args.steps * PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


async def play(args: argparse.Namespace, folder: Path, kind: str) -> dict[str, float]:
    """One run, from the first admission to the last token's step."""
    config, record, env = parse_config(tables(args, folder, kind)), Record(), LongTailed(args.tokens)
    async with open_parts(config, sinks=[record], inputs=RunInputs(reward_functions=[variety])) as parts:
        changed: dict[str, Any] = {"env": env}
        if kind == "none":
            plan = msgspec.structs.replace(parts.plan, max_age=None)  # tokens keep the label of the first version
            changed |= {"sync": Still(parts.sync), "plan": plan}
        parts: Parts = msgspec.structs.replace(parts, **changed)
        outcome = await pipeline.run(parts)
        stats = await parts.engine.stats()
    return figures(record, env.said, stats, outcome.elapsed_s, outcome.counts)


def figures(
    record: Record, said: Sequence[Completion], stats: EngineStats, elapsed_s: float, counts: Mapping[str, int]
) -> dict[str, float]:
    trained = sum(record.column("samples/tokens"))
    clean, mixed = (record.column(f"mismatch_{prefix}/logprob_gap_mean") for prefix in ("clean", "mixed"))
    return {
        "elapsed_s": elapsed_s,
        "trained_groups": float(counts["trained"]),
        "cancelled_groups": float(counts["cancelled"]),
        "trained_tokens": trained,
        "sampled_tokens": float(stats.decode_tokens),
        "lost_fraction": (stats.decode_tokens - trained) / stats.decode_tokens,
        "prefill_tokens": float(stats.prefill_tokens),
        "pause_ms_mean": statistics.fmean(record.pauses_ms or [0.0]),
        "pause_ms_max": max(record.pauses_ms, default=0.0),
        "landing_s_mean": statistics.fmean(record.landings_s or [0.0]),
        "landing_s_max": max(record.landings_s, default=0.0),
        "lag_mean": statistics.fmean(record.column("lag/mean")),
        "lag_max": max(record.column("lag/max")),
        "mismatch_clean_mean": statistics.fmean(clean) if clean else float("nan"),
        "mismatch_mixed_mean": statistics.fmean(mixed) if mixed else float("nan"),
        "mixed_fraction": sum(len(done.spans) > 1 for done in said) / len(said),
        "tokens_per_s": trained / elapsed_s,
    }


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def show(result: Mapping[str, Mapping[str, float]]) -> None:
    still = result.get("none")
    print(
        f"\n{'':10}{'lost':>7}{'recomputed':>12}{'pause (max)':>19}{'landing (max)':>19}{'lag (max)':>14}"
        f"{'mismatch':>20}{'mixed':>8}{'tokens/s':>10}{'throughput':>12}"
    )
    for kind, row in result.items():
        again = row["prefill_tokens"] - still["prefill_tokens"] if still else float("nan")
        relative = row["tokens_per_s"] / still["tokens_per_s"] if still else float("nan")
        pause = f"{row['pause_ms_mean']:.2f} ({row['pause_ms_max']:.2f}) ms"
        landing = f"{row['landing_s_mean']:.2f} ({row['landing_s_max']:.2f}) s"
        lag = f"{row['lag_mean']:.2f} ({row['lag_max']:.0f})" if kind != "none" else "-"
        mismatch = f"{row['mismatch_clean_mean']:.1e} / {row['mismatch_mixed_mean']:.1e}" if kind != "none" else "-"
        print(
            f"{kind:10}{row['lost_fraction']:>7.1%}{again:>12.0f}{pause:>19}{landing:>19}{lag:>14}{mismatch:>20}"
            f"{row['mixed_fraction']:>8.1%}{row['tokens_per_s']:>10.1f}{relative:>12.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model directory, or a name that corrente knows")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--tokens", type=int, default=16, help="budget of a short completion; a long one has eight times it"
    )
    parser.add_argument("--ahead", type=int, default=2, help="staleness.max")
    parser.add_argument("--runtime", choices=["procs", "inline"], default="procs")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    machine, rows = runs.machine(), {kind: list[dict[str, float]]() for kind in args.kinds}
    with tempfile.TemporaryDirectory() as place:
        write_prompts(args, Path(place))
        for _ in range(args.repeats):
            for kind in args.kinds:
                rows[kind].append(row := anyio.run(play, args, Path(place), kind))
                print(f"{kind}: {row['tokens_per_s']:.1f} tokens/s in {row['elapsed_s']:.0f} s", flush=True)
    result = {kind: medians(found) for kind, found in rows.items()}
    show(result)
    settings = {k: v for k, v in vars(args).items() if k != "json"}
    runs.write(args.json, {"machine": machine, "settings": settings, "median": result, "all": rows})


if __name__ == "__main__":
    main()
