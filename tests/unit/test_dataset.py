"""Datasets of every form as prompts: each row once an epoch, in an order that can be resumed, its columns for the rewards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corrente import config as c
from corrente.config.load import parse_config
from corrente.data.types import Prompt
from corrente.entrypoints.checks import check_config
from corrente.errors import ConfigError
from corrente.prompts.base import Prompts
from corrente.prompts.build import build, build_eval
from corrente.testing.stages import check_prompts

ROWS = [{"prompt": f"né {i}", "answer": i} for i in range(10)]


def encode(text: str) -> list[int]:
    return list(text.encode())


class Items:
    """What torch calls a map-style dataset."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return dict(ROWS[row])


class Repeatable:
    """An iterable that can be begun anew."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS)


def generated() -> Iterator[dict[str, Any]]:
    yield from ROWS


BROUGHT: dict[str, Any] = {"list": ROWS, "items": Items(), "iterable": Repeatable(), "function": generated}


def _make(brought: Any, *, seed: int = 0, **knobs: Any) -> Prompts:
    knobs = {"epochs": 3, "shuffle_window": 4, **knobs}
    config = c.RunConfig(run=c.Run(seed=seed), prompts=c.GivenRows(**knobs))
    return build(config, encode, brought=brought)


def _all(prompts: Prompts, most: int = 100) -> list[Prompt]:
    taken = [prompts.next() for _ in range(most)]
    return [prompt for prompt in taken if prompt is not None]


@pytest.fixture(params=BROUGHT)
def brought(request: pytest.FixtureRequest) -> Any:
    return BROUGHT[request.param]


# ---- objects -----------------------------------------------------------------------------------------------------------------


def test_every_row_comes_once_an_epoch_in_an_order_of_its_own(brought: Any):
    taken = _all(_make(brought, epochs=2))
    epochs = [[p.fields["answer"] for p in taken[:10]], [p.fields["answer"] for p in taken[10:]]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert list(range(10)) not in epochs
    assert [p.id for p in taken] == [f"{at // 10}/{p.fields['answer']}" for at, p in enumerate(taken)]
    assert all(p.text == f"né {p.fields['answer']}" and p.tokens.tolist() == encode(p.text) for p in taken)


def test_order_depends_on_the_seed_alone(brought: Any):
    orders = [[p.id for p in _all(_make(brought, seed=seed))] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_rows_keep_their_order_without_shuffle(brought: Any):
    assert [p.id for p in _all(_make(brought, epochs=1, shuffle=False))] == [f"0/{row}" for row in range(10)]


@pytest.mark.parametrize("before", [0, 1, 9, 10, 11, 29, 30, 31])
def test_restored_position_continues_where_it_stood(brought: Any, before: int):
    one, other = _make(brought), _make(brought)
    for _ in range(before):
        one.next()
    other.restore(json.loads(json.dumps(one.state())))
    assert [p.id for p in _all(other)] == [p.id for p in _all(one)]


def test_prompts_are_found_by_their_ids_in_order(brought: Any):
    taken = _all(_make(brought))
    wanted = [taken[at] for at in (20, 3, 11, 4)]
    found = _make(brought).find([p.id for p in wanted])
    assert [(p.id, p.text, p.fields) for p in found] == [(p.id, p.text, p.fields) for p in wanted]


def test_prompts_keep_their_contract(brought: Any):
    check_prompts(lambda: _make(brought))


def test_stream_that_lost_rows_cannot_be_resumed():
    whole, short = _make(Repeatable(), epochs=1), _make(lambda: ROWS[:3], epochs=1)
    for _ in range(6):
        whole.next()
    short.restore(whole.state())
    with pytest.raises(ConfigError, match="ended after 3 rows, but the checkpoint was written after 6"):
        short.next()
    with pytest.raises(ConfigError, match=r"has no row 0/7"):
        short.find(["0/2", "0/7"])


def test_stream_is_told_the_epoch_and_read_no_further_than_its_window():
    class Told:
        def __init__(self) -> None:
            self.epochs: list[int] = []
            self.read = 0

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self) -> Iterator[dict[str, Any]]:
            for row in ROWS:
                self.read += 1
                yield row

    stream = Told()
    prompts = _make(stream, epochs=2)
    prompts.next()
    assert stream.read == 5
    _all(prompts)
    assert stream.epochs == [0, 1]


def test_columns_become_plain_data_or_are_refused_by_name():
    row = {"prompt": "a", "n": np.int64(3), "xs": np.arange(2), "nested": {"k": [1, None]}}
    (prompt,) = _all(_make([row], epochs=1))
    assert prompt.fields == {"n": 3, "xs": [0, 1], "nested": {"k": [1, None]}}
    with pytest.raises(ConfigError, match="the column 'thing' of row 0/0 is no plain data"):
        _make([{"prompt": "a", "thing": object()}])


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            [{"question": "a"}],
            r"prompts.column = 'prompt': row 0/0 of train_dataset has no such column .it has 'question'",
        ),
        ([{"prompt": None}], "has nothing there; it must be text or a list of messages"),
        ([{"prompt": 3}], "has int there"),
        ([{"prompt": [{"content": "no role"}]}], "has list there"),
        (["text"], "row 0 is of type str; it must be a dict"),
        ([], "has no rows"),
        (iter(ROWS), "is an iterator, which can be read once"),
        ({"train": ROWS}, "is a dict of splits .train.; give one of them"),
        (3, "is of type int; it must be a dataset"),
        ("a/b", "is a text"),
        ([{"prompt": [{"role": "user", "content": "?"}]}], "is a conversation, and there is nothing to render it with"),
    ],
)
def test_folder_that_is_no_dataset_is_refused_with_the_reason(dataset: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        _make(dataset)


@pytest.mark.parametrize(("stream", "message"), [(lambda: [], "has no rows"), (lambda: 3, "returned int")])
def test_stream_without_rows_is_an_error_and_no_endless_loop(stream: Callable[[], Any], message: str):
    with pytest.raises(ConfigError, match=message):
        _make(stream, epochs=0).next()
    with pytest.raises(ConfigError, match=message):
        _make(stream, epochs=0).find(["0/0"])  # how the first row is looked at before a model is loaded


def test_given_rows_without_rows_are_refused_by_key():
    with pytest.raises(ConfigError, match=r'prompts\.kind = "given": no dataset was given'):
        _make(None)


def test_dataset_that_is_given_takes_the_knobs_of_the_section_it_replaces():
    config = c.RunConfig(prompts=c.Jsonl(path="unused", column="q", epochs=1, shuffle=False))
    assert [p.text for p in _all(build(config, encode, brought=[{"q": "a"}, {"q": "b"}]))] == ["a", "b"]


def test_held_out_rows_are_the_first_of_what_is_given_shared_among_several_names():
    config = c.RunConfig(prompts=c.GivenRows(), eval=c.Eval(prompts=5))
    assert [p.id for p in build_eval(config, encode, brought=ROWS)] == [f"eval/{row}" for row in range(5)]
    assert [p.id for p in build_eval(config, encode, brought=generated)] == [f"eval/{row}" for row in range(5)]
    several = build_eval(config, encode, brought={"a": ROWS, "b": Repeatable()})
    assert [p.id for p in several] == ["a:eval/0", "a:eval/1", "a:eval/2", "b:eval/0", "b:eval/1"]
    assert build_eval(config, encode) == ()


# ---- files and the hub's layout ----------------------------------------------------------------------------------------------


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Ten conversations with an answer each, as Parquet."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in ROWS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
    return tmp_path / "chats.parquet"


class Shouting:
    """Renders a conversation as its text in capitals."""

    def render(self, messages: Any, *, tools: Any = None, generation: bool = True) -> str:
        return "".join(m["content"].upper() for m in messages)

    def prompt(self, messages: Any, *, tools: Any = None) -> tuple[str, list[int]]:
        text = self.render(messages)
        return text, self.encode(text)

    def encode(self, text: str) -> list[int]:
        return encode(text)


@pytest.mark.slow
def test_parquet_holds_text_or_conversations(chats: Path, tmp_path: Path):
    section = c.Parquet(path=str(chats), eval_path=str(chats), epochs=1)
    config = c.RunConfig(prompts=section, eval=c.Eval(prompts=2))
    taken = _all(build(config, encode, chat=Shouting()))
    assert sorted(p.fields["answer"] for p in taken) == list(range(10))
    for prompt in taken:
        assert prompt.messages == ({"role": "user", "content": f"né {prompt.fields['answer']}"},)
        assert prompt.text == f"NÉ {prompt.fields['answer']}"
    assert len(build_eval(config, encode, chat=Shouting())) == 2
    check_prompts(lambda: build(config, encode, chat=Shouting()))


@pytest.mark.slow
def test_parquet_is_checked_by_its_schema(chats: Path, tmp_path: Path):
    def judged(**prompts: Any) -> None:
        tables = {"prompts": {"kind": "parquet", "path": str(chats), **prompts}, "run": {"dir": str(tmp_path)}}
        check_config(parse_config({**tables, "model": {"path": str(tmp_path)}, "eval": {"every": 0}}))

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    judged()
    with pytest.raises(
        ConfigError, match=r"prompts\.column = 'question': .* has no such column .it has 'answer', 'prompt'"
    ):
        judged(column="question")
    with pytest.raises(ConfigError, match=r"needs 'answer', which .* does not have"):
        judged(column="answer")
    with pytest.raises(ConfigError, match=r"prompts\.path = nowhere\.parquet does not exist"):
        judged(path="nowhere.parquet")
    (tmp_path / "torn.parquet").write_text("PAR1")
    with pytest.raises(ConfigError, match="cannot be read"):
        judged(path=str(tmp_path / "torn.parquet"))


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_hub_layout_on_disk_is_a_table_or_a_stream(chats: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    section = c.Dataset(path=str(chats.parent), streaming=streaming, epochs=2, shuffle_window=4)
    config = c.RunConfig(prompts=section)
    taken = _all(build(config, encode, chat=Shouting()))
    assert sorted(p.fields["answer"] for p in taken[:10]) == list(range(10))
    assert [p.id for p in taken[:10]] != [p.id for p in taken[10:]]
    assert taken[0].messages[0]["role"] == "user"
    again = build(config, encode, chat=Shouting())
    for _ in range(7):
        again.next()
    resumed = build(config, encode, chat=Shouting())
    resumed.restore(again.state())
    assert [p.id for p in _all(resumed)] == [p.id for p in taken[7:]]


@pytest.mark.slow
def test_datasets_objects_are_taken_as_they_are(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS)
    assert [p.fields["answer"] for p in _all(_make(whole, epochs=1, shuffle=False))] == list(range(10))
    check_prompts(lambda: _make(whole.to_iterable_dataset()))
    with pytest.raises(ConfigError, match=r"is a dict of splits .train."):
        _make(datasets.DatasetDict({"train": whole}))
    datasets.DatasetDict({"train": whole}).save_to_disk(tmp_path / "saved")
    section = c.Dataset(path=str(tmp_path / "saved"), epochs=1)
    assert len(_all(build(c.RunConfig(prompts=section), encode))) == 10
    with pytest.raises(ConfigError, match=r"split 'test': there is no such split .it has train"):
        build(c.RunConfig(prompts=c.Dataset(path=str(tmp_path / "saved"), split="test")), encode)


@pytest.mark.slow
def test_dataset_that_cannot_be_loaded_is_a_config_error(tmp_path: Path):
    pytest.importorskip("datasets")
    with pytest.raises(ConfigError, match=r"prompts\.path = '.*', split 'train' cannot be loaded"):
        build(c.RunConfig(prompts=c.Dataset(path=str(tmp_path / "nowhere"))), encode)
