"""The engine serves adapters beside frozen weights: what it samples and scores is what the learner computes, in any version."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.numerics.tiny_engine import Served, build
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from corrente import config as c
from corrente.config import RunConfig
from corrente.data.types import Completion, Sampling, Tokens
from corrente.engine.embedded.async_engine import EmbeddedEngine
from corrente.engine.embedded.core import EmbeddedCore
from corrente.engine.embedded.hf import HFModel
from corrente.engine.embedded.lean import LeanModel
from corrente.errors import ConfigError
from corrente.learner.core import TorchLearner
from corrente.sync.base import Update
from corrente.testing import samples

ALL = c.Lora(rank=4, alpha=12.0)
SOME = c.Lora(rank=3, alpha=3.0, targets=("q_proj", "v_proj", "up_proj", "down_proj"))
CASES = [
    ("llama", "lean", ALL),
    ("llama", "hf", ALL),
    ("llama", "lean", SOME),
    ("qwen3", "lean", ALL),
    ("qwen2", "lean", SOME),
    ("gpt2", "hf", ALL),
    ("qwen3_moe", "hf", ALL),
]
SAMPLED = Sampling(max_tokens=7)


@pytest.fixture(scope="module")
def model_at(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A directory with a tiny model, its weights included."""
    made: dict[str, Path] = {}

    def at(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            model = _mixture() if kind == "qwen3_moe" else build(kind, 1)
            model.save_pretrained(made[kind])
        return made[kind]

    return at


def _mixture() -> Any:
    torch.manual_seed(1)
    shape = Qwen3MoeConfig(
        vocab_size=600,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=96,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    return AutoModelForCausalLM.from_config(shape, dtype=torch.float32)


def _learner(path: Path, adapters: c.Lora | c.LoraMerged | c.Full, *, steps: int = 0) -> TorchLearner:
    core = TorchLearner(
        RunConfig(model=c.Model(path=str(path)), adapters=adapters, learner=c.LearnerConfig(lr=3e-2, max_grad_norm=0))
    )
    for step in range(steps):
        _train(core, step)
    return core


def _train(core: TorchLearner, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [
        samples.row(
            group=group, tokens=rng.integers(2, 600, 10).astype(np.int32), logprobs=-6.0, advantages=rng.normal()
        )
        for group in range(4)
    ]
    core.step(samples.batch(rows=rows))


def _shipped(core: TorchLearner) -> Any:
    """What Served takes for a model: something with weights by name."""
    tensors = {name: tensor.clone() for name, tensor in core.tensors().items()}
    return SimpleNamespace(state_dict=lambda: tensors)


def _prompts() -> list[Tokens]:
    """Two groups of three, which share a beginning, and one alone."""
    rng = np.random.default_rng(7)
    first, second, alone = (rng.integers(2, 600, size).astype(np.int32) for size in (9, 12, 5))
    second[:4] = first[:4]
    return [first] * 3 + [second] * 3 + [alone]


def _logprobs(core: TorchLearner, tokens: Tokens) -> np.ndarray:
    """One plain forward of the learner's model."""
    ids = torch.from_numpy(np.asarray(tokens)).long()[None]
    with torch.no_grad():
        every = core.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return every.gather(1, ids[0, 1:, None])[:, 0].numpy()


def _assert_sampled_by(core: TorchLearner, prompts: Sequence[Tokens], done: Sequence[Completion]) -> None:
    for prompt, completion in zip(prompts, done, strict=True):
        want = _logprobs(core, np.concatenate([prompt, completion.tokens]))[len(prompt) - 1 :]
        np.testing.assert_allclose(completion.logprobs, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "path", "adapters"), CASES)
def test_engine_and_learner_agree_before_and_after_a_publish(kind, path, adapters, model_at):
    """In groups, in one batch, with untrained adapters and after several steps."""
    core = _learner(model_at(kind), adapters)
    served = Served(model_at(kind), _shipped(core), kind=path, adapters=adapters)
    assert isinstance(served.core.model, LeanModel if path == "lean" else HFModel)
    prompts = _prompts()
    before = served.run(prompts, SAMPLED)
    _assert_sampled_by(core, prompts, before)
    for step in range(3):
        _train(core, step)
    served.flip(_shipped(core), 1)
    after = served.run(prompts, SAMPLED)
    _assert_sampled_by(core, prompts, after)
    assert {span.version for completion in after for span in completion.spans} == {1}
    scored = served.core.score(prompts[0]).logprobs
    np.testing.assert_allclose(scored, _logprobs(core, prompts[0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "path"), [("llama", "lean"), ("llama", "hf"), ("qwen3_moe", "hf")])
def test_publish_changes_what_is_served(kind, path, model_at):
    """By output: greedy completions differ, and are those of the merged model served in full."""
    core = _learner(model_at(kind), ALL)
    served = Served(model_at(kind), _shipped(core), kind=path, adapters=ALL)
    greedy = Sampling(max_tokens=8, temperature=0)
    before = served.run(_prompts(), greedy)
    for step in range(4):
        _train(core, step)
    served.flip(_shipped(core), 1)
    after = served.run(_prompts(), greedy)
    assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(after, before, strict=True))
    merged = _learner(model_at(kind), c.LoraMerged(rank=ALL.rank, alpha=ALL.alpha), steps=4)
    whole = Served(model_at(kind), _shipped(merged), kind=path)
    want = whole.run(_prompts(), greedy)
    assert [one.tokens.tolist() for one in after] == [one.tokens.tolist() for one in want]


@pytest.mark.parametrize("path", ["lean", "hf"])
def test_two_adapter_versions_are_served_at_once_and_the_old_one_is_released(path, model_at):
    """Mode snapshot: what is live finishes under the adapter it began with, and its slot may not be written to until then."""
    core = _learner(model_at("llama"), ALL, steps=2)
    old = _learner(model_at("llama"), ALL, steps=2)
    served = Served(model_at("llama"), _shipped(core), kind=path, adapters=ALL)
    prompts, long = _prompts(), Sampling(max_tokens=12)
    for at, prompt in enumerate(prompts):
        served.submit(prompt, long, name=f"old{at}", seed=at)
    done: dict[str, Any] = dict(served.core.step())
    done |= dict(served.core.step())
    for step in range(2, 5):
        _train(core, step)
    served.flip(_shipped(core), 1, "snapshot")
    assert not served.core.is_slot_free(0)
    for at, prompt in enumerate(prompts):
        served.submit(prompt, Sampling(max_tokens=12), name=f"new{at}", seed=100 + at)
    done |= dict(served.core.step())
    assert not served.core.is_slot_free(0)
    assert not served.core.is_slot_free(1)
    done |= served.finish()
    assert served.core.is_slot_free(0)
    for name, by, version in (("old", old, 0), ("new", core, 1)):
        mine = [done[f"{name}{at}"] for at in range(len(prompts))]
        _assert_sampled_by(by, prompts, mine)
        assert {span.version for completion in mine for span in completion.spans} == {version}


def test_slot_of_an_adapter_in_use_is_not_taken_for_another_version(model_at):
    core = _learner(model_at("llama"), ALL)
    served = Served(model_at("llama"), _shipped(core), adapters=ALL)
    served.submit(_prompts()[0], Sampling(max_tokens=12))
    served.core.step()
    served.core.apply(Update(version=1, slot=1), "snapshot")
    with pytest.raises(Exception, match="should have been reserved"):
        served.core.apply(Update(version=2, slot=0), "swap")
    served.finish()
    served.core.apply(Update(version=2, slot=0), "swap")


def test_adapter_in_use_is_waited_for_before_its_slot_is_written_to(model_at):
    """Through the engine as a sync sees it: ``reserve`` returns when the last request of the old adapter has ended."""
    core = _learner(model_at("llama"), ALL, steps=2)
    served = Served(model_at("llama"), _shipped(core), adapters=ALL)
    engine = EmbeddedEngine(served.core)
    seen: list[str] = []

    async def live() -> None:
        request = samples.request(id="live", tokens=_prompts()[0], max_tokens=20, seed=1)
        completion = await engine.generate(request)
        seen.append(f"live ended under {[span.version for span in completion.spans]}")

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            async with anyio.create_task_group() as callers:
                callers.start_soon(live)
                while not (await engine.stats()).decode_tokens:
                    await anyio.lowlevel.checkpoint()
                _train(core, 9)
                served.flip(_shipped(core), 1, "snapshot")
                early = (await engine.stats()).decode_tokens
                await engine.reserve(0)
                seen.append(f"reserved after {(await engine.stats()).decode_tokens} tokens")
                assert early < 20
            tasks.cancel_scope.cancel()

    anyio.run(main)
    assert sorted(seen) == ["live ended under [0]", "reserved after 20 tokens"]


def test_recompute_rebuilds_keys_under_the_new_adapter(model_at):
    core = _learner(model_at("llama"), ALL, steps=2)
    served = Served(model_at("llama"), _shipped(core), adapters=ALL)
    prompt = _prompts()[0]
    served.submit(prompt, Sampling(max_tokens=12))
    for _ in range(5):
        served.core.step()
    for step in range(2, 5):
        _train(core, step)
    served.flip(_shipped(core), 1, "recompute")
    (completion,) = served.finish().values()
    at = next(span.start for span in completion.spans if span.version == 1)
    want = _logprobs(core, np.concatenate([prompt, completion.tokens]))[len(prompt) - 1 :]
    np.testing.assert_allclose(completion.logprobs[at:], want[at:], atol=1e-4, rtol=0)
    assert np.abs(completion.logprobs[:at] - want[:at]).max() > 1e-3


@pytest.mark.parametrize("path", ["lean", "hf"])
def test_layout_holds_adapters_alone(path, model_at):
    core = _learner(model_at("llama"), ALL)
    engine = EmbeddedCore(model=model_at("llama"), path=path, adapters=ALL)
    sources = sorted(source for slab in engine.layout().slabs for source in slab.sources)
    assert sources == sorted(core.tensors())
    payload = sum(tensor.nbytes for tensor in core.tensors().values())
    assert payload <= engine.layout().nbytes <= payload + 64 * len(engine.layout().slabs)


def test_adapters_of_a_wide_model_are_at_most_two_percent_of_its_bytes(tmp_path):
    """The proportions of SmolLM2, from configurations alone: rank 8 on every linear layer."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)
    from corrente.adapters import injection
    from corrente.engine.embedded.model import read_model_config
    from corrente.engine.embedded.shapes import parameter_shapes

    full = sum(int(np.prod(shape)) for shape in parameter_shapes(read_model_config(tmp_path)).values())
    factors = injection.verify_targets(tmp_path, c.Lora(rank=8, alpha=16.0))
    assert sum(int(np.prod(factor.shape)) for factor in factors.values()) == 30 * 8 * 10176
    assert sum(int(np.prod(factor.shape)) for factor in factors.values()) <= 0.02 * full


def test_lean_path_refuses_adapters_it_has_no_product_for(model_at):
    settings = c.Lora(rank=2, targets=("lm_head", "q_proj"))
    with pytest.raises(ConfigError, match=r"no product for the adapter .*lm_head"):
        EmbeddedCore(model=model_at("qwen3"), path="lean", adapters=settings)
    assert isinstance(EmbeddedCore(model=model_at("qwen3"), adapters=settings).model, HFModel)


def test_adapter_of_the_output_layer_is_served_by_the_modules_of_peft(model_at):
    settings = c.Lora(rank=2, alpha=8.0, targets=("lm_head", "q_proj"))
    core = _learner(model_at("qwen3"), settings, steps=2)
    served = Served(model_at("qwen3"), _shipped(core), adapters=settings)
    _assert_sampled_by(core, _prompts(), served.run(_prompts(), SAMPLED))


def test_frozen_weights_that_are_missing_are_a_config_error(model_at, tmp_path):
    (tmp_path / "config.json").write_bytes((model_at("llama") / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"model\.path"):
        EmbeddedCore(model=tmp_path, adapters=ALL)


@pytest.mark.parametrize("path", ["lean", "hf"])
def test_frozen_weights_of_which_some_are_missing_are_refused_and_not_made_up(model_at, tmp_path, path):
    shutil.copytree(model_at("llama"), tmp_path / "lacking")
    weights = load_file(tmp_path / "lacking" / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "lacking" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.path.*no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        EmbeddedCore(model=tmp_path / "lacking", adapters=ALL, path=path)
