"""Two agents, one policy, from random weights: a model learns Nim by playing against itself. Minutes on a CPU.

    python examples/selfplay.py [--steps 120] [--seed 0] [--set KEY=VALUE ...]

There is a pile of 5 to 7; whoever is to move takes 1 to 3; who takes the last wins. Who begins can always win, by leaving 4. At
first the model does not even know which of its tokens are numbers, and a move that is not allowed loses. Both players are the
same weights: as the second gets harder to beat, the first has to play better. A game between perfect players is won by the first,
so the first agent's reward rises from about -0.7 to 1, and the second's ends at -1.

Each agent is compared with those who had its part in the other games of its group, and reads only what it is told. To train a
model of yours in a game of yours, write a class like Nim, and name it in ``env.factory``: see docs/how-to/several-agents.md.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corrente.env.environment import Observation

AGENTS = ("first", "second")
NUMBERS = "1234567"


class Nim:
    """The game, as an Environment: an agent is told the pile, and says how many it takes."""

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
        self._pile, self._mover = random.Random(seed).randint(5, 7), 0
        return self._look()

    async def step(self, message: Mapping[str, Any]) -> Observation:
        said = str(message["content"])
        taken = int(said) if said and said in "123" else 0
        mover, other = AGENTS[self._mover], AGENTS[1 - self._mover]
        if not 1 <= taken <= self._pile:
            return Observation(done=True, rewards={mover: -1.0, other: 0.0}, info={"allowed": 0})
        self._pile -= taken
        if not self._pile:
            return Observation(done=True, rewards={mover: 1.0, other: -1.0}, info={"allowed": 1})
        self._mover = 1 - self._mover
        return self._look()

    async def close(self) -> None:
        """Nothing is held."""

    def _look(self) -> Observation:
        return Observation(agent=AGENTS[self._mover], messages=({"role": "user", "content": str(self._pile)},))


LETTERS = ("<s>", "</s>", "?", "!", *NUMBERS)
TEMPLATE = (
    "{% for m in messages %}{{ '?' if m['role'] == 'user' else '!' }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}!{% endif %}"
)
"""``?`` before what an agent is told, ``!`` before what it says."""


def write_model(folder: Path, *, seed: int) -> Path:
    """A Llama of two layers with random weights, and a tokenizer of one token per letter."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = Tokenizer(models.WordLevel({letter: at for at, letter in enumerate(LETTERS)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(LETTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tables(model: Path, *, runs: Path, steps: int, seed: int) -> dict[str, Any]:
    """The config of the run. Every token ends a turn, so a turn is one token and none is cut off."""
    return {
        "run": {
            "name": "selfplay",
            "dir": str(runs),
            "steps": steps,
            "prompts_per_step": 6,
            "group_size": 16,
            "seed": seed,
        },
        "model": {"path": str(model)},
        "prompts": {"kind": "seeds"},
        "env": {"kind": "environment", "factory": f"{Path(__file__).resolve()}:Nim"},
        "reward": {"functions": []},
        "sampling": {"max_tokens": 1, "stop_token_ids": list(range(len(LETTERS)))},
        "runtime": {"kind": "inline", "threads": 1},
        "learner": {"lr": 0.001},
        "filter": {"zero_variance": "skip", "patience": 1000},
        "eval": {"every": 0},
        "checkpoint": {"every": 0},
    }


class Curve:
    """A sink that keeps what the agents earn, step by step, and shows every fifth."""

    def __init__(self, *, show: bool = True) -> None:
        self.first: list[float] = []
        self.allowed: list[float] = []
        self._show = show

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Take in the numbers of one step; of one in which no game ended, none."""
        if "reward/agent/first" not in values:
            return
        self.first.append(values["reward/agent/first"])
        self.allowed.append(values.get("env/allowed", 0.0))
        if self._show and step % 5 == 0:
            second = values.get("reward/agent/second", 0.0)
            games = f"{self.allowed[-1]:4.0%} of games end by the rules"
            print(f"step {step:>3}   first {self.first[-1]:+.2f}   second {second:+.2f}   {games}")

    def log_span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        """Not kept."""

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        """Not kept."""

    def log_event(self, level: str, message: str) -> None:
        """Shown."""
        if self._show:
            print(f"{level}: {message}")

    def close(self) -> None:
        """Nothing is held."""


def play(folder: Path, *, steps: int, seed: int, sets: list[str] | None = None, show: bool = True) -> Curve:
    """Write the model, and train it in ``folder``."""
    import anyio

    from corrente.config.load import parse_config
    from corrente.entrypoints.checks import check_config
    from corrente.entrypoints.train import run_training

    model = write_model(folder / "model", seed=seed)
    config = parse_config(tables(model, runs=folder, steps=steps, seed=seed), sets or [])
    check_config(config)
    curve = Curve(show=show)
    anyio.run(lambda: run_training(config, sinks=[curve]))
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/selfplay"))
    parser.add_argument("--set", dest="sets", action="append", default=[], help="any knob of the run")
    args = parser.parse_args()
    play(args.folder, steps=args.steps, seed=args.seed, sets=args.sets)


if __name__ == "__main__":
    main()
