"""An evaluation as a table: a row for all prompts, and one for each source where there are several. Pure; prints nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping

PASS = re.compile(r"eval/pass@(\d+)")
ALL = "all"


def eval_table(metrics: Mapping[str, float]) -> list[list[str]]:
    """Cells, the first row being the head; ``metrics`` as eval_metrics gives them. What was not measured is "-"."""
    ks = sorted(int(found.group(1)) for name in metrics if (found := PASS.fullmatch(name)))
    sources = sorted({name.split("/")[1] for name in metrics if name.count("/") == 2 and name.endswith("/tokens_mean")})
    head = ["prompts", "reward", "std", *(f"pass@{k}" for k in ks), "tokens", "cut off"]
    return [head, *(_row(metrics, source, ks) for source in ("", *sources))]


def aligned(table: list[list[str]]) -> list[str]:
    """The rows as lines of one width a column."""
    widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _row(metrics: Mapping[str, float], source: str, ks: list[int]) -> list[str]:
    area = f"eval/{source}" if source else "eval"

    def number(name: str, form: str = ".3f") -> str:
        return format(metrics[f"{area}/{name}"], form) if f"{area}/{name}" in metrics else "-"

    error = f" ± {number('reward_stderr')}" if f"{area}/reward_stderr" in metrics else ""
    passes = [number(f"pass@{k}") for k in ks]
    return [
        source or ALL,
        f"{number('reward')}{error}",
        number("reward_std"),
        *passes,
        number("tokens_mean", ".1f"),
        number("truncated_fraction", ".0%"),
    ]
