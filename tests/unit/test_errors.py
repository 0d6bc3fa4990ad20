"""Which error it is when the data turns out to be wrong."""

from __future__ import annotations

import pytest

from corrente.errors import (
    ConfigError,
    PipelineError,
    RewardError,
    WorkerDied,
    raising_root_cause,
    root_cause,
    while_running,
)


def test_wrong_data_is_a_wrong_setting_until_a_run_has_begun():
    wrong, other = ConfigError("row 7 has no prompt"), ValueError("of the user's own")
    assert while_running(wrong, begun=False) is wrong
    assert while_running(other, begun=True) is other
    failed = while_running(wrong, begun=True)
    assert isinstance(failed, PipelineError)
    assert not isinstance(failed, ConfigError)
    assert str(failed) == str(wrong)


def test_root_cause_is_what_decides_in_nested_groups():
    death, fatal, ours, other = WorkerDied("learner died"), PipelineError("no"), RewardError("f: no"), ValueError("no")
    for leaves, cause in (
        ([other, ours, fatal, death], death),
        ([other, ours, fatal], fatal),
        ([other, ours], ours),
        ([other, KeyError("x")], other),
    ):
        nested = ExceptionGroup("outer", [ExceptionGroup("inner", leaves[:1]), *leaves[1:]])
        assert root_cause(nested) is cause
    interrupt = KeyboardInterrupt()
    assert root_cause(BaseExceptionGroup("outer", [death, interrupt])) is interrupt
    assert root_cause(other) is other


def test_block_raises_the_root_cause_and_keeps_the_group_where_it_holds_more():
    alone, death = LookupError("mine"), WorkerDied("learner died")
    with pytest.raises(LookupError) as caught, raising_root_cause():
        raise ExceptionGroup("tasks", [alone])
    assert caught.value is alone
    assert alone.__cause__ is None
    group = ExceptionGroup("tasks", [ValueError("x"), death])
    with pytest.raises(WorkerDied) as died, raising_root_cause():
        raise group
    assert died.value.__cause__ is group
    with pytest.raises(LookupError), raising_root_cause():
        raise alone
