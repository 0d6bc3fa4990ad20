"""Keep routing: the experts that the real engine recorded are those the real learner uses, whatever happened in between."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.numerics.engine_tiny import VOCABULARY, Served, tiny
from tests.numerics.test_engine_support import PROMPTS, batch, gaps, policy

from corrente.algo.graph import rows
from corrente.config import RunConfig
from corrente.data.routing import UNKNOWN, Experts
from corrente.data.types import Batch, Completion, Row, Sampling, Tokens
from corrente.engine.embedded.core import EmbeddedCore
from corrente.errors import AlignmentError, ConfigError
from corrente.learner.model import recompute_activations
from corrente.learner.packing import as_rows, as_tree, plan_packs
from corrente.models.moe_routing import Routers, routers_of
from corrente.testing import samples

MIXTURES = {"mixtral": (3, 2, 4), "qwen3_moe": (3, 3, 8)}
"""Layers, experts of a token, experts."""
mixtures = pytest.mark.parametrize("kind", list(MIXTURES))
LONG = Sampling(max_tokens=12, top_k=500, stop_token_ids=())


def serve(kind: str, **options: Any) -> tuple[Served, Any, Any]:
    where, model, other = tiny(kind)
    return Served(where, model, **({"keep_routing": True} | options)), model, other


@torch.no_grad()
def chosen(model: Any, tokens: Tokens) -> Experts:
    """The experts of every token (len, layers, k) in one plain forward pass."""
    model = copy.deepcopy(model)
    routers = routers_of(model)
    assert isinstance(routers, Routers)
    routers.recording = True
    model(input_ids=torch.from_numpy(tokens).long()[None])
    return routers.recorded()


def same(a: Experts, b: Experts) -> bool:
    """As sets: the order among the chosen does not matter."""
    return np.array_equal(np.sort(a, -1), np.sort(b, -1))


def read(prompt: Tokens, done: Completion) -> Tokens:
    """What went through the model to sample a completion."""
    return np.concatenate([prompt, done.tokens])[:-1]


def kept(done: Completion) -> Experts:
    """Of what was read, context first."""
    assert done.routing is not None
    return np.concatenate([done.routing.context, done.routing.experts])


def without(step: Batch) -> Batch:
    return msgspec.structs.replace(step, rows=tuple(msgspec.structs.replace(row, experts=None) for row in step.rows))


def perturbed(model: Any, scale: float) -> Any:
    torch.manual_seed(5)
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        if "gate.weight" in name:
            parameter.data += scale * torch.randn_like(parameter)
    return model


# ---- what is recorded ---------------------------------------------------------------------------------------------------------


@mixtures
def test_experts_are_those_of_a_plain_forward_pass(kind: str):
    served, model, _ = serve(kind)
    for prompt, done in zip(PROMPTS, served.run(PROMPTS, LONG), strict=True):
        layers, k, experts = MIXTURES[kind]
        assert done.routing is not None
        assert done.routing.experts.shape == (len(done.tokens), layers, k)
        assert done.routing.context.shape == (len(prompt) - 1, layers, k)
        assert 0 <= kept(done).min() <= kept(done).max() < experts
        assert same(kept(done), chosen(model, read(prompt, done)))


def test_experts_of_a_prefix_that_another_sequence_lends_are_those_it_was_computed_through():
    served, model, _ = serve("qwen3_moe")
    served.submit(PROMPTS[1], LONG, name="a")
    served.core.step()
    longer = np.concatenate([PROMPTS[1][:7], np.array([44, 45], np.int32)])
    served.submit(longer, LONG, name="b", seed=3)
    before = served.core.stats().prefill_tokens
    served.core.step()
    assert served.core.stats().prefill_tokens - before == 2, "the shared prefix was not computed again"
    done = served.finish()
    assert same(kept(done["b"]), chosen(model, read(longer, done["b"])))


@pytest.mark.parametrize("mode", ["swap", "recompute", "snapshot"])
def test_experts_stay_with_their_pass_when_weights_land_in_the_middle(mode: Any):
    """What was sampled before keeps the experts it was sampled through; a later request that borrows rebuilt keys has theirs."""
    served, model, other = serve("qwen3_moe")
    served.submit(PROMPTS[1], LONG, name="a", seed=8)
    for _ in range(5):
        served.core.step()
    (partial,) = served.core.partials(["a"]).values()
    served.flip(other, 1, mode)
    served.submit(PROMPTS[1], LONG, name="b", seed=4)
    done = served.finish()
    whole = done["a"]
    assert len(whole.tokens) > len(partial.tokens)
    early = len(kept(partial))
    assert np.array_equal(kept(whole)[:early], kept(partial))
    assert same(kept(partial), chosen(model, read(PROMPTS[1], partial)))
    assert same(kept(done["b"]), chosen(other, read(PROMPTS[1], done["b"])))
    if mode == "recompute":
        assert same(kept(whole)[early:], chosen(other, read(PROMPTS[1], whole))[early:])
    if mode == "snapshot":
        assert same(kept(whole), chosen(model, read(PROMPTS[1], whole)))


def test_experts_of_a_resumed_request_continue_those_of_its_partial():
    served, _, _ = serve("qwen3_moe")
    whole = served.run([PROMPTS[0]], LONG)[0]
    again, _, _ = serve("qwen3_moe")
    request = samples.request(id="0", tokens=PROMPTS[0], sampling=LONG)
    partial = again.interrupted(request, steps=4)
    again.core.submit(request.after(partial))
    joined = partial.then(again.finish()["0"])
    assert np.array_equal(joined.tokens, whole.tokens)
    assert np.array_equal(kept(joined), kept(whole))


def test_request_that_was_aborted_before_it_was_read_has_no_experts():
    served, _, _ = serve("mixtral", max_sequences=1)
    served.submit(PROMPTS[0], LONG, name="a")
    served.submit(PROMPTS[1], LONG, name="b")
    served.core.step()
    served.core.abort(["b"])
    done = served.finish()
    assert done["b"].routing is None
    assert done["b"].then(done["a"]).routing is done["a"].routing or same(
        kept(done["b"].then(done["a"])), kept(done["a"])
    )


def test_experts_are_kept_by_default_where_there_are_any_and_not_where_they_are_not_wanted():
    assert serve("mixtral", keep_routing=None)[0].run(PROMPTS, LONG)[0].routing is not None
    assert serve("mixtral", keep_routing=False)[0].run(PROMPTS, LONG)[0].routing is None
    assert serve("llama", keep_routing=None)[0].run(PROMPTS, LONG)[0].routing is None
    for path in ("auto", "hf"):
        with pytest.raises(ConfigError, match=r"model\.keep_routing = true: .* leave it out"):
            EmbeddedCore(model=tiny("llama")[0], path=path, keep_routing=True)


# ---- what is replayed ---------------------------------------------------------------------------------------------------------


@mixtures
@pytest.mark.parametrize("budget", [20, 10_000])
def test_ratio_is_one_at_equal_weights(kind: str, budget: int):
    served, model, _ = serve(kind)
    step = batch(LONG, [(prompt, served.run([prompt] * 3, LONG)) for prompt in PROMPTS])
    assert all(row.experts is not None for row in step.rows)
    learner = policy(model, LONG)
    assert learner.traits.prefix_tree
    assert gaps(learner, step, budget=budget).max() < 3e-5


@mixtures
def test_replay_removes_most_of_the_mismatch_of_perturbed_routers(kind: str):
    """Routers that differ by one part in a hundred choose others here and there: a jump, where the difference of their weights
    itself is smooth. Of 190 tokens the largest |log ratio| is 3.3 without replay and 0.10 with it for the tiny Mixtral (mean
    0.051, 0.014), 0.45 and 0.044 for the tiny Qwen3-MoE (mean 0.027, 0.008)."""
    served, model, _ = serve(kind)
    step = batch(LONG, [(prompt, served.run([prompt] * 8, LONG)) for prompt in PROMPTS])
    learner = policy(perturbed(model, 0.002), LONG)
    bare, replayed = gaps(learner, without(step)), gaps(learner, step)
    assert bare.max() > 5 * replayed.max()
    assert bare.mean() > 2 * replayed.mean()


@mixtures
def test_gradients_reach_the_router_weights_that_were_used_and_no_others(kind: str):
    served, model, _ = serve(kind)
    step = batch(LONG, [(PROMPTS[0], served.run([PROMPTS[0]] * 2, LONG))])
    learner = policy(model, LONG)
    learner.model.requires_grad_(True)
    (pack,) = plan_packs(step.rows, weights_R=np.ones(len(step.rows)), version=0, budget=10_000)
    other = _elsewhere(pack, MIXTURES[kind][2])
    learner(other).logprobs_K.sum().backward()
    assert other.experts is not None
    used = np.concatenate(other.experts)
    for layer in range(MIXTURES[kind][0]):
        gradient = learner.model.model.layers[layer].mlp.gate.weight.grad.abs().amax(-1).numpy()
        reached = set(
            np.flatnonzero(gradient > 1e-5 * gradient.max()).tolist()
        )  # beyond what rounding leaves of a sum of 0
        assert reached == set(np.unique(used[:, layer]).tolist())


def _elsewhere(pack: Any, count: int) -> Any:
    """The same micro-batch sent to the first experts alone, which are not those the router would choose."""
    experts = tuple(np.broadcast_to(np.arange(e.shape[2], dtype=np.int16), e.shape).copy() for e in pack.experts)
    assert count > experts[0].shape[2]
    return msgspec.structs.replace(pack, experts=experts)


def test_gradient_of_a_router_is_that_of_finite_differences():
    served, model, _ = serve("mixtral")
    step = batch(LONG, [(PROMPTS[0], served.run([PROMPTS[0]] * 2, LONG))])
    (pack,) = plan_packs(step.rows, weights_R=np.ones(len(step.rows)), version=0, budget=10_000)
    learner = policy(model, LONG)
    weight = learner.model.model.layers[0].mlp.gate.weight
    weight.requires_grad_(True)

    def value() -> torch.Tensor:
        return learner(pack).logprobs_K.double().mean()

    (gradient,) = torch.autograd.grad(value(), weight)
    direction = gradient / gradient.norm()
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            weight += sign * 1e-2 * direction
            values.append(value())
            weight -= sign * 1e-2 * direction
    assert (values[0] - values[1]) / 2e-2 == pytest.approx(float(gradient.norm()), rel=1e-2)


def test_recomputed_activations_are_routed_the_same_way():
    served, model, _ = serve("qwen3_moe")
    step = batch(LONG, [(PROMPTS[0], served.run([PROMPTS[0]] * 2, LONG))])
    (pack,) = plan_packs(step.rows, weights_R=np.ones(len(step.rows)), version=0, budget=10_000)
    other = _elsewhere(pack, 8)
    gradients = []
    for checkpointing in (False, True):
        learner = policy(model, LONG)
        learner.model.requires_grad_(True)
        if checkpointing:
            recompute_activations(learner.model)
            learner.model.train()
        learner(other).logprobs_K.sum().backward()
        gradients.append([p.grad for p in learner.model.parameters() if p.grad is not None])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_conversation_of_several_turns_keeps_both_along_its_row():
    """Two sampled turns around a given one: the row's ratios are 1, and every position that is read has its experts."""
    served, model, _ = serve("qwen3_moe")
    turns = [samples.turn(PROMPTS[1])]
    for _ in range(2):
        context = np.concatenate([turn.tokens for turn in turns])
        (said,) = served.run([context], LONG)
        turns += [samples.turn(said), samples.turn((30, 31, 32), speaker="tool")]
    episode = samples.episode(turns=turns)
    sampled = episode.sampled_tokens
    (row,) = rows(0, episode, advantages_T=np.ones(sampled), oldest=None)
    assert row.support is not None
    assert row.experts is not None
    assert ((row.support.counts > 0) == row.loss_mask).all()
    last = int(np.flatnonzero(row.loss_mask)[-1])
    assert same(row.experts[:last], chosen(model, row.tokens[:last]))
    step = samples.batch(rows=[row])
    assert gaps(policy(model, LONG), step).max() < 3e-5


