"""Folding rows into a prefix tree changes no number: against one plain forward per row, for several architectures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from corrente.learner.attention import BLOCK_TOKENS, tree_blocks
from corrente.learner.packing import as_rows, as_tree, plan_packs
from corrente.learner.policy import Policy

ARCHITECTURES = ("llama", "qwen3", "gpt2", "mistral")


def _pack(batch, budget: int = 10_000):
    return plan_packs(batch.rows, weights_R=np.ones(len(batch.rows)), version=batch.version, budget=budget)


def _by_row(batch, packs, values):
    """Flat values of all micro-batches, back in the order of the batch's rows."""
    keys = [(row.group, tuple(row.tokens), tuple(row.loss_mask)) for row in batch.rows]
    found = {}
    for pack, value in zip(packs, values, strict=True):
        for r, context in enumerate(pack.contexts):
            mine = np.flatnonzero(pack.row_K == r)
            key = (tuple(context), tuple(pack.targets_K[mine]), tuple(pack.at_K[mine]))
            found[key] = value[mine]
    out = []
    for _, tokens, mask in keys:
        at = np.flatnonzero(mask)
        out.append(found[(tokens[: at[-1]], tuple(np.array(tokens)[at]), tuple(at - 1))])
    return out


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("budget", [10_000, 20])
def test_logprobs_equal_plain_rows(name, budget, build_model, build_batch, plain_logprobs):
    model, batch = build_model(name), build_batch()
    policy = Policy(model)
    packs = _pack(batch, budget)
    got = _by_row(batch, packs, [policy(pack).logprobs_K for pack in packs])
    for mine, want in zip(got, plain_logprobs(model, batch.rows), strict=True):
        torch.testing.assert_close(mine, want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_with_plain_attention_is_folded(name, build_model):
    policy = Policy(build_model(name))
    assert policy.traits.prefix_tree
    assert policy.traits.linear_head


@pytest.mark.parametrize(("name", "splits"), [("gemma2", False), ("mamba", True)])
def test_other_architectures_are_padded(name, splits, build_model, build_batch, plain_logprobs):
    """Gemma 2 caps attention scores and logits, Mamba is recurrent: padded rows, in single precision, as these compute."""
    model, batch = build_model(name, dtype=torch.float32), build_batch()
    policy = Policy(model)
    assert not policy.traits.prefix_tree
    assert policy.traits.linear_head is splits
    (pack,) = _pack(batch)
    out = policy(pack)
    assert out.inputs.tree is None
    got = torch.cat(_by_row(batch, [pack], [out.logprobs_K]))
    torch.testing.assert_close(got, torch.cat(plain_logprobs(model, batch.rows)), atol=1e-4, rtol=1e-4)


def test_sliding_window_is_padded_only_where_it_bites(build_model, build_batch):
    """The tiny Mistral looks back 14 positions: deeper rows must not be folded under a mask that ignores that."""
    policy = Policy(build_model("mistral"))
    (deep,) = _pack(build_batch())
    assert max(len(context) for context in deep.contexts) > 14
    assert policy(deep).inputs.tree is None
    (shallow,) = _pack(build_batch(longest=5))
    assert max(len(context) for context in shallow.contexts) <= 14
    assert policy(shallow).inputs.tree is not None


def test_attention_that_is_ignored_is_noticed(build_model):
    """A model that attends in its own way, as a recurrent one would, must not be folded."""
    model = build_model("llama")
    honest = model.base_model.forward
    model.base_model.forward = lambda *args, tree_blocks=None, **kwargs: honest(*args, **kwargs)
    assert not Policy(model).traits.prefix_tree


def test_positions_that_are_ignored_are_noticed(build_model):
    model = build_model("gpt2")
    honest = model.base_model.forward
    model.base_model.forward = lambda *args, position_ids=None, **kwargs: honest(*args, **kwargs)
    assert not Policy(model).traits.prefix_tree


def test_scaled_logits_are_the_models_own(build_model, build_batch, plain_logprobs):
    """A model that does more to its logits than one matrix product (here: a cap) keeps its own head."""
    model, batch = build_model("llama"), build_batch()
    honest = model.forward

    def capped(*args, **kwargs):
        out = honest(*args, **kwargs)
        out.logits = 3 * torch.tanh(out.logits / 3)
        return out

    model.forward = capped
    policy = Policy(model)
    assert not policy.traits.linear_head
    (pack,) = _pack(batch)
    got = _by_row(batch, [pack], [policy(pack).logprobs_K])
    torch.testing.assert_close(torch.cat(got), torch.cat(plain_logprobs(model, batch.rows)), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_temperature_is_that_of_sampling(temperature, build_model, build_batch, plain_logprobs):
    model, batch = build_model(), build_batch()
    (pack,) = _pack(batch)
    got = _by_row(batch, [pack], [Policy(model, temperature=temperature)(pack).logprobs_K])
    want = plain_logprobs(model, batch.rows, temperature=temperature)
    torch.testing.assert_close(torch.cat(got), torch.cat(want), atol=1e-12, rtol=1e-12)


def test_entropy_is_that_of_the_whole_vocabulary(build_model, build_batch):
    model, batch = build_model(), build_batch(1, 1)
    (pack,) = _pack(batch)
    out = Policy(model, temperature=0.7)(pack)
    logits = model(input_ids=torch.from_numpy(batch.rows[0].tokens).long()[None]).logits[0] / 0.7
    want = torch.distributions.Categorical(logits=logits).entropy()[pack.at_K]
    torch.testing.assert_close(out.entropy_K, want)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_blocks_see_what_the_whole_mask_shows(size, build_batch):
    (pack,) = _pack(build_batch(3, 4))
    tree = as_tree(pack).tree
    assert tree is not None
    seen = np.zeros((len(tree), len(tree)), bool)
    for block in tree_blocks(tree, size=size, device=torch.device("cpu")):
        assert block.stop - block.start <= size
        assert len(block.keys) <= block.stop - block.start + tree.positions.max()
        seen[block.start : block.stop, block.keys.numpy()] = block.mask[0, 0].numpy()
    np.testing.assert_array_equal(seen, tree.mask())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("size", [1, 5])
def test_blocks_of_any_size_give_the_same_logprobs(name, size, build_model, build_batch, monkeypatch):
    (pack,) = _pack(build_batch())
    whole = Policy(build_model(name))(pack).logprobs_K
    monkeypatch.setitem(BLOCK_TOKENS, "cpu", size)
    cut = Policy(build_model(name))(pack).logprobs_K
    torch.testing.assert_close(cut, whole, atol=1e-12, rtol=1e-12)


def test_tree_forwards_only_distinct_prefixes_that_predict(build_batch):
    batch = build_batch(3, 4)
    (pack,) = _pack(batch)
    prefixes = {tuple(row.tokens[: at + 1]) for row in batch.rows for at in range(np.flatnonzero(row.loss_mask)[-1])}
    assert as_tree(pack).tokens.size == len(prefixes)
    asked = {tuple(row.tokens[:at]) for row in batch.rows for at in np.flatnonzero(row.loss_mask)}
    assert len(as_tree(pack).select_M) == len(asked)


def test_both_layouts_ask_for_the_same_contexts(build_batch):
    (pack,) = _pack(build_batch(3, 4))
    tree, rows = as_tree(pack), as_rows(pack)
    for k in range(len(pack.targets_K)):
        want = pack.contexts[pack.row_K[k]][: pack.at_K[k] + 1]
        node = tree.select_M[tree.slot_K[k]]
        np.testing.assert_array_equal(tree.tokens[0][tree.tree.mask()[node]], want)
        r, at = divmod(rows.select_M[rows.slot_K[k]], rows.tokens.shape[1])
        np.testing.assert_array_equal(rows.tokens[r, : at + 1], want)
