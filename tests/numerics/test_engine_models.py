"""The engine computes what transformers computes: tokens, log-probs and scores, on both model paths, through flips."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.numerics.engine_tiny import CONTEXT, VOCABULARY, Served, tiny
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from corrente.data.types import Completion, Sampling, Tokens
from corrente.engine.embedded.core import EmbeddedCore
from corrente.errors import ConfigError, GenerationError, SyncError
from corrente.sync import pack
from corrente.sync.base import Update

PATHS = [
    *(("llama", "lean"), ("llama_biased", "lean"), ("mistral", "lean"), ("qwen2", "lean"), ("qwen3", "lean")),
    *(("llama", "hf"), ("qwen3", "hf"), ("gpt2", "hf")),
]
both_paths = pytest.mark.parametrize(("kind", "path"), PATHS)
PROMPTS = [np.array(p, np.int32) for p in ([5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 40], [300], list(range(20, 55)))]
GREEDY = Sampling(max_tokens=12, temperature=0)


def generated(model: Any, tokens: Tokens, count: int) -> list[int]:
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(tokens) :].tolist()


@torch.no_grad()
def plain_logprobs(model: Any, tokens: Sequence[int] | Tokens) -> np.ndarray:
    """Log-prob of tokens[1:] from one forward pass without a cache."""
    ids = torch.tensor(np.asarray(tokens, np.int64))[None]
    logprobs = torch.log_softmax(model(ids).logits[0].double(), -1)
    return logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()


@both_paths
def test_greedy_decoding_of_mixed_lengths_equals_generate(kind: str, path: str):
    where, model, _ = tiny(kind)
    done = Served(where, model, kind=path).run(PROMPTS, GREEDY)
    for tokens, completion in zip(PROMPTS, done, strict=True):
        assert completion.tokens.tolist() == generated(model, tokens, 12)
        expected = plain_logprobs(model, [*tokens, *completion.tokens])[len(tokens) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize(("kind", "path"), [*PATHS, *((k, "hf") for k in ("opt", "gpt_neox", "gemma2", "mixtral"))])
def test_sampled_logprobs_and_scores_equal_a_plain_forward(kind: str, path: str):
    where, model, _ = tiny(kind)
    served = Served(where, model, kind=path)
    for tokens, completion in zip(PROMPTS, served.run(PROMPTS, Sampling(max_tokens=20)), strict=True):
        expected = plain_logprobs(model, [*tokens, *completion.tokens])
        np.testing.assert_allclose(completion.logprobs, expected[len(tokens) - 1 :], atol=1e-4)
        scores = served.core.score(np.concatenate([tokens, completion.tokens]))
        np.testing.assert_allclose(scores.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "llama_biased", "mistral", "qwen2", "qwen3"])
def test_lean_path_samples_what_the_unmodified_model_samples(kind: str):
    where, model, _ = tiny(kind)
    sampling = Sampling(max_tokens=20, top_p=0.9, temperature=0.8)
    lean, plain = (Served(where, model, kind=path).run(PROMPTS, sampling) for path in ("lean", "hf"))
    for a, b in zip(lean, plain, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


@both_paths
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_interrupted_and_resumed_equals_uninterrupted(kind: str, path: str, temperature: float):
    where, model, _ = tiny(kind)
    served = Served(where, model, kind=path)
    sampling = Sampling(max_tokens=15, temperature=temperature, stop_token_ids=())
    (whole,) = served.run(PROMPTS[:1], sampling)
    served.submit(PROMPTS[0], sampling)
    for _ in range(4):
        served.core.step()
    served.core.abort(["r"])
    ((_, first),) = served.core.step()
    assert isinstance(first, Completion)
    assert (first.finish_reason, len(first.tokens)) == ("abort", 5)
    left = msgspec.structs.replace(sampling, max_tokens=10)
    (second,) = served.run([np.concatenate([PROMPTS[0], first.tokens])], left)
    assert [*first.tokens, *second.tokens] == whole.tokens.tolist()
    np.testing.assert_allclose([*first.logprobs, *second.logprobs], whole.logprobs, atol=1e-4)


@both_paths
def test_swap_goes_on_under_new_weights_over_the_old_cache(kind: str, path: str):
    where, model, other = tiny(kind)
    served = Served(where, model, kind=path)
    served.submit(PROMPTS[0], Sampling(max_tokens=8, temperature=0))
    served.core.step()
    served.core.step()
    served.flip(other, 1)
    done = served.finish()["r"]
    assert [(s.version, s.start, s.stop) for s in done.spans] == [(0, 0, 3), (1, 3, 8)]
    np.testing.assert_allclose(done.logprobs, _swapped_by_hand(model, other, PROMPTS[0], done.tokens, 3), atol=1e-4)


@torch.no_grad()
def _swapped_by_hand(old: Any, new: Any, prompt: Tokens, tokens: Tokens, swap_at: int) -> list[float]:
    """Log-probs of ``tokens``, of which the first ``swap_at`` are the old model's, with one cache through both models."""
    cache, feed, out = DynamicCache(), list(prompt), []
    for at, token in enumerate(tokens.tolist()):
        model = old if at < swap_at else new
        logits = _step(model, feed, cache)
        out.append(float(torch.log_softmax(logits.double(), -1)[token]))
        feed = [token]
    return out