# ---- packing ------------------------------------------------------------------------------------------------------------------


def _row(tokens: list[int], experts: np.ndarray | None) -> Row:
    """Trained on its last two tokens."""
    return samples.row(tokens=tokens, prompt_tokens=len(tokens) - 2, experts=experts)


def test_prompt_that_was_routed_in_two_ways_is_forwarded_in_both():
    rng = np.random.default_rng(0)
    one = rng.integers(0, 4, (6, 3, 2)).astype(np.int16)
    two = one.copy()
    two[1, 2, 0] = (two[1, 2, 0] + 1) % 4
    rows = [_row([5, 6, 7, 8, 9, 9], one), _row([5, 6, 7, 8, 4, 9], one), _row([5, 6, 7, 8, 9, 3], two)]
    (pack,) = plan_packs(rows, weights_R=np.ones(3), version=0, budget=100)
    inputs = as_tree(pack)
    assert inputs.tokens.size == (5 + 1) + 4, "the first token is shared by all; the rest of the third row by none"
    assert inputs.experts is not None
    for row, symbols in zip(range(3), pack.symbols or (), strict=True):
        assert len(symbols) == len(pack.contexts[row])
    padded = as_rows(pack)
    assert padded.experts is not None
    assert (padded.experts[~np.asarray(padded.mask).flatten()] == UNKNOWN).all()
    assert inputs.times.sum() == sum(len(context) for context in pack.contexts)


def test_rows_without_experts_are_routed_by_the_weights_beside_rows_with_them():
    served, model, _ = serve("qwen3_moe")
    step = batch(LONG, [(PROMPTS[0], served.run([PROMPTS[0]] * 4, LONG))])
    mixed = [row if at % 2 else msgspec.structs.replace(row, experts=None) for at, row in enumerate(step.rows)]
    assert gaps(policy(model, LONG), msgspec.structs.replace(step, rows=tuple(mixed))).max() < 3e-5


def test_experts_for_a_model_without_any_are_an_error():
    served, _, _ = serve("mixtral")
    step = batch(LONG, [(PROMPTS[0], served.run([PROMPTS[0]] * 2, LONG))])
    with pytest.raises(AlignmentError, match="cannot be replayed"):
        gaps(policy(tiny("llama")[1], LONG), step)
    with pytest.raises(AlignmentError, match="layers and choices"):
        gaps(policy(tiny("qwen3_moe")[1], LONG), step)


def test_defaults_of_a_run_keep_experts_where_there_are_any():
    assert RunConfig().model.keep_routing is None
    assert VOCABULARY > 500, "top_k cuts something off"
