"""The account of admitted prompts balances, or says that we have a bug."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corrente.controller.ledger import OUTCOMES, REASONS, Admission, Ledger
from corrente.errors import LedgerError
from corrente.testing import samples


def admission(row: int) -> Admission:
    return Admission(prompt=samples.prompt(id=f"0/{row}"), version=0)


def test_every_prompt_ends_once_with_a_reason_and_a_count() -> None:
    ledger = Ledger()
    for ticket in range(5):
        ledger.admit(ticket, admission(ticket))
    ledger.settle(0, "trained")
    ledger.settle(1, "filtered", "all rewards equal")
    ledger.settle(2, "filtered", "all rewards equal")
    ledger.finish(samples.group(id=3))
    assert [a.prompt.id for a in ledger.outstanding] == ["0/3", "0/4"]
    assert [a.group is not None for a in ledger.outstanding] == [True, False]
    assert ledger.admitted == 5
    ledger.settle_rest("cancelled", "the run ended")
    assert ledger.counts() == {"trained": 1, "filtered": 2, "failed": 0, "stale": 0, "cancelled": 2}
    assert ledger.state().reasons == {"filtered": {"all rewards equal": 2}, "cancelled": {"the run ended": 2}}
    assert ledger.outstanding == ()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda ledger: ledger.settle(1, "stale"),
        lambda ledger: ledger.settle(9, "trained"),
        lambda ledger: ledger.admit(2, admission(2)),
        lambda ledger: ledger.finish(samples.group(id=9)),
    ],
    ids=["settle twice", "settle unknown", "admit twice", "finish unknown"],
)
def test_account_that_cannot_be_right_is_our_own_bug(misuse) -> None:
    ledger = Ledger()
    ledger.admit(1, admission(1))
    ledger.admit(2, admission(2))
    ledger.settle(1, "trained")
    with pytest.raises(LedgerError):
        misuse(ledger)
    assert ledger.counts()["trained"] == 1
    assert ledger.admitted == 2


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(OUTCOMES))))
def test_account_balances_whatever_happens_and_survives_a_restart(ends: list[tuple[int, str]]) -> None:
    ledger, open_tickets = Ledger(), set(range(31))
    for ticket in range(31):
        ledger.admit(ticket, admission(ticket))
    for ticket, outcome in ends:
        if ticket in open_tickets:
            open_tickets.remove(ticket)
            ledger.settle(ticket, outcome, "because")  # type: ignore[arg-type]
        assert sum(ledger.counts().values()) + len(ledger.outstanding) == ledger.admitted == 31
    after = Ledger(ledger.state())
    assert after.counts() == ledger.counts()
    assert after.admitted == 31 - len(open_tickets)
    assert after.state() == ledger.state()


def test_reasons_that_name_what_they_are_about_do_not_grow_without_end():
    ledger = Ledger()
    for ticket in range(3 * REASONS):
        ledger.admit(ticket, admission(ticket))
        ledger.settle(ticket, "failed", f"request {ticket} was lost")
    reasons = ledger.state().reasons["failed"]
    assert len(reasons) == REASONS + 1
    assert sum(reasons.values()) == 3 * REASONS
