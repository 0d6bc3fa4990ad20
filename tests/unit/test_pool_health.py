"""The pure parts of the pool: a replica's life, and who gets a request."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corrente.engine.pool.health import Health, State
from corrente.engine.pool.routing import Router
from corrente.errors import LedgerError

D, S, T, R = State.DEAD, State.STARTING, State.STALE, State.READY

MOVES = {
    "launched": lambda h: h.launched(),
    "started": lambda h: h.started(),
    "holds the current version": lambda h: h.holds(7, current=7),
    "holds an old version": lambda h: h.holds(6, current=7),
    "missed": lambda h: h.missed(),
    "died": lambda h: h.died(),
}

TABLE = {
    "launched": {D: S},
    "started": {S: T},
    "holds the current version": {T: R, R: R},
    "holds an old version": {T: T, R: T},
    "missed": {T: T, R: T},
    "died": {D: D, S: D, T: D, R: D},
}


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("move", list(MOVES))
def test_health_moves_as_the_table_says_and_in_no_other_way(state: State, move: str):
    before = Health(state, 5)
    if state in TABLE[move]:
        assert MOVES[move](before).state is TABLE[move][state]
    else:
        with pytest.raises(LedgerError):
            MOVES[move](before)


def test_health_is_ready_only_with_the_current_version_and_forgets_it_with_its_death():
    life = Health().launched().started()
    assert life.version is None
    assert life.holds(3, current=4) == Health(T, 3)
    assert life.holds(4, current=4) == Health(R, 4)
    assert life.holds(4, current=4).missed() == Health(T, 4)
    assert life.holds(4, current=4).died().launched().started() == Health(T, None)


def test_group_shares_a_replica_and_the_next_goes_to_the_other():
    router, loads = Router(slack=4, rows=64), {"a": 0, "b": 0}
    went = []
    for group in "ggggHHHH":
        name = router.route(group, loads)
        router.joined(group, name)
        loads[name] += 1
        went.append(name)
    assert "".join(went) == "aaaabbbb"


def test_group_moves_on_when_home_is_ahead_by_the_slack():
    router = Router(slack=4, rows=64)
    router.joined("g", "a")
    assert router.route("g", {"a": 6, "b": 3}) == "a"
    assert router.route("g", {"a": 7, "b": 3}) == "b"


def test_group_moves_on_when_home_has_no_row_and_another_has():
    router = Router(slack=4, rows=8)
    router.joined("g", "a")
    assert router.route("g", {"a": 8, "b": 7}) == "b"
    assert router.route("g", {"a": 8, "b": 8}) == "a"


def test_group_whose_home_is_gone_finds_another_and_one_that_ended_is_forgotten():
    router = Router(slack=4, rows=64)
    router.joined("g", "a")
    assert router.route("g", {"b": 3, "c": 2}) == "c"
    router.left("g")
    assert router.route("g", {"a": 1, "b": 0}) == "b"


@given(
    st.lists(st.tuples(st.sampled_from("ghij"), st.booleans()), max_size=200),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 4),
)
def test_no_replica_is_sent_a_request_while_another_has_slack_fewer(orders, slack: int, rows: int, replicas: int):
    """Whatever comes and goes: the bound in routing's docstring."""
    router, live, loads = (
        Router(slack=slack, rows=rows),
        list[tuple[str, str]](),
        Counter(dict.fromkeys(range(replicas), 0)),
    )
    loads = {str(name): 0 for name in loads}
    for group, ends in orders:
        if ends and live:
            ended, where = live.pop(0)
            router.left(ended)
            loads[where] -= 1
            continue
        name = router.route(group, loads)
        least = min(loads.values())
        assert loads[name] - least < slack
        assert not loads[name] >= rows > least
        router.joined(group, name)
        live.append((group, name))
        loads[name] += 1
