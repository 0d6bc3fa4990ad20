"""Writes metrics.md, the reference of every metric, from src/corrente/observe/metric_catalogue.py.

python docs/reference/generate_metrics.py            write it
python docs/reference/generate_metrics.py --check    exit 1 when it is not current
"""

from __future__ import annotations

import sys
from pathlib import Path

from corrente.observe.metric_catalogue import AREAS

PAGE = Path(__file__).with_name("metrics.md")

INTRO = """\
# Metrics

Every number a run writes to `metrics.jsonl` and to trackers. This page is generated from
`src/corrente/observe/metric_catalogue.py` by `docs/reference/generate_metrics.py`.

*Combined* says how a number is made of the parts of a step (micro-batches, workers, tokens, episodes): `mean` is weighted by what
it is a mean of, `sum`, `min` and `max` are what they say, `last` is the state at the moment of the report, `derived` is made of
others after those were combined. So no number depends on how a step is cut. In a name, `<b>` is a
bucket of lag, `0`, `1`, `2`, `3-4` or `5+` versions; other words in `<>` are named by the run. Means over tokens are over those
that were trained.

What the numbers say of stale samples, and which of them ring an alarm: [staleness](../explanation/staleness.md#what-to-watch).
"""


def main() -> None:
    page = render()
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page)
    PAGE.write_text(page, encoding="utf-8")


def render() -> str:
    """The whole page."""
    parts = [INTRO]
    for title, rows in AREAS:
        parts.append(f"\n## {title}\n\n| metric | unit | combined | |\n|---|---|---|---|\n")
        parts += [f"| `{row.name}` | {row.unit} | {row.combined} | {row.meaning} |\n" for row in rows]
    return "".join(parts)


if __name__ == "__main__":
    main()
