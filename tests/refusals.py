"""What a check of settings says: nothing, or one line that refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from corrente.errors import ConfigError


def refusal(check: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """The message of the ConfigError that ``check`` raises about these arguments, one line; empty where it accepts them."""
    message = ""
    try:
        check(*args, **kwargs)
    except ConfigError as error:
        message = str(error)
    assert "\n" not in message
    return message
