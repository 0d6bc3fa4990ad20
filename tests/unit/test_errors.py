"""Which error it is when the data turns out to be wrong."""

from __future__ import annotations

from corrente.errors import ConfigError, PipelineError, while_running


def test_wrong_data_is_a_wrong_setting_until_a_run_has_begun():
    wrong, other = ConfigError("row 7 has no prompt"), ValueError("of the user's own")
    assert while_running(wrong, begun=False) is wrong
    assert while_running(other, begun=True) is other
    failed = while_running(wrong, begun=True)
    assert isinstance(failed, PipelineError)
    assert not isinstance(failed, ConfigError)
    assert str(failed) == str(wrong)
