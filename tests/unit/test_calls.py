"""Calls of tools, read from what a policy wrote: every format, and everything that can be wrong with one."""

from __future__ import annotations

import json
import re

import pytest
from tests.unit.talking import ByteTokenizer

from corrente.env.calls import (
    ToolCall,
    choose_parser,
    compile_call_pattern,
    parse_hermes,
    parse_llama3,
    pattern_parser,
    verify_call_format,
)
from corrente.errors import ConfigError

ADD = ToolCall(name="add", arguments={"a": 1})


def test_hermes_calls_stand_in_text_in_any_number():
    parsed = parse_hermes(
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>{"name": "now"}</tool_call>'
    )
    assert parsed.content == "Let me see."
    assert parsed.calls == (ADD, ToolCall(name="now"))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>add(1)</tool_call>", "not JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}', "not JSON"),
        ('<tool_call>{"arguments": {"a": 1}}</tool_call>', '"name"'),
        ('<tool_call>["add"]</tool_call>', '"name"'),
        ('<tool_call>{"name": 3}</tool_call>', '"name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be an object"),
        ('<tool_call>{"name": "add", "arguments": "a=1"}</tool_call>', "arguments are not JSON"),
        ("<tool_call></tool_call>", "not JSON"),
    ],
)
def test_broken_call_says_why_it_is_none(text: str, error: str):
    (call,) = parse_hermes(text).calls
    assert error in call.error


def test_arguments_may_be_json_in_a_string_or_wrapped_in_a_function():
    assert parse_hermes('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>').calls == (ADD,)
    wrapped = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert parse_hermes(f"<tool_call>{json.dumps(wrapped)}</tool_call>").calls == (ADD,)
    assert parse_hermes('<tool_call>{"name": "add", "arguments": null}</tool_call>').calls == (ToolCall(name="add"),)


@pytest.mark.parametrize("text", ["plain text", "", "a < b and {c}", '{"answer": 4}'])
def test_text_without_a_call_is_content(text: str):
    for parse in (parse_hermes, parse_llama3):
        assert parse(text).calls == ()
        assert parse(text).content == text


def test_llama3_calls_are_the_whole_answer():
    assert parse_llama3('{"name": "add", "parameters": {"a": 1}}').calls == (ADD,)
    assert parse_llama3(
        ' <|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}'
    ).calls == (
        ADD,
        ToolCall(name="now"),
    )
    (broken,) = parse_llama3('{"name": "add", "parameters": {"a": 1').calls
    assert "not JSON" in broken.error
    first, second = parse_llama3('{"name": "add", "parameters": {"a": 1}} and so on').calls
    assert first == ADD
    assert second.error


def test_pattern_finds_calls_by_its_groups():
    parse = pattern_parser(compile_call_pattern(r"CALL (?P<name>\w+)\((?P<arguments>.*?)\)"))
    assert parse('so CALL add({"a": 1}) and CALL now()').calls == (ADD, ToolCall(name="now"))
    assert pattern_parser(compile_call_pattern(r"\[\[(?P<json>.*?)\]\]"))(
        '[[{"name": "add", "arguments": {"a": 1}}]]'
    ).calls == (ADD,)


def test_chat_template_suggests_the_format():
    assert (
        choose_parser("auto", tokenizer=ByteTokenizer("uses <tool_call> and <|python_tag|>").hf, tools=[])
        is parse_hermes
    )
    assert choose_parser("auto", tokenizer=ByteTokenizer("says <|python_tag|>").hf, tools=[]) is parse_llama3
    assert choose_parser("auto", tokenizer=ByteTokenizer("says nothing").hf, tools=[]) is parse_hermes


TEMPLATE = {
    "start_anchor": "<|assistant|>",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "[CALL]",
            "close": "[/CALL]",
            "content": "json",
            "repeats": True,
        },
    },
}


def test_response_template_of_the_tokenizer_or_of_a_file_is_followed(tmp_path):
    text = 'Hm.[CALL]{"name": "add", "arguments": {"a": 1}}[/CALL]'
    (tmp_path / "template.json").write_text(json.dumps(TEMPLATE))
    hf = ByteTokenizer().hf
    from_file = choose_parser(str(tmp_path / "template.json"), tokenizer=hf, tools=[])
    hf.response_template = TEMPLATE
    for parse in (
        from_file,
        choose_parser("native", tokenizer=hf, tools=[]),
        choose_parser("auto", tokenizer=hf, tools=[]),
    ):
        parsed = parse(text, before="<|user|>x<|end|>\n<|assistant|>")
        assert parsed.calls == (ADD,)
        assert parsed.content == "Hm."
        (broken,) = parse("[CALL]add[/CALL]", before="<|assistant|>").calls
        assert broken.error


@pytest.mark.parametrize(
    ("how", "message"),
    [("(", "regular expression"), ("CALL (.*)", "a group"), ("absent.json", "JSON file"), ("hermes2", "a group")],
)
def test_format_that_cannot_be_is_refused_by_name(how: str, message: str):
    with pytest.raises(ConfigError, match=re.escape("env.calls")) as caught:
        verify_call_format(how)
    assert message in str(caught.value)


def test_native_needs_a_response_template():
    with pytest.raises(ConfigError, match="no response template"):
        choose_parser("native", tokenizer=ByteTokenizer().hf, tools=[])