def _step(model: Any, feed: list[int], cache: DynamicCache) -> torch.Tensor:
    start = cache.get_seq_length()
    positions = torch.arange(start, start + len(feed))[None]
    ids = torch.tensor([[int(token) for token in feed]])
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(ids, position_ids=positions, use_cache=True, **{name: cache}).logits[0, -1]


@both_paths
def test_recompute_equals_a_fresh_forward_under_the_new_weights(kind: str, path: str):
    where, model, other = tiny(kind)
    served = Served(where, model, kind=path)
    for at in range(3):
        served.submit(PROMPTS[at % 2], Sampling(max_tokens=8), name=str(at), seed=at)
    served.core.step()
    served.core.step()
    served.flip(other, 1, "recompute")
    done = served.finish()
    for at in range(3):
        completion = done[str(at)]
        assert [s.version for s in completion.spans] == [0, 1]
        sequence = [*PROMPTS[at % 2], *completion.tokens]
        old, new = (plain_logprobs(m, sequence)[-len(completion.tokens) :] for m in (model, other))
        np.testing.assert_allclose(completion.logprobs[:3], old[:3], atol=1e-4)
        np.testing.assert_allclose(completion.logprobs[3:], new[3:], atol=1e-4)


def test_recompute_computes_a_shared_prompt_once():
    where, model, other = tiny("llama")
    served = Served(where, model)
    for at in range(4):
        served.submit(PROMPTS[3], Sampling(max_tokens=20), name=str(at), seed=at)
    served.core.step()
    before = served.core.stats().prefill_tokens
    served.flip(other, 1, "recompute")
    assert served.core.stats().prefill_tokens - before <= len(PROMPTS[3]) + 4
    served.finish()


@pytest.mark.parametrize("path", ["lean", "hf"])
def test_new_request_is_never_served_the_cache_of_older_weights(path: str):
    where, model, other = tiny("llama")
    served = Served(where, model, kind=path)
    served.submit(PROMPTS[3], Sampling(max_tokens=30), name="long")
    served.core.step()
    served.flip(other, 1)
    before = served.core.stats().prefill_tokens
    served.submit(PROMPTS[3], GREEDY, name="late")
    late = served.finish()["late"]
    assert served.core.stats().prefill_tokens - before == len(PROMPTS[3])
    assert late.tokens.tolist() == generated(other, PROMPTS[3], 12)


@pytest.mark.parametrize(("kind", "path"), [("llama", "lean"), ("llama", "hf"), ("gpt2", "hf")])
def test_flip_copies_nothing(kind: str, path: str):
    """The engine's weights are the buffer: what is written into it later is what the engine computes with."""
    where, model, other = tiny(kind)
    served = Served(where, model, kind=path)
    tokens = PROMPTS[3]
    np.testing.assert_allclose(served.core.score(tokens).logprobs, plain_logprobs(model, tokens), atol=1e-4)
    for buffer in served.buffers:
        pack.write(served.layout, other.state_dict(), buffer)
    np.testing.assert_allclose(served.core.score(tokens).logprobs, plain_logprobs(other, tokens), atol=1e-4)


def test_layout_holds_every_parameter_once():
    for kind, path in PATHS:
        where, model, _ = tiny(kind)
        sources = [source for slab in EmbeddedCore(model=where, path=path).layout().slabs for source in slab.sources]
        assert len(sources) == len(set(sources))
        assert set(dict(model.named_parameters())) <= set(sources)


def test_apply_refuses_a_buffer_it_was_not_given():
    where, model, _ = tiny("llama")
    served = Served(where, model)
    (before,) = served.run(PROMPTS[:1], GREEDY)
    with pytest.raises(SyncError, match="buffer 2"):
        served.core.apply(Update(version=5, slot=2), "swap")
    (after,) = served.run(PROMPTS[:1], GREEDY)
    assert (after.tokens.tolist(), after.spans) == (before.tokens.tolist(), before.spans)


def test_weights_that_are_not_finite_cost_the_request_and_not_the_engine():
    where, model, _ = tiny("llama")
    served = Served(where, model)
    good = served.buffers[0].clone()
    served.buffers[0].view(torch.float32).fill_(float("nan"))
    served.submit(PROMPTS[0], Sampling())
    ((_, outcome),) = served.core.step()
    assert isinstance(outcome, GenerationError)
    served.buffers[0].copy_(good)
    assert served.run(PROMPTS[:1], GREEDY)[0].tokens.tolist() == generated(model, PROMPTS[0], 12)


