"""An evaluation as a table: a row for all prompts, and one for each source where there are several. It prints nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping

PASS = re.compile(r"eval/pass@(\d+)")
ALL = "all"


def eval_table(metrics: Mapping[str, float]) -> list[list[str]]:
    """The cells of the table, head first. ``metrics`` as controller.eval_metrics names them; "-" where one is missing."""
    ks = sorted(int(found.group(1)) for name in metrics if (found := PASS.fullmatch(name)))
    sources = sorted({name.split("/")[1] for name in metrics if name.count("/") == 2 and name.endswith("/tokens_mean")})
    head = ["prompts", "reward", "std", *(f"pass@{k}" for k in ks), "tokens", "cut off"]
    return [head, *(_table_row(metrics, source, ks) for source in ("", *sources))]


def align_columns(table: list[list[str]]) -> list[str]:
    """Format the rows as lines with aligned columns."""
    widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _table_row(metrics: Mapping[str, float], source: str, ks: list[int]) -> list[str]:
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
