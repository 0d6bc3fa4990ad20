"""Keep sampling mask: under truncated sampling, real engine to real learner, the ratio of an unchanged policy is 1."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.numerics.engine_tiny import VOCABULARY, Served, tiny

from corrente.algo.grouped import GroupedAlgorithm
from corrente.config import RunConfig
from corrente.data.support import Support
from corrente.data.types import Batch, Completion, Sampling, Tokens
from corrente.errors import AlignmentError
from corrente.learner import head
from corrente.learner.packing import plan_packs
from corrente.learner.policy import Policy
from corrente.testing import samples

CUTS = [
    {"top_k": k, "top_p": p, "min_p": m} for k, p, m in itertools.product((0, 1, 7, 300), (1.0, 0.9, 0.5), (0.0, 0.04))
]
PROMPTS = [np.arange(2, 2 + length, dtype=np.int32) for length in (3, 9)]


def policy(model: Any, sampling: Sampling) -> Policy:
    return Policy(copy.deepcopy(model), temperature=sampling.temperature)


def batch(sampling: Sampling, answers: Sequence[tuple[Tokens, Sequence[Completion]]], *, version: int = 0) -> Batch:
    """The step that the algorithm makes of completions, prompt by prompt."""
    groups = [
        samples.group(
            id=at,
            episodes=[
                samples.episode(group=at, index=index, turns=[tokens, completion], reward=float(index))
                for index, completion in enumerate(completions)
            ],
        )
        for at, (tokens, completions) in enumerate(answers)
    ]
    algorithm = GroupedAlgorithm(RunConfig(sampling=sampling))
    return algorithm.batch(groups, step=0, version=version, oldest_trainable=[None] * len(groups))


def gaps(learner: Policy, step: Batch, *, budget: int = 10_000) -> np.ndarray:
    """|log ratio| of every trained token."""
    with torch.no_grad():
        return np.concatenate(
            [
                np.abs(learner(pack).logprobs_K.numpy() - pack.behaviour_K)
                for pack in plan_packs(
                    step.rows, weights_R=np.ones(len(step.rows)), version=step.version, budget=budget
                )
            ]
        )


def sampled(served: Served, sampling: Sampling, *, size: int = 3) -> list[tuple[Tokens, list[Completion]]]:
    out = []
    for prompt in PROMPTS:
        out.append((prompt, served.run([prompt] * size, sampling)))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("kind", ["lean", "hf"])
def test_support_makes_the_ratio_one_at_equal_weights(kind: str, temperature: float):
    where, model, _ = tiny("llama")
    served = Served(where, model, kind=kind)
    learner = policy(model, Sampling(temperature=temperature))
    for cut in CUTS:
        sampling = Sampling(max_tokens=5, temperature=temperature, **cut)
        answers = sampled(served, sampling)
        kept = [c.support for _, completions in answers for c in completions]
        assert all((support is not None) == sampling.cuts for support in kept)
        assert gaps(learner, batch(sampling, answers)).max() < 3e-5, cut


def test_support_of_all_rules_together_makes_the_ratio_one():
    where, model, _ = tiny("llama")
    sampling = Sampling(max_tokens=5, temperature=0.7, top_k=30, top_p=0.9, min_p=0.02)
    assert gaps(policy(model, sampling), batch(sampling, sampled(Served(where, model), sampling))).max() < 3e-5


def test_ratio_without_the_support_is_the_mass_that_was_kept():
    where, model, _ = tiny("llama")
    sampling = Sampling(max_tokens=6, top_k=5, keep_support=False)
    answers = sampled(Served(where, model), sampling)
    assert all(c.support is None for _, completions in answers for c in completions)
    assert gaps(policy(model, sampling), batch(sampling, answers)).min() > 1e-3


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_support_holds_for_models_whose_logits_are_their_own(name: str):
    """gemma2 caps its logits, so the learner takes them from the model instead of from the hidden states."""
    where, model, _ = tiny(name)
    sampling = Sampling(max_tokens=6, temperature=0.7, top_p=0.8)
    learner = policy(model, sampling)
    assert learner.traits.linear_head == (name == "gpt2")
    assert gaps(learner, batch(sampling, sampled(Served(where, model), sampling))).max() < 3e-5


@pytest.mark.parametrize("budget", [8, 30, 10_000])
def test_support_survives_every_cut_into_micro_batches(budget: int):
    where, model, _ = tiny("qwen3")
    sampling = Sampling(max_tokens=8, top_p=0.7)
    step = batch(sampling, sampled(Served(where, model), sampling))
    assert gaps(policy(model, sampling), step, budget=budget).max() < 3e-5


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_support_stays_with_its_token_when_weights_land_in_the_middle(mode: Any):
    """Ids are drawn and kept by the weights of their own version: each span is compared with a forward of that version."""
    where, model, other = tiny("llama")
    sampling = Sampling(max_tokens=12, top_p=0.8, top_k=40)
    served = Served(where, model)
    served.submit(PROMPTS[1], sampling, seed=8)
    for _ in range(5):
        served.core.step()
    served.flip(other, 1, mode)
    (done,) = served.finish().values()
    assert [span.version for span in done.spans] == [0, 1]
    assert done.support is not None
    _check_sets(done.support, done.tokens, done.spans[0].stop)
    first = done.spans[0].stop
    early = _part(done, 0, first)
    assert gaps(policy(model, sampling), batch(sampling, [(PROMPTS[1], [early, early])])).max() < 3e-5
    if mode == "recompute":
        context = np.concatenate([PROMPTS[1], early.tokens])
        late = _part(done, first, len(done.tokens))
        assert gaps(policy(other, sampling), batch(sampling, [(context, [late, late])])).max() < 3e-5


def _part(done: Completion, start: int, stop: int) -> Completion:
    assert done.support is not None
    where = np.arange(start, stop)
    spans = tuple(
        msgspec.structs.replace(s, start=max(s.start, start) - start, stop=min(s.stop, stop) - start)
        for s in done.spans
        if s.start < stop and s.stop > start
    )
    return Completion(
        tokens=done.tokens[where],
        logprobs=done.logprobs[where],
        spans=spans,
        finish_reason="length",
        support=done.support.take(where),
    )


def _check_sets(support: Support, tokens: Tokens, first: int) -> None:
    assert len(support) == len(tokens)
    assert all(0 < support.counts[at] <= 40 for at in range(len(tokens)))
    assert 0 < first < len(tokens)


def test_support_of_a_resumed_request_continues_that_of_its_partial():
    where, model, _ = tiny("llama")
    sampling = Sampling(max_tokens=10, top_p=0.9, temperature=0.8)
    whole = Served(where, model).run([PROMPTS[0]], sampling)[0]
    served = Served(where, model)
    request = samples.request(id="0", tokens=PROMPTS[0], sampling=sampling)
    partial = served.interrupted(request, steps=4)
    served.core.submit(request.after(partial))
    joined = partial.then(served.finish()["0"])
    assert joined.support is not None
    assert whole.support is not None
    assert np.array_equal(joined.tokens, whole.tokens)
    assert np.array_equal(joined.support.counts, whole.support.counts)
    assert np.array_equal(joined.support.words, whole.support.words)


def test_two_sets_at_one_position_are_both_renormalised_over():
    """The same prefix drawn from under two rules: the tree shares its node, the logits are looked at twice."""
    where, model, _ = tiny("llama")
    narrow, wide = Sampling(max_tokens=4, top_k=2), Sampling(max_tokens=4, top_p=0.97)
    served = Served(where, model)
    answers = [served.run([PROMPTS[0]] * 2, rule) for rule in (narrow, wide, Sampling(max_tokens=4))]
    step = batch(narrow, [(PROMPTS[0], [c for part in answers for c in part])])
    assert gaps(policy(model, narrow), step).max() < 3e-5


def test_gradient_and_entropy_are_those_of_the_kept_distribution():
    """Against autograd over logits whose other entries are minus infinity, in float64, with and without kept softmax."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(97, 4, dtype=torch.float64, requires_grad=True)
    sets = [rng.choice(97, n, replace=False).astype(np.int32) for n in (1, 3, 60)]
    support = Support.of([*sets, None, sets[1]], vocabulary=97)
    slot = torch.tensor([0, 1, 1, 2, 3, 4])
    target = torch.tensor([int(sets[0][0]), int(sets[1][0]), int(sets[1][2]), int(sets[2][5]), 96, int(sets[1][1])])
    mix = torch.randn(6, dtype=torch.float64)

    def value(out: head.TokenLogprobs) -> torch.Tensor:
        return (out.logprobs_K * mix).sum() + (out.entropy_M * mix[:5]).sum()

    masked = (hidden @ weight.T / 0.7).clone()
    for row in range(5):
        away = np.setdiff1d(np.arange(97), support.ids(row))
        masked[row, torch.from_numpy(away)] = -1e30
    logprobs = torch.log_softmax(masked, -1)
    plain = head.TokenLogprobs(logprobs[slot, target], -(logprobs.exp() * logprobs).sum(-1))
    want = torch.autograd.grad(value(plain), (hidden, weight))
    kept = head.SupportMask(support, device=torch.device("cpu"))
    for keep_bytes in (0, 1 << 30):
        before, head.KEEP_BYTES = head.KEEP_BYTES, keep_bytes
        try:
            out = head.token_logprobs(
                hidden, weight, None, slot_K=slot, targets_K=target, temperature=0.7, support=kept
            )
            got = torch.autograd.grad(value(out), (hidden, weight))
        finally:
            head.KEEP_BYTES = before
        torch.testing.assert_close(out.logprobs_K, plain.logprobs_K)
        torch.testing.assert_close(out.entropy_M, plain.entropy_M)
        torch.testing.assert_close(got, want)
    own = head.logprobs_from_logits(hidden @ weight.T, slot_K=slot, targets_K=target, temperature=0.7, support=kept)
    torch.testing.assert_close(own.logprobs_K, plain.logprobs_K)
    torch.testing.assert_close(own.entropy_M, plain.entropy_M)
    torch.testing.assert_close(torch.autograd.grad(value(own), (hidden, weight)), want)


def test_token_outside_its_set_is_refused():
    where, model, _ = tiny("llama")
    sampling = Sampling(max_tokens=4, top_k=3)
    answers = sampled(Served(where, model), sampling)
    step = batch(sampling, answers)
    row = step.rows[0]
    tokens = row.tokens.copy()
    at = int(np.flatnonzero(row.loss_mask)[0])
    assert row.support is not None
    tokens[at] = next(i for i in range(VOCABULARY) if i not in row.support.ids(at))
    with pytest.raises(AlignmentError, match="not in the set"):
        plan_packs([msgspec.structs.replace(row, tokens=tokens)], weights_R=np.ones(1), version=0, budget=100)
