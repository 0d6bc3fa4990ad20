"""The base of every section of a config: frozen, closed to unknown keys, told apart by ``kind``."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=False):
    pass


class Kind(Section, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    pass


class UserKind(Kind, frozen=True, kw_only=True, tag="user"):
    """A function of the user's in place of a built-in kind.

    In a config file ``kind`` is the name of the function, and every other key of the table is one of its keyword arguments.
    """

    function: str
    """"package.module:function", or "path/to/file.py:function"."""
    options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """The keyword arguments."""
