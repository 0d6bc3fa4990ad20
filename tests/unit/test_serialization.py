"""What crosses processes and goes to disk comes back equal, and nothing else comes through."""

import msgspec
import numpy as np
import pytest

from corrente.common import serialization
from corrente.controller.ledger import LedgerState
from corrente.controller.snapshot import Snapshot, Unfinished
from corrente.data.types import Completion, Group
from corrente.testing import samples


def _group() -> Group:
    answer = samples.completion(tokens=(5, 6, 7), versions=(1, 1, 2))
    return samples.group(
        episodes=[samples.episode(turns=[(1, 2), answer], reward=1.0, scores={"exact": 1.0, "n": None})]
    )


def test_codec_round_trips_a_snapshot_with_groups():
    snapshot = Snapshot(
        step=7,
        version=3,
        next_ticket=40,
        ledger=LedgerState(outcomes={"trained": 5}, reasons={"failed": {"why": 1}}),
        prompts={"at": 41},
        unfinished=(Unfinished(prompt_id="0/9", group=_group()), Unfinished(prompt_id="0/10")),
    )
    back = serialization.decode(serialization.encode(snapshot), Snapshot)
    assert back.ledger == snapshot.ledger
    assert back.prompts == {"at": 41}
    group = back.unfinished[0].group
    assert group is not None
    completion = group.episodes[0].completions[0]
    assert completion.tokens.tolist() == [5, 6, 7]
    assert completion.tokens.dtype == np.int32
    assert completion.versions.tolist() == [1, 1, 2]
    assert group.episodes[0].scores == {"exact": 1.0, "n": None}
    assert back.unfinished[1].group is None


@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", "float32", "float64", "uint8"])
def test_codec_keeps_dtype_and_shape(dtype: str):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    back = serialization.decode(serialization.encode(array), np.ndarray)
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)
    back[0, 0] = 1  # decoded arrays are writable


def test_codec_refuses_object_arrays_both_ways():
    with pytest.raises(TypeError, match="object"):
        serialization.encode(np.array([object()]))
    forged = msgspec.msgpack.encode(("|O", (1,), b"12345678"))
    with pytest.raises(msgspec.ValidationError, match="cannot be decoded"):
        serialization.decode(forged, np.ndarray)


def test_codec_refuses_misaligned_completions():
    good = msgspec.to_builtins(
        _group().episodes[0].completions[0], enc_hook=lambda a: (a.dtype.str, a.shape, a.tobytes())
    )
    good["logprobs"] = ("<f4", (1,), b"0000")
    with pytest.raises(msgspec.ValidationError, match="3 tokens but 1 log-probs"):
        serialization.decode(msgspec.msgpack.encode(good), Completion)
