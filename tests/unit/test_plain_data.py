"""Plain data: whatever users and models bring is held by a checkpoint as it is, and by a JSON file in some form."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import uuid
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corrente.common import serialization
from corrente.common.plain_data import MAX_NESTING, json_plain, plain_data, plain_text, to_plain
from corrente.data.types import Prompt
from corrente.testing import samples

HALF = "\ud83d"
UTC = datetime.UTC
WHEN = datetime.datetime(2026, 2, 3, 4, 5, 6, 7)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    y: Any


class Rude:
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.arange(6).reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
        (np.array([{"role": "user", "content": np.array(["x"])}], dtype=object), [{"role": "user", "content": ["x"]}]),
        (np.datetime64("2026-02-03T04:05:06.000007"), WHEN),
        (np.datetime64("2026-02-03T04:05:06.000007000", "ns"), WHEN),
        (np.array(["2026-02-03T04:05:06.000007000"], "M8[ns]"), [WHEN]),
        (np.timedelta64(1500, "ms"), datetime.timedelta(seconds=1.5)),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor(2.5, dtype=torch.bfloat16, requires_grad=True), 2.5),
        (pd.Timestamp(WHEN), WHEN),
        (pd.Timedelta(seconds=2), datetime.timedelta(seconds=2)),
        (pd.NaT, None),
        (pd.NA, None),
        (pd.Series([1, 2]), [1, 2]),
        (pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}), [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]),
        (WHEN, WHEN),
        (WHEN.date(), WHEN.date()),
        (datetime.time(4, 5), datetime.time(4, 5)),
        (pathlib.Path("a/b"), pathlib.Path("a/b")),
        (decimal.Decimal("1.10"), decimal.Decimal("1.10")),
        (10**24, 10**24),
        (-(10**400), -(10**400)),
        ((1, (2, 3)), [1, [2, 3]]),
        ({"b", "a"}, ["a", "b"]),
        (Colour.RED, "red"),
        (Point(1, np.int8(2)), {"x": 1, "y": 2}),
        ({1: np.int32(1), np.int64(2): 2, None: 3, (1, 2): 4}, {1: 1, 2: 2, "None": 3, "(1, 2)": 4}),
        (bytearray(b"\xff"), b"\xff"),
        (f"a{HALF}b", "a\ufffdb"),
        ("\ud83d\ude00", "\U0001f600"),
        ({HALF: [HALF]}, {"\ufffd": ["\ufffd"]}),
    ],
)
def test_value_is_plain_and_a_checkpoint_holds_it_as_it_is(value: Any, plain: Any):
    found = plain_data(value)
    assert found == plain
    assert type(found) is type(plain)
    prompt = samples.prompt(fields={"column": found, "within": [{"column": found}]})
    back = serialization.decode(serialization.encode(prompt), Prompt)
    assert back.fields == {"column": plain, "within": [{"column": plain}]}
    assert type(back.fields["column"]) is type(plain)
    json.loads(json.dumps(json_plain({"column": value})))


@pytest.mark.parametrize("value", [object(), print, nested(MAX_NESTING + 1), nested(5000), Rude(), iter([1])])
def test_value_without_a_plain_form_is_refused_or_becomes_text(value: Any):
    with pytest.raises((TypeError, RuntimeError)):
        plain_data(value)
    assert isinstance(to_plain(value), str)
    json.dumps(json_plain({"a": value}))


def test_times_with_zones_and_identifiers_come_back():
    values = [WHEN.replace(tzinfo=UTC), uuid.UUID(int=7), datetime.timedelta(days=-1, microseconds=5)]
    assert serialization.decode(serialization.encode(values), Any) == values


def test_text_that_is_no_unicode_is_encoded_as_the_nearest_that_is():
    group = samples.group(episodes=[samples.episode(error=f"ValueError: {HALF}")])
    back = serialization.decode(serialization.encode(group), type(group))
    assert back.episodes[0].error == "ValueError: \ufffd"


ANY_TEXT = st.text(st.characters(), max_size=8) | st.sampled_from([HALF, "\udc00", "\ud83d\ude00", "", "\0"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | ANY_TEXT
    | st.binary(max_size=4)
    | st.datetimes().map(lambda when: when.replace(fold=0))
    | st.dates()
    | st.timedeltas()
    | st.builds(np.float32, st.floats(width=32))
    | st.builds(pathlib.Path, st.sampled_from(["a", "/b"]))
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(ANY_TEXT | st.integers(-9, 9), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_any_value_is_held_by_checkpoints_and_json(value: Any):
    plain = plain_data(value)
    back = serialization.decode(serialization.encode({"a": plain}), Any)["a"]
    assert repr(back) == repr(plain)  # NaN is not equal to itself
    msgspec.json.decode(msgspec.json.encode(json_plain(value)))


@given(ANY_TEXT)
def test_plain_text_changes_nothing_that_is_unicode(text: str):
    plain = plain_text(text)
    plain.encode()
    assert plain_text(plain) == plain
    if not any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        assert plain == text
