"""Rows as people have them: any types of values, data frames, environments without prompts, and what no row may be."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from tests.unit.chat_tokenizers import PLAIN, ByteTokenizer

from corrente import config as c
from corrente.common import serialization
from corrente.config import Chat
from corrente.data.types import Prompt
from corrente.entrypoints.checks import check_config
from corrente.entrypoints.inputs import RunInputs
from corrente.env.conversation import opening_messages
from corrente.errors import ConfigError
from corrente.prompts.base import Prompts
from corrente.prompts.build import build_eval_prompts, build_prompts
from corrente.prompts.chat import ChatTemplate, parse_conversation
from corrente.prompts.jsonl import verify_jsonl
from corrente.prompts.tokenizer import Tokenizer
from corrente.testing import samples

WHEN = datetime.datetime(2026, 2, 3, 4, 5)
TEXT = [{"role": "user", "content": "hé"}]


def make(rows: Any, *, template: str = PLAIN, **options: Any) -> Prompts:
    tokenizer = ByteTokenizer(template)
    chat = ChatTemplate(tokenizer, Chat())  # type: ignore[arg-type]
    config = c.RunConfig(prompts=c.GivenRows(shuffle=False, epochs=1))
    return build_prompts(config, tokenizer.encode, chat=chat, passed_dataset=rows, **options)


def first(rows: Any, **options: Any) -> Prompt:
    prompt = make(rows, **options).next_prompt()
    assert prompt is not None
    return prompt


def no_reward(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def test_columns_of_any_type_reach_rewards_as_plain_values_and_come_back_from_a_checkpoint():
    row = {
        "prompt": np.str_("hé"),
        "array": np.arange(4, dtype=np.float32).reshape(2, 2),
        "tensor": torch.tensor([1, 2]),
        "number": np.int64(3),
        "path": Path("a/b"),
        "when": WHEN,
        "stamp": pd.Timestamp(WHEN),
        "big": 10**24,
        "half": "a\ud800",
        "nested": [{"deep": np.array([{"x": np.bool_(True)}], dtype=object)}],
        "missing": pd.NA,
    }
    prompt = first([row])
    assert prompt.text == "hé"
    fields = {
        "array": [[0.0, 1.0], [2.0, 3.0]],
        "tensor": [1, 2],
        "number": 3,
        "path": Path("a/b"),
        "when": WHEN,
        "stamp": WHEN,
        "big": 10**24,
        "half": "a\ufffd",
        "nested": [{"deep": [{"x": True}]}],
        "missing": None,
    }
    assert prompt.fields == fields
    assert serialization.decode(serialization.encode(prompt), Prompt).fields == fields


def test_data_frame_is_a_table_with_the_types_of_its_columns():
    frame = pd.DataFrame(
        {"prompt": ["a", "b"], "n": [1, 2], "x": [0.5, float("nan")], "note": ["y", None], "m": [[TEXT[0]], None]},
        index=[7, 9],
    )
    prompts = make(frame)
    one, two = prompts.next_prompt(), prompts.next_prompt()
    assert one is not None
    assert two is not None
    assert (one.text, one.fields) == ("a", {"n": 1, "x": 0.5, "note": "y", "m": TEXT})
    assert (two.fields["n"], two.fields["note"], two.fields["m"]) == (2, None, None)
    assert np.isnan(two.fields["x"])
    assert type(one.fields["n"]) is int
    assert prompts.next_prompt() is None


def test_arrow_table_is_a_table():
    assert first(pa.table({"prompt": ["a"], "when": [WHEN]})).fields == {"when": WHEN}


@pytest.mark.parametrize("make_rows", [pd.DataFrame, pa.Table.from_pylist, list])
def test_columns_of_a_frame_are_checked_before_anything_starts(make_rows: Any):
    def needs(completions: list[Any], answer: list[Any]) -> list[float]:
        return [0.0 for _ in answer]

    config = c.RunConfig(model=c.Model(path="smollm2-135m-instruct"), prompts=c.GivenRows())
    for rows, match in (([{"text": "a"}], "prompt"), ([{"prompt": "a"}], "'answer'")):
        with pytest.raises(ConfigError, match=match):
            check_config(config, RunInputs(train_dataset=make_rows(rows), reward_functions=[needs]))
    check_config(config, RunInputs(train_dataset=make_rows([{"prompt": "a", "answer": 1}]), reward_functions=[needs]))


def test_conversation_of_arrays_and_parts_is_rendered_as_its_text():
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "é"}]
    asked = np.array([{"role": "user", "content": np.array(parts, dtype=object)}], dtype=object)
    for rows in (
        [{"prompt": asked}],
        pd.DataFrame({"prompt": [asked]}),
        [{"prompt": [{"role": "user", "content": parts}]}],
    ):
        prompt = first(rows)
        assert prompt.text == "<|user|>hé<|end|>\n<|assistant|>"
        assert prompt.messages == ({"role": "user", "content": parts},)


def test_template_that_takes_parts_alone_is_given_parts():
    parts_only = (
        "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    for content in ("hé", [{"type": "text", "text": "hé"}]):
        assert first([{"prompt": [{"role": "user", "content": content}]}], template=parts_only).text == "<|user|>hé>"


def test_part_that_is_no_text_is_refused_with_its_row():
    asked = [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]
    with pytest.raises(ConfigError, match=r"row 0/0: .*'image'"):
        make([{"prompt": asked}])


def test_missing_values_are_left_out_of_messages_at_any_depth():
    arguments = {"a": 1, "b": None, "c": {"d": None, "e": [None, {"f": None, "g": 2}]}}
    asked = [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "x", "arguments": arguments}}]}
    ]
    kept = {"a": 1, "c": {"e": [None, {"g": 2}]}}
    expected = ({"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": kept}}]},)
    assert parse_conversation(asked) == expected


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"prompt": "a", "x": deep(5000)}, r"'x' of row 0/0 .*nested"),
        ({"prompt": deep(5000)}, r"'prompt' of row .*nested"),
        ({"prompt": [{"role": "user", "content": deep(5000)}]}, r"'prompt' of row .*nested"),
        ({"prompt": "a", "x": object()}, r"'x' of row 0/0 is no plain data"),
        ({"prompt": "a", "x": print}, r"'x' of row 0/0 is no plain data"),
        ({"prompt": 10**24}, r"has int there"),
    ],
)
def test_row_that_is_no_data_is_refused_with_its_column(row: dict[str, Any], match: str):
    with pytest.raises(ConfigError, match=match):
        make([row])


@pytest.mark.parametrize("text", ["[" * 5000, "9" * 25, "\ud83d\ude00 a \udc00", "\0", "{{ messages }}"])
def test_text_of_any_kind_is_a_prompt(text: str):
    assert first([{"prompt": text}]).text == first([{"prompt": text}]).text
    asked = first([{"prompt": [{"role": "user", "content": text}]}])
    asked.text.encode()
    serialization.encode(asked)
    assert ByteTokenizer().decode(asked.tokens) == asked.text


def test_lines_that_python_writes_are_rows_and_deep_ones_are_refused(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a\ud83d", "x": float("nan"), "n": 10**24}, {"prompt": "b", "x": 1.0, "n": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert verify_jsonl(path, key="prompts.path", column="prompt") == {"x", "n"}
    prompts = build_prompts(
        c.RunConfig(prompts=c.Jsonl(path=str(path), shuffle=False)), ByteTokenizer().encode, chat=None
    )
    one = prompts.next_prompt()
    assert one is not None
    assert one.fields["n"] == 10**24
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "x": ' + "[" * 5000 + "]" * 5000 + "}\n")
    with pytest.raises(ConfigError, match="line 2"):
        verify_jsonl(path, key="prompts.path", column="prompt")


# ---- environments ------------------------------------------------------------------------------------------------------------


class Game:
    """Opens the conversation itself."""

    def reset(self, **columns: Any) -> str:
        return "go"


def game_inputs(rows: Any, **options: Any) -> RunInputs:
    return RunInputs(
        train_dataset=rows, environment_factory={"chess": Game, "go": Game}, reward_functions=[no_reward], **options
    )


FRAMES: list[Any] = [list, pd.DataFrame, pa.Table.from_pylist]


@pytest.mark.parametrize("make_rows", FRAMES)
@pytest.mark.parametrize("unknown", ["checkers", None, "", "Chess"])
def test_row_that_names_an_unknown_environment_is_refused_at_the_start(make_rows: Any, unknown: Any):
    config = c.RunConfig(model=c.Model(path="smollm2-135m-instruct"), prompts=c.GivenRows())
    rows = [{"prompt": "a", "environment": "chess"}, {"prompt": "b", "environment": unknown}]
    with pytest.raises(ValueError, match=r"row 1 .*'environment'; it must be one of 'chess', 'go'"):
        check_config(config, game_inputs(make_rows(rows)))
    rows[1]["environment"] = "go"
    check_config(config, game_inputs(make_rows(rows)))
    with pytest.raises(ConfigError, match="row 0"):
        check_config(config, game_inputs(make_rows([{"prompt": "a"}])))
    with pytest.raises(ConfigError, match="row 0"):
        check_config(config, game_inputs(make_rows(rows), eval_dataset=[{"prompt": "a", "environment": "x"}]))


def test_stream_that_names_an_unknown_environment_is_refused_at_that_row():
    rows = [{"prompt": "a", "environment": "chess"}, {"prompt": "b", "environment": "x"}]
    prompts = make(lambda: iter(rows), environments=frozenset({"chess"}))
    prompts.next_prompt()
    with pytest.raises(ConfigError, match="row 0/1"):
        prompts.next_prompt()


@pytest.mark.parametrize("make_rows", FRAMES)
def test_row_needs_no_prompt_where_an_environment_opens(make_rows: Any):
    rows = make_rows([{"environment": "chess", "level": 3}])
    config = c.RunConfig(model=c.Model(path="smollm2-135m-instruct"), prompts=c.GivenRows())
    check_config(config, game_inputs(rows))
    prompt = first(rows, environments=frozenset({"chess"}), opens=True)
    assert prompt.fields == {"environment": "chess", "level": 3}
    assert prompt.messages == ({"role": "user", "content": ""},)
    with pytest.raises(ConfigError, match="prompt"):
        make(rows)


def test_environment_without_a_prompt_has_the_first_words():
    prompt = samples.prompt(messages=({"role": "user", "content": ""},))
    said = ({"role": "system", "content": "s"}, {"role": "user", "content": "go"})
    assert opening_messages(prompt, said, extends=False) == list(said)
    assert opening_messages(prompt, said[1:], extends=True) == [{"role": "user", "content": "go"}]
    assert opening_messages(prompt, (), extends=True) == [{"role": "user", "content": ""}]
    parts = samples.prompt(messages=({"role": "user", "content": [{"type": "text", "text": "a"}]},))
    assert opening_messages(parts, said[1:], extends=True) == [{"role": "user", "content": "ago"}]


def test_stream_for_evaluation_is_taken_as_far_as_it_goes():
    config = c.RunConfig(prompts=c.GivenRows(), eval=c.Eval(prompts=1_000_000))
    rows = [{"prompt": str(at)} for at in range(5)]
    taken = build_eval_prompts(config, ByteTokenizer().encode, passed_dataset=lambda: iter(rows))
    assert [prompt.text for prompt in taken] == ["0", "1", "2", "3", "4"]


# ---- tokenizers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("single", "before", "after"),
    [("$A", 0, 0), ("<|end|> $A", 1, 0), ("$A <|end|>", 0, 1), ("<|end|> $A <|end|> <|user|>", 1, 2)],
)
def test_prompt_ends_where_its_text_ends_whatever_a_tokenizer_adds(single: str, before: int, after: int):
    from tokenizers.processors import TemplateProcessing

    bytes_of = ByteTokenizer()
    hf = bytes_of.hf
    ids = [(name, hf.convert_tokens_to_ids(name)) for name in ("<|end|>", "<|user|>")]
    hf.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ids)
    tokenizer = Tokenizer(Path("none"))
    tokenizer.__dict__["hf"] = hf
    text = bytes_of.encode("hé")
    assert len(hf.encode("hé")) == before + len(text) + after
    assert tokenizer.encode("hé") == [ids[0][1]] * before + text
    assert tokenizer.encode("hé<|end|>") == [ids[0][1]] * before + text + [ids[0][1]]  # what the text says, stays
    assert tokenizer.encode("") == [ids[0][1]] * before
