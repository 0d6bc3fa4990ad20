"""The gate's numbers against hand-computed ones, and the checks at consumption on groups of mixed age."""

from __future__ import annotations

import msgspec
import pytest

from corrente.config import Double, NoBuffer, Staleness, Stream, Window
from corrente.staleness import gate
from corrente.staleness.policies import Accept, ByVersion
from corrente.testing import samples
from corrente.testing.world import flow


@pytest.mark.parametrize(
    ("ahead", "window", "prompts", "every", "slots", "used", "age"),
    [
        (0, 1, 8, 1, 8, 1, 0),
        (0, 8, 8, 1, 8, 8, 0),  # S = 0 is on-policy whatever the window
        (1, 1, 8, 1, 16, 1, 1),
        (1, 0, 8, 1, 16, 4, 2),  # floor(0.3 * 16) = 4
        (1, 9, 8, 1, 16, 9, 2),  # 8 / 8 = 1 version more
        (1, 10, 8, 1, 16, 10, 3),  # 9 / 8 rounds up to 2
        (2, 1, 8, 3, 72, 1, 2),
        (2, 25, 8, 3, 72, 25, 3),
        (2, 26, 8, 3, 72, 26, 4),
        (1, 0, 1, 1, 2, 1, 1),  # floor(0.6) is at least 1
    ],
)
def test_slots_window_and_bound(
    ahead: int, window: int, prompts: int, every: int, slots: int, used: int, age: int
) -> None:
    config = flow(steps=every, ahead=ahead, window=window, prompts=prompts, every=every)
    assert (gate.slots(config), gate.window(config), gate.max_age(config)) == (slots, used, age)


def test_depth_of_the_other_buffers() -> None:
    config = flow(steps=6, prompts=4, every=3, ahead=5)
    none, double = (msgspec.structs.replace(config, buffer=kind) for kind in (NoBuffer(), Double()))
    assert (gate.slots(none), gate.window(none), gate.max_age(none)) == (12, 1, 0)
    assert (gate.slots(double), gate.window(double), gate.max_age(double)) == (24, 1, 1)
    stream = msgspec.structs.replace(config, buffer=Stream(), staleness=Staleness(reject=3, mask=2))
    assert (gate.slots(stream), gate.max_age(stream)) == (0, 2)
    assert gate.max_age(msgspec.structs.replace(stream, staleness=Staleness())) is None
    tight = msgspec.structs.replace(config, buffer=Window(window=1), staleness=Staleness(max=5, reject=2))
    assert gate.max_age(tight) == 2


def test_reject_looks_at_the_oldest_token() -> None:
    mixed = samples.group(versions=(3, 3, 4, 5))
    assert ByVersion(reject=2).judge(mixed, 5).stale == ""
    assert "staleness.reject = 1" in ByVersion(reject=1).judge(mixed, 5).stale
    assert Accept().judge(mixed, 500).stale == ""


def test_mask_withholds_what_is_too_old_and_keeps_the_rest() -> None:
    mixed = samples.group(versions=(3, 3, 4, 5))
    verdict = ByVersion(mask=1).judge(mixed, 5)
    assert (verdict.stale, verdict.oldest_trainable) == ("", 4)
    assert "staleness.mask = 1" in ByVersion(mask=1).judge(mixed, 7).stale


def test_mask_comes_before_reject() -> None:
    """What is withheld does not count against the group."""
    mixed = samples.group(versions=(0, 4, 5))
    assert ByVersion(reject=1, mask=1).judge(mixed, 5).stale == ""
    assert ByVersion(reject=0, mask=1).judge(mixed, 5).stale != ""


def test_group_is_as_old_as_its_oldest_episode() -> None:
    both = samples.group(episodes=[samples.episode(versions=(6, 6)), samples.episode(index=1, versions=(2, 2))])
    assert ByVersion(reject=3).judge(both, 6).stale != ""
    assert ByVersion(reject=4).judge(both, 6).stale == ""


def test_group_without_tokens_is_as_old_as_its_admission() -> None:
    empty = samples.group(versions=(), admitted_version=4)
    assert ByVersion(reject=1).judge(empty, 5).stale == ""
    assert ByVersion(reject=1).judge(empty, 6).stale != ""
    assert ByVersion(mask=1).judge(empty, 6).stale != ""
