"""The planner beside step times that others have published for their own systems.

    python benchmarks/planner.py [--steps 8] [--json FILE]

Prints seconds of a step as published and as predicted, and their ratio. The rows are those of which model, devices, batch and
mean length are public. Their system is not corrente: it holds one copy of the weights in an engine, and computes log-probs of the
policy and of a reference model in passes of their own; so does each prediction.

Sources: NVIDIA NeMo RL, performance summary of its documentation, v0.5 (Llama-3.1-8B, Qwen3-32B) and v0.6 (Qwen3-30B-A3B).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec

from corrente.plan.devices import find_device
from corrente.plan.lengths import parse_lengths
from corrente.plan.models import find_model
from corrente.plan.predict import predict
from corrente.plan.setting import Setting, Split


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A published step: ``split`` of the devices, 0 training ones: engines and learner share them."""

    model: str
    gpus: str
    devices: int
    tokens: str
    generating: int
    training: int
    parallel: int
    seconds: float

    @property
    def split(self) -> Split:
        if not self.training:
            return Split(
                generating=self.devices,
                training=self.devices,
                tensor_parallel=self.parallel,
                ahead=0,
                colocated=True,
            )
        return Split(generating=self.generating, training=self.training, tensor_parallel=self.parallel, ahead=1)


def _row(
    model: str, gpus: str, devices: int, tokens: str, parts: tuple[int, int], parallel: int, seconds: float
) -> Published:
    return Published(
        model=model,
        gpus=gpus,
        devices=devices,
        tokens=tokens,
        generating=parts[0],
        training=parts[1],
        parallel=parallel,
        seconds=seconds,
    )


SHARED = (0, 0)
ROWS = (
    _row("Llama-3.1-8B", "H100", 16, "mean 1071, max 4096", SHARED, 1, 92.8),
    _row("Llama-3.1-8B", "H100", 16, "mean 1071, max 4096", (8, 8), 1, 64.8),
    _row("Qwen3-32B", "H100", 32, "mean 3251, max 4096", SHARED, 4, 376.0),
    _row("Qwen3-32B", "H100", 64, "mean 3251, max 4096", (32, 32), 4, 200.0),
    _row("Qwen3-30B-A3B", "H100", 32, "mean 3203, max 4096", SHARED, 2, 192.0),
    _row("Qwen3-30B-A3B", "H100", 32, "mean 3203, max 4096", (16, 16), 2, 152.0),
    _row("Qwen3-30B-A3B", "GB200", 16, "mean 3203, max 4096", SHARED, 1, 221.0),
    _row("Qwen3-30B-A3B", "GB200", 16, "mean 3203, max 4096", (8, 8), 1, 301.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, default=None)
    chosen = parser.parse_args()
    report: list[dict[str, object]] = []
    print(f"{'model':16}{'devices':>12}{'engines : learner':>20}{'published s':>13}{'predicted s':>13}{'ratio':>8}")
    for row in ROWS:
        setting = Setting(
            model=find_model(row.model),
            device=find_device(row.gpus),
            devices=row.devices,
            prompts=64,
            group=32,
            prompt_tokens=128,
            lengths=parse_lengths(row.tokens),
            logprob_passes=2,
            slots=1,
        )
        made = predict(setting, row.split, steps=chosen.steps)
        parts = f"{row.generating} : {row.training}" if row.training else "shared"
        ratio = made.step_s / row.seconds
        devices = f"{row.devices} x {row.gpus}"
        print(f"{row.model:16}{devices:>12}{parts:>20}{row.seconds:13.1f}{made.step_s:13.1f}{ratio:8.2f}")
        report.append(msgspec.to_builtins(row) | {"predicted_s": made.step_s, "ratio": ratio})
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
