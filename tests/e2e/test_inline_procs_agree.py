"""Real cores in both runtimes: what is published is what was trained, token by token, and both runtimes say the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from corrente.config import Inline, Inproc, LearnerConfig, Model, Procs, Run, RunConfig, Shm
from corrente.data.types import Batch, Completion, Request, Row, Sampling
from corrente.runtime.base import Runtime, Workers
from corrente.runtime.inline import InlineRuntime
from corrente.runtime.procs import ProcsRuntime
from corrente.sync.base import stage
from corrente.testing import EngineCase, check_engine

pytestmark = pytest.mark.slow

SHAPE = {"vocab_size": 61, "eos_token_id": 60, "bos_token_id": 59, "pad_token_id": None}
ROPE = SHAPE | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama-tied": lambda: LlamaConfig(**ROPE, tie_word_embeddings=True),
    "qwen2-untied": lambda: Qwen2Config(**ROPE, tie_word_embeddings=False),
    "qwen3-tied": lambda: Qwen3Config(**ROPE, head_dim=16, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(**SHAPE, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}
RUNTIMES = {
    "inline": (InlineRuntime, {"runtime": Inline(threads=1), "sync": Inproc()}),
    "procs": (ProcsRuntime, {"runtime": Procs(placement="shared"), "sync": Shm()}),
}


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random tiny model on disk; larger weights than usual, so that a wrong one shows."""
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(CONFIGS[request.param]())
    with torch.no_grad():
        for weight in built.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    built.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _config(model: Path, **given) -> RunConfig:
    # A learning rate at which one step moves every log-prob visibly.
    return RunConfig(
        model=Model(path=str(model)),
        run=Run(seed=1, steps=8),
        learner=LearnerConfig(lr=0.02, max_grad_norm=0.0),
        **given,
    )


def _request(number: int) -> Request:
    rng = np.random.default_rng(number // 2)
    return Request(
        id=str(number),
        tokens=rng.integers(0, 58, 3 + number // 2).astype(np.int32),
        sampling=Sampling(max_tokens=12),
        seed=number,
        group=str(number // 2),
    )


def _batch(done: dict[int, Completion], version: int) -> Batch:
    """Every completion, with advantages that push the members of a pair apart."""
    rows = []
    for number, completion in sorted(done.items()):
        before, after = len(_request(number).tokens), len(completion.tokens)
        zeros = np.zeros(before, np.float32)
        rows.append(
            Row(
                group=number // 2,
                tokens=np.concatenate([_request(number).tokens, completion.tokens]),
                loss_mask=np.arange(before + after) >= before,
                logprobs=np.concatenate([zeros, completion.logprobs]),
                versions=np.concatenate([zeros.astype(np.int32), completion.versions]),
                advantages=np.concatenate([zeros, np.full(after, 1.0 if number % 2 else -1.0, np.float32)]),
            )
        )
    sampled = sum(len(c.tokens) for c in done.values())
    return Batch(step=version, version=version, rows=tuple(rows), sequences=len(rows), tokens=sampled)


async def _generate(workers: Workers) -> dict[int, Completion]:
    done: dict[int, Completion] = {}

    async def ask(number: int) -> None:
        done[number] = await workers.engine.generate(_request(number))

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(ask, number)
    return done


async def _rounds(runtime: Runtime, config: RunConfig, folder: Path) -> list[dict[int, Completion]]:
    """Publish, generate, save, train; three times. What was generated, by version."""
    rounds = []
    async with runtime.open(config) as workers:
        for version in range(3):
            await workers.sync.flip(await stage(workers.sync, version), "swap")
            rounds.append(await _generate(workers))
            (folder / str(version)).mkdir(parents=True)
            await workers.learner.save(folder / str(version))
            metrics = await workers.learner.step(_batch(rounds[-1], version))
            assert metrics["mismatch/logprob_gap_max"] < 1e-4
            assert metrics["train/grad_norm"] > 0
    return rounds


def _plain_logprobs(model: torch.nn.Module, number: int, completion: Completion) -> np.ndarray:
    """Log-probs of a completion by an ordinary forward pass."""
    prompt = _request(number).tokens
    tokens = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))
    with torch.no_grad():
        logits = model(tokens[None]).logits[0].double()
    picked = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    return picked[len(prompt) - 1 :].numpy()


def test_both_runtimes_serve_exactly_what_was_trained(model: Path, tmp_path: Path):
    served = {}
    for name, (runtime, sections) in RUNTIMES.items():
        folder = tmp_path / name
        rounds = anyio.run(_rounds, runtime(), _config(model, **sections), folder)
        served[name] = rounds
        means = []
        for version, done in enumerate(rounds):
            saved = AutoModelForCausalLM.from_pretrained(folder / str(version), dtype=torch.float32).eval()
            for number, completion in done.items():
                assert set(completion.versions.tolist()) == {version}
                np.testing.assert_allclose(completion.logprobs, _plain_logprobs(saved, number, completion), atol=1e-4)
            means.append(np.mean([_plain_logprobs(saved, n, c).mean() for n, c in rounds[0].items()]))
        assert abs(means[1] - means[0]) > 0.01, "training moved nothing, so nothing was shown"
    for inline, procs in zip(served["inline"], served["procs"], strict=True):
        for number in inline:
            np.testing.assert_array_equal(inline[number].tokens, procs[number].tokens)
            np.testing.assert_allclose(inline[number].logprobs, procs[number].logprobs, atol=1e-4)


def test_inline_runtime_leaves_threads_as_they_were(model: Path):
    async def main() -> int:
        async with InlineRuntime().open(_config(model, runtime=Inline(threads=1), sync=Inproc())):
            return torch.get_num_threads()

    before = torch.get_num_threads()
    assert anyio.run(main) == 1
    assert torch.get_num_threads() == before


def test_inline_error_of_the_body_comes_out_as_it_is(model: Path):
    async def main() -> None:
        async with InlineRuntime().open(_config(model, runtime=Inline(threads=1), sync=Inproc())):
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        anyio.run(main)


def test_engine_in_a_child_keeps_the_contract_of_every_engine(tmp_path: Path):
    """One child for all clauses; the model knows no end of sequence, so that only budgets and aborts end anything."""

    async def main() -> None:
        async with ProcsRuntime().open(_config(tmp_path / "model", **RUNTIMES["procs"][1])) as workers:

            @asynccontextmanager
            async def make() -> AsyncIterator[EngineCase]:
                prompt = np.array([5, 6, 7], np.int32)
                sync = workers.sync
                yield EngineCase(
                    engine=workers.engine,
                    stage=partial(stage, sync),
                    flip=sync.flip,
                    prompt=prompt,
                    context=64,
                    long_tokens=48,
                )

            await check_engine(make)

    built = AutoModelForCausalLM.from_config(LlamaConfig(**ROPE | {"eos_token_id": None, "bos_token_id": None}))
    built.save_pretrained(tmp_path / "model")
    anyio.run(main)
