"""From a config's ``prompts`` section to where work comes from, and to what is held out for evaluation."""

from __future__ import annotations

from collections.abc import Callable

from corrente.config import Arithmetic, Jsonl, RunConfig
from corrente.prompts.arithmetic import ArithmeticPrompts, held_out_prompts
from corrente.prompts.base import Prompts
from corrente.prompts.jsonl import JsonlPrompts, held_out_rows
from corrente.types import Prompt

Encode = Callable[[str], list[int]]


def build(config: RunConfig, encode: Encode) -> Prompts:
    """The training prompts."""
    match config.prompts:
        case Arithmetic() as arithmetic:
            return ArithmeticPrompts(arithmetic, encode, seed=config.run.seed)
        case Jsonl() as jsonl:
            return JsonlPrompts(jsonl, encode, seed=config.run.seed)


def build_eval(config: RunConfig, encode: Encode) -> tuple[Prompt, ...]:
    """The held-out prompts, at most ``eval.prompts``; none when evaluation is off or the dataset has none."""
    if not config.eval.every:
        return ()
    match config.prompts:
        case Arithmetic() as arithmetic:
            return held_out_prompts(arithmetic, encode, count=config.eval.prompts)
        case Jsonl() as jsonl:
            return held_out_rows(jsonl, encode, count=config.eval.prompts)