@pytest.mark.parametrize("name", ["mamba", "bloom", "t5"])
def test_architecture_it_cannot_serve_is_refused_with_the_reason(tmp_path: Path, name: str):
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path.*cannot be served"):
        EmbeddedCore(model=tmp_path)


def test_attention_that_counts_slots_is_refused():
    where, _, _ = tiny("gpt_neo_local")
    with pytest.raises(ConfigError, match="local attention"):
        EmbeddedCore(model=where)


def test_wrong_knobs_are_refused(tmp_path: Path):
    where, _, _ = tiny("gpt2")
    with pytest.raises(ConfigError, match=r"engine\.max_context: 97"):
        EmbeddedCore(model=where, max_context=97)
    with pytest.raises(ConfigError, match=r"engine\.path.*lean"):
        EmbeddedCore(model=where, path="lean")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        EmbeddedCore(model=tmp_path)


def test_sliding_window_bounds_the_context(tmp_path: Path):
    where, _, _ = tiny("mistral")
    config = AutoConfig.from_pretrained(where)
    config.sliding_window = 32
    config.save_pretrained(tmp_path)
    assert EmbeddedCore(model=tmp_path).context == 32


@pytest.mark.model
def test_example_model_decodes_as_transformers_does(smollm2: Path):
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    prompts = [np.array(p, np.int32) for p in ([504, 3575, 282, 4649, 314], [34, 1232, 216, 35, 446], [28120] * 40)]
    for path in ("lean", "hf"):
        served = Served(smollm2, model, kind=path)
        for tokens, completion in zip(prompts, served.run(prompts, GREEDY), strict=True):
            assert completion.tokens.tolist() == generated(model, tokens, 12)
            expected = plain_logprobs(model, [*tokens, *completion.tokens])[len(tokens) - 1 :]
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


# ---- scores --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "path"), [("llama", "lean"), ("qwen3", "lean"), ("llama", "hf"), ("gpt2", "hf")])
@pytest.mark.parametrize("chunk", [7, 256])
def test_scores_name_the_likeliest_tokens(kind: str, path: str, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("corrente.engine.embedded.prefill.SCORE_CHUNK", chunk)
    where, model, _ = tiny(kind)
    tokens = PROMPTS[3]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, :-1], -1)
    expected = logprobs.topk(5, -1)
    scores = Served(where, model, kind=path).core.score(tokens, 5)
    assert scores.top_ids.tolist() == expected.indices.tolist()
    np.testing.assert_allclose(scores.top_logprobs, expected.values, atol=1e-4)
    np.testing.assert_allclose(scores.logprobs, plain_logprobs(model, tokens), atol=1e-4)


def test_scores_of_all_tokens_are_a_distribution():
    where, model, _ = tiny("llama")
    scores = Served(where, model).core.score(PROMPTS[0], VOCABULARY)
    np.testing.assert_allclose(np.exp(scores.top_logprobs.astype(np.float64)).sum(1), 1, atol=1e-5)
    assert all(sorted(ids) == list(range(VOCABULARY)) for ids in scores.top_ids.tolist())


@pytest.mark.parametrize("count", [0, 1])
def test_scores_of_too_few_tokens_are_empty(count: int):
    where, model, _ = tiny("llama")
    scores = Served(where, model).core.score(PROMPTS[0][:count], 4)
    assert (scores.logprobs.shape, scores.top_ids.shape, scores.top_logprobs.shape) == ((0,), (0, 4), (0, 4))


def test_scores_that_cannot_be_had_are_refused():
    where, model, _ = tiny("llama")
    core = Served(where, model).core
    for tokens, top, message in (
        (np.zeros(CONTEXT + 1, np.int32), 0, f"at most {CONTEXT}"),
        (np.array([VOCABULARY], np.int32), 0, "token ids"),
        (PROMPTS[0], VOCABULARY + 1, f"0 to {VOCABULARY}"),
        (PROMPTS[0], -1, "top is -1"),
    ):
        with pytest.raises(GenerationError, match=message):
            core.score(tokens, top)
    with pytest.raises(GenerationError, match="no weights"):
        EmbeddedCore(model=where).score(PROMPTS[0])


@pytest.mark.model
def test_scores_of_a_long_text_equal_those_of_transformers(smollm2: Path):
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(0, 40_000, 700).astype(np.int32)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, :-1], -1)
    expected = logprobs.topk(3, -1)
    scores = Served(smollm2, model).core.score(tokens, 3)
    np.testing.assert_allclose(scores.logprobs, plain_logprobs(model, tokens), atol=1e-3)
    np.testing.assert_allclose(scores.top_logprobs, expected.values, atol=1e-3)
    clear = (expected.values[:, :2] - expected.values[:, 1:] > 1e-3).all(1).numpy()
    assert clear.mean() > 0.9
    assert (scores.top_ids[clear] == expected.indices.numpy()[clear])[:, :2].all()
