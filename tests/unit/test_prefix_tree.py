"""The prefix tree against plain dictionaries of prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corrente.data.prefix_tree import fold

sequences = st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=8)


@given(sequences)
def test_nodes_are_the_distinct_prefixes(texts: list[list[int]]) -> None:
    tree = fold([np.array(t, np.int32) for t in texts])
    prefixes = {tuple(t[: at + 1]) for t in texts for at in range(len(t))}
    assert len(tree) == len(prefixes)
    of_node = {}
    for text, path in zip(texts, tree.paths, strict=True):
        assert len(path) == len(text)
        for at, node in enumerate(path.tolist()):
            of_node.setdefault(node, set()).add(tuple(text[: at + 1]))
    assert all(len(named) == 1 for named in of_node.values())
    assert {next(iter(named)) for named in of_node.values()} == prefixes


@given(sequences)
def test_tokens_positions_and_parents_follow_each_path(texts: list[list[int]]) -> None:
    tree = fold([np.array(t, np.int32) for t in texts])
    for text, path in zip(texts, tree.paths, strict=True):
        assert tree.tokens[path].tolist() == text
        assert tree.positions[path].tolist() == list(range(len(text)))
        assert tree.parent[path].tolist() == [-1, *path.tolist()][: len(text)]


@given(sequences)
def test_node_looks_at_its_ancestors_and_itself(texts: list[list[int]]) -> None:
    tree = fold([np.array(t, np.int32) for t in texts])
    mask = tree.mask()
    for node in range(len(tree)):
        ancestors, at = set(), node
        while at >= 0:
            ancestors.add(at)
            at = int(tree.parent[at])
        assert set(np.flatnonzero(mask[node]).tolist()) == ancestors


def test_shared_work_is_done_once() -> None:
    prompt = list(range(10, 30))
    tree = fold([np.array([*prompt, *tail], np.int32) for tail in ([1, 2, 3], [1, 2, 4], [5], [1, 2, 3])])
    assert len(tree) == 20 + 3 + 1 + 1
    assert tree.paths[0].tolist() == tree.paths[3].tolist()
    assert tree.paths[0] is not tree.paths[1]


@pytest.mark.parametrize("texts", [[], [[]], [[], []]])
def test_fold_of_nothing_is_empty(texts: list[list[int]]) -> None:
    tree = fold([np.array(t, np.int32) for t in texts])
    assert len(tree) == 0
    assert tree.mask().shape == (0, 0)
    assert [len(p) for p in tree.paths] == [0] * len(texts)
