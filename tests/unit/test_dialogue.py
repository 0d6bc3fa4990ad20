"""Conversations in tokens: what was sampled stays as it was, what is new is encoded alone, and rewritten history forks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.talking import FORGETS, PLAIN, WITH_TOOLS, ByteTokenizer, said, sampled, voice

from corrente.algo.graph import rows
from corrente.data.types import Turn
from corrente.env.dialogue import Dialogue
from corrente.errors import RolloutError
from corrente.testing import samples

ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
ASK = {"role": "user", "content": "two and two?"}
MORE = {"role": "user", "content": "and three?"}


def begun(template: str = PLAIN, **how) -> tuple[Dialogue, list[Turn], ByteTokenizer]:
    tools = how.pop("tools", ())
    speaks, tokenizer = voice(template, tools=tools)
    turns: list[Turn] = []
    return Dialogue(speaks, turns, [ASK], **how), turns, tokenizer


def shown(tokenizer: ByteTokenizer, tokens: np.ndarray) -> str:
    return tokenizer.decode(tokens)


def test_next_context_is_what_was_sampled_and_what_the_template_adds():
    dialogue, turns, tokenizer = begun()
    first = said(tokenizer, "four")
    dialogue.add_sampled_turn(first)
    dialogue.add_messages([MORE])
    assert shown(tokenizer, dialogue.context) == (
        "<|user|>two and two?<|end|>\n<|assistant|>four<|end|>\n<|user|>and three?<|end|>\n<|assistant|>"
    )
    assert [turn.speaker for turn in turns] == ["user", "policy", "user"]
    assert [turn.parent for turn in turns] == [None, 0, 1]
    assert turns[1].completion is first
    assert turns[1].tokens is first.tokens
    assert np.array_equal(dialogue.context, np.concatenate([turn.tokens for turn in turns]))
    assert dialogue.forks == 0


def test_sampled_tokens_are_not_tokenised_again():
    """The policy spells "four" with tokens that no encoder would choose; they stay."""
    dialogue, turns, tokenizer = begun()
    odd = tokenizer.encode("<|user|>")[0]
    tokens = np.array([*tokenizer.encode("fo"), *tokenizer.encode("ur"), odd, *tokenizer.encode("<|end|>")], np.int32)
    dialogue.add_sampled_turn(sampled(tokens))
    dialogue.add_messages([MORE])
    assert dialogue.forks == 0
    at = len(dialogue.opening)
    assert np.array_equal(dialogue.context[at : at + len(tokens)], tokens)
    assert turns[1].tokens is tokens


def test_turn_without_an_end_token_is_given_the_template_s():
    dialogue, _, tokenizer = begun()
    dialogue.add_sampled_turn(said(tokenizer, "four.", end=""))
    dialogue.add_messages([MORE])
    assert "four.<|end|>\n<|user|>and" in shown(tokenizer, dialogue.context)


@pytest.mark.parametrize("history", ["rendered", "kept"])
def test_rewritten_history_forks_or_is_kept_as_the_config_says(history):
    dialogue, turns, tokenizer = begun(FORGETS, history=history)
    dialogue.add_sampled_turn(said(tokenizer, "<think>hm</think>four"))
    dialogue.add_messages([MORE])
    dialogue.add_sampled_turn(said(tokenizer, "seven"))
    text = shown(tokenizer, dialogue.context)
    if history == "rendered":
        assert dialogue.forks == 1
        assert "hm" not in text
        assert text.startswith(
            "<|user|>two and two?<|end|>\n<|assistant|>four<|end|>\n<|user|>and three?<|end|>\n<|assistant|>seven"
        )
        assert [turn.parent for turn in turns] == [None, 0, -1, 2]
    else:
        assert dialogue.forks == 0
        assert "<|assistant|><think>hm</think>four<|end|>\n<|user|>and three?<|end|>\n<|assistant|>seven" in text
        assert [turn.parent for turn in turns] == [None, 0, 1, 2]
    episode = samples.episode(turns=turns)
    made = rows(0, episode, advantages_T=np.ones(episode.sampled_tokens), oldest=None)
    assert sum(int(row.loss_mask.sum()) for row in made) == episode.sampled_tokens
    assert len(made) == (2 if history == "rendered" else 1)


def test_calls_in_the_policy_s_own_spelling_do_not_fork():
    """The template would print the call without the blanks; what the policy wrote is shown to it as it is."""
    dialogue, _, tokenizer = begun(WITH_TOOLS, tools=[ADD])
    spoken = dialogue.add_sampled_turn(
        said(tokenizer, '<tool_call>{ "name" : "add", "arguments" : {"a": 1} }</tool_call>')
    )
    assert [call.name for call in spoken.calls] == ["add"]
    assert spoken.message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    dialogue.add_messages([{"role": "tool", "name": "add", "content": "3"}])
    assert dialogue.forks == 0
    assert shown(tokenizer, dialogue.context).endswith("</tool_call><|end|>\n<|tool|>3<|end|>\n<|assistant|>")


def test_tools_a_template_does_not_show_are_described_in_a_system_message():
    dialogue, _, tokenizer = begun(PLAIN, tools=[ADD])
    opening = shown(tokenizer, dialogue.opening)
    assert opening.startswith("<|system|>")
    assert '"name": "add"' in opening
    dialogue.add_sampled_turn(said(tokenizer, '<tool_call>{"name": "add", "arguments": {}}</tool_call>'))
    dialogue.add_messages(
        [{"role": "tool", "name": "add", "content": "3"}, {"role": "tool", "name": "add", "content": "4"}]
    )
    answer = "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert shown(tokenizer, dialogue.context).endswith(f"<|user|>{answer}<|end|>\n<|assistant|>")
    assert dialogue.forks == 0


def test_dialogue_without_tools_finds_no_call():
    dialogue, _, tokenizer = begun(WITH_TOOLS)
    spoken = dialogue.add_sampled_turn(said(tokenizer, '<tool_call>{"name": "add", "arguments": {}}</tool_call>'))
    assert spoken.calls == ()
    assert spoken.message == {"role": "assistant", "content": '<tool_call>{"name": "add", "arguments": {}}</tool_call>'}


def test_prompt_that_is_rendered_alike_keeps_its_own_array():
    speaks, tokenizer = voice()
    tokens = np.array(tokenizer.encode("<|user|>two and two?<|end|>\n<|assistant|>"), np.int32)
    assert Dialogue(speaks, [], [ASK], tokens=tokens).opening is tokens


def test_answer_that_the_prompt_begins_is_one_turn_with_it():
    speaks, tokenizer = voice()
    turns: list[Turn] = []
    dialogue = Dialogue(speaks, turns, [ASK, {"role": "assistant", "content": "Let me see: "}])
    spoken = dialogue.add_sampled_turn(said(tokenizer, "four"))
    dialogue.add_messages([MORE])
    assert spoken.message["content"] == "four"
    assert dialogue.forks == 0
    assert "<|assistant|>Let me see: four<|end|>\n<|user|>and three?" in shown(tokenizer, dialogue.context)


def test_second_speaker_begins_a_graph_of_its_own():
    speaks, tokenizer = voice()
    turns: list[Turn] = []
    one = Dialogue(speaks, turns, [ASK], speaker="x")
    one.add_sampled_turn(said(tokenizer, "four"))
    other = Dialogue(speaks, turns, [MORE], speaker="o")
    other.add_sampled_turn(said(tokenizer, "seven"))
    assert [(turn.speaker, turn.parent) for turn in turns] == [("user", None), ("x", 0), ("user", -1), ("o", 2)]


def test_template_that_shows_nothing_of_what_was_said_cannot_keep_it():
    template = PLAIN.replace("{{ m.content }}", "{% if m.role != 'assistant' %}{{ m.content }}{% endif %}")
    dialogue, _, tokenizer = begun(template, history="kept")
    dialogue.add_sampled_turn(said(tokenizer, "four"))
    with pytest.raises(RolloutError, match="kept"):
        dialogue.add_messages([MORE])


SPECIAL = ["<think>hm</think>ok", " <think>a</think>\n b", "x<|end|>y", "<|user|>", "é漢🙂 "]
WORDS = st.one_of(st.text(st.sampled_from("ab \n</é漢🙂"), max_size=12), st.sampled_from(SPECIAL))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([PLAIN, FORGETS]),
    st.lists(st.tuples(WORDS, st.booleans(), WORDS), min_size=1, max_size=4),
    st.booleans(),
)
def test_dialogue_trains_every_sampled_token_once_after_its_own_context(template, talk, kept):
    dialogue, turns, tokenizer = begun(template, history="kept" if kept else "rendered")
    contexts: list[np.ndarray] = []
    for text, ended, answer in talk:
        contexts.append(dialogue.context)
        dialogue.add_sampled_turn(said(tokenizer, text, end="<|end|>" if ended else ""))
        dialogue.add_messages([{"role": "user", "content": answer}])
    episode = samples.episode(turns=turns)
    numbered = np.arange(1.0, episode.sampled_tokens + 1)
    made = rows(0, episode, advantages_T=numbered, oldest=None)
    trained = np.concatenate([row.advantages[row.loss_mask] for row in made]) if made else np.empty(0)
    assert sorted(trained.tolist()) == numbered.tolist()
    sampled = [turn.completion for turn in turns if turn.completion is not None]
    at = 1.0
    for context, completion in zip(contexts, sampled, strict=True):
        if len(completion.tokens):
            row = next(row for row in made if at in row.advantages[row.loss_mask])
            start = int(np.flatnonzero(row.advantages == np.float32(at))[0])
            assert np.array_equal(row.tokens[:start], context)
            assert np.array_equal(row.tokens[start : start + len(completion.tokens)], completion.tokens)
        at += len(completion.tokens)
