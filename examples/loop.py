"""A run whose parts are put together by hand, so that each can be replaced by one of yours. Seconds on a CPU.

    python examples/loop.py [MODEL]

The policy learns to write even token ids. MODEL is the directory of a Hugging Face causal LM; the default is a tiny random Llama.
"""

import sys
import tempfile
from pathlib import Path

import anyio
import numpy as np
from msgspec.structs import replace
from rich.console import Console
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from corrente import config as c
from corrente.algo.grouped import GroupedAlgorithm
from corrente.buffer.window import WindowBuffer
from corrente.controller import pipeline
from corrente.controller.parts import Parts
from corrente.controller.plan import Plan
from corrente.data.types import Group, Metrics
from corrente.engine.embedded.async_engine import EmbeddedEngine
from corrente.engine.embedded.core import EmbeddedCore
from corrente.env.single import SingleTurnEnv
from corrente.inflight.policies import SwapPolicy
from corrente.learner.core import TorchLearner
from corrente.observe.console import ConsoleSink
from corrente.prompts.arithmetic import ArithmeticPrompts
from corrente.runtime.inline import InlineLearner
from corrente.staleness.policies import Accept
from corrente.sync.inproc import InprocSync
from corrente.sync.weight_slots import allocate_slots


class EvenTokens:
    """Implements Scorer: the reward of a completion is the part of its token ids that are even."""

    async def score(self, group: Group) -> Group:
        rewards = [float(np.mean(e.completions[-1].tokens % 2 == 0)) for e in group.episodes]
        return replace(group, episodes=tuple(map(lambda e, r: replace(e, reward=r), group.episodes, rewards)))

    def stats(self) -> Metrics:
        return {}


async def main(model: str, lr: float) -> None:
    sampling, plan = c.Sampling(max_tokens=8), Plan(steps=20, prompts_per_step=4, group_size=8, max_age=1)
    config = c.RunConfig(model=c.Model(path=model), sampling=sampling, learner=c.LearnerConfig(lr=lr))
    core, learner = EmbeddedCore(model=Path(model)), TorchLearner(config)
    core.attach_buffers(slots := allocate_slots(core.layout()))  # two versions: a flip goes from one to the other
    engine, plain = EmbeddedEngine(core), not (Path(model) / "tokenizer.json").exists()
    encode = (lambda text: list(text.encode())) if plain else AutoTokenizer.from_pretrained(model).encode
    parts = Parts(
        plan=plan,
        prompts=ArithmeticPrompts(c.Arithmetic(), encode, seed=0),
        engine=engine,
        env=SingleTurnEnv(sampling),
        scorer=EvenTokens(),
        buffer=WindowBuffer(slots=8, window=1),  # (S + 1) x 4 groups: generation may run S = 1 version ahead
        staleness=Accept(),
        algorithm=GroupedAlgorithm(config),
        learner=InlineLearner(learner),
        sync=InprocSync(engine=engine, layout=core.layout(), buffers=slots, tensors=learner.tensors),
        inflight=SwapPolicy(),
        sink=ConsoleSink(Console(), steps=plan.steps),
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        print(await pipeline.run(parts))
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tiny = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        LlamaForCausalLM(tiny).save_pretrained(folder)
        anyio.run(main, *((sys.argv[1], 1e-5) if len(sys.argv) > 1 else (folder, 3e-3)))
