"""What a model writes ends no run: every parser of calls, the conversation, its tools, checkpoints and sinks take any text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.chat_tokenizers import WITH_TOOLS, chat_renderer

from corrente.common import serialization
from corrente.common.plain_data import MAX_NESTING
from corrente.common.threads import call_inline
from corrente.data.types import Episode
from corrente.env.calls import ParsedTurn, native_parser, parse_hermes, parse_llama3, pattern_parser
from corrente.env.dialogue import Dialogue
from corrente.env.tools import Toolbox
from corrente.observe.fanout import Fanout
from corrente.observe.jsonl import JsonlSink, read_lines
from corrente.observe.trackers import SampleTable
from corrente.score.calling import conversation_messages
from corrente.testing import samples

HALF = '"\\ud83d"'
BRACKETS = "[" * 5000
CLOSED = "[" * 5000 + "]" * 5000
LONG = "9" * 25
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON_PIECES = (
    TEXTS.map(json.dumps)
    | st.sampled_from(
        ['"name"', '"arguments"', '"parameters"', '"function"', '"echo"', "null", "NaN", "-Infinity", "1e999"]
    )
    | st.sampled_from([HALF, '"\\u0000"', BRACKETS, CLOSED, LONG, "9" * 5000, f"-{LONG}", '"\\udc00\\ud83d"', "\\"])
    | st.sampled_from(list('{}[]:,; "'))
)
ARGUMENTS = st.recursive(
    st.sampled_from([HALF, LONG, CLOSED, "NaN", "null", '"\\u0000"', "1e999", "0", '"x"']),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
        | st.dictionaries(st.sampled_from([HALF, '"a"', '"self"', '""', '"function"']), inner, max_size=3).map(
            lambda items: "{" + ",".join(f"{key}:{value}" for key, value in items.items()) + "}"
        )
    ),
)
NAMES = st.sampled_from(['"echo"', HALF, '""', '"name"', LONG, "null", '"<tool_call>"', '"a\\nb"'])
CALLS = st.builds(lambda name, key, arguments: f'{{"name": {name}, "{key}": {arguments}}}', NAMES, st.sampled_from(
    ["arguments", "parameters"]), ARGUMENTS)  # fmt: skip
WRITTEN = (
    TEXTS
    | st.lists(JSON_PIECES, max_size=12).map("".join)
    | CALLS
    | CALLS.map(lambda call: f"<tool_call>{call}</tool_call>")
    | CALLS.map(lambda call: f"<|python_tag|>{call}; {call}")
    | CALLS.map(lambda call: f'<tool_call>{{"function": {call}}}')
    | CALLS.map(lambda call: json.dumps({"name": "echo", "arguments": call}))
    | CALLS.map(lambda call: f"{call}{BRACKETS}")
)


def _response(text: str, before: str) -> Mapping[str, Any]:
    """As a response template of transformers answers, with what was written in every place."""
    found = json.loads(text)
    return {"content": found, "tool_calls": found if isinstance(found, list) else [found, {"function": found}]}


PARSERS: dict[str, Callable[..., ParsedTurn]] = {
    "hermes": parse_hermes,
    "llama3": parse_llama3,
    "native": native_parser(_response),
    "pattern": pattern_parser(re.compile(r"(?P<name>\w+)\((?P<arguments>.*)\)|(?P<json>\{.*\})", re.DOTALL)),
}


def echo(**anything: Any) -> Any:
    """A tool that answers with what it is given."""
    return anything


def check_turn(parse: Callable[..., ParsedTurn], text: str, folder: Path) -> None:
    """Take ``text`` through a conversation with a tool, a checkpoint and the sinks of a run."""
    renderer, tokenizer = chat_renderer(WITH_TOOLS, tools=[{"type": "function", "function": {"name": "echo"}}])
    renderer.parse_text = parse  # type: ignore[misc]
    turns: list[Any] = []
    dialogue = Dialogue(renderer, turns, [{"role": "user", "content": "?"}])
    sampled = dialogue.add_sampled_turn(tokenizer.completion(text))
    box = Toolbox([echo], offload=call_inline, deadline_s=5)
    answers, counts = anyio.run(box.call_all, sampled.calls)
    assert counts["calls"] == len(sampled.calls) == len(answers)
    dialogue.add_messages(answers or [{"role": "user", "content": "go on"}])
    messages = (sampled.message, *answers)
    episode = Episode(
        prompt_id="0/0", group_id=0, index=0, turns=tuple(turns), messages=messages, extra={"saw": messages}
    )
    back = serialization.decode(serialization.encode(episode), Episode)
    assert repr(back.messages) == repr(episode.messages)
    shown = {"completion": text, "messages": conversation_messages(samples.prompt(), back), "extra": back.extra}
    table = SampleTable()
    table.add_sample(1, shown)
    for row in table.take_rows()[1]:
        repr(row)
    sink = JsonlSink(folder)
    fanout = Fanout([sink])
    fanout.log_sample(1, shown)
    fanout.log_event("warning", sampled.calls[0].error if sampled.calls else text)
    assert not fanout.failed
    fanout.close()
    assert sum(1 for _ in read_lines(folder / "samples.jsonl")) == 1
    (folder / "samples.jsonl").unlink()


@pytest.mark.parametrize("format_", PARSERS)
@given(text=WRITTEN)
@example(text=f'<tool_call>{{"name": {HALF}, "arguments": {{{HALF}: {HALF}}}}}</tool_call>')
@example(text=f'<tool_call>{{"name": "echo", "arguments": {{"a": {LONG}}}}}</tool_call>')
@example(text=f'<tool_call>{{"name": "echo", "arguments": {{"a": {CLOSED}}}}}</tool_call>')
@example(text=f"<tool_call>{BRACKETS}</tool_call>")
@example(text=f'{{"name": "echo", "parameters": {{"a": {BRACKETS}')
@example(text=f'{{"name": "echo", "arguments": {json.dumps(CLOSED)}}}')
@example(text='{"name": "echo", "arguments": {"a": ' + "[" * 90 + "]" * 90 + "}}")
def test_what_a_model_writes_goes_through_parser_tools_checkpoint_and_sinks(
    format_: str, text: str, tmp_path_factory: pytest.TempPathFactory
):
    check_turn(PARSERS[format_], text, tmp_path_factory.mktemp("run"))


def test_arguments_that_are_nested_too_deeply_are_a_call_with_an_error():
    for text in (CLOSED, "[" * (MAX_NESTING + 1) + "]" * (MAX_NESTING + 1), BRACKETS):
        (call,) = parse_hermes(f'<tool_call>{{"name": "echo", "arguments": {{"a": {text}}}}}</tool_call>').calls
        assert call.error


def test_arguments_keep_long_integers_and_lose_halves_of_surrogate_pairs():
    (call,) = parse_hermes(
        f'<tool_call>{{"name": "echo", "arguments": {{"a": {LONG}, "b": {HALF}}}}}</tool_call>'
    ).calls
    assert call.arguments == {"a": int(LONG), "b": "\ufffd"}


def test_answer_of_a_tool_may_be_any_text():
    def odd(kind: str) -> Any:
        """A tool that answers badly."""
        if kind == "raises":
            raise ValueError("half \ud83d")
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        return {"half": "half \ud83d", "deep": deep}[kind]

    box = Toolbox([odd], offload=call_inline, deadline_s=5)
    calls = [parse_hermes(f'<tool_call>{{"name": "odd", "arguments": {{"kind": "{k}"}}}}</tool_call>').calls[0] for k in
             ("raises", "half", "deep")]  # fmt: skip
    answers, counts = anyio.run(box.call_all, calls)
    for answer in answers:
        answer["content"].encode()
    assert counts["raised"] == 2
