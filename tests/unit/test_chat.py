"""Conversations reach the engine as the model's chat template renders them: its ids, its system prompt, its switches, its tools.

The templates are small reproductions of what those of SmolLM2, Qwen3 and Llama 3 do; the tokenizer spells bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from corrente import config as c
from corrente.data.types import Completion, Request, Sampling
from corrente.env.single import SingleTurnEnv
from corrente.errors import ConfigError, RolloutError
from corrente.prompts.build import build
from corrente.prompts.chat import ChatTemplate, conversation, read_template
from corrente.prompts.tokenizer import Tokenizer
from corrente.testing import samples

pytestmark = pytest.mark.slow

SMOLLM2 = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are small.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
QWEN3 = """{% if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
LLAMA3 = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('who is ' + message['role']) }}{% endif %}
{{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}"""
TEMPLATES = {"smollm2": SMOLLM2, "qwen3": QWEN3, "llama3": LLAMA3}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]
ASKED = [{"role": "user", "content": "1 + 1?"}]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One of them.
        b: The other.
    """
    return a + b


def write_tokenizer(folder: Path, template: str = "") -> Path:
    """A tokenizer of bytes that puts <s> before what it encodes, as many do."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({"<s>": 0, "</s>": 1, **{c: i + 2 for i, c in enumerate(letters)}}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(params=TEMPLATES)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path, TEMPLATES[request.param]))


def _of(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """What transformers itself makes of a conversation."""
    given = {"add_generation_prompt": True, **options}
    return list(tokenizer.hf.apply_chat_template(messages, tokenize=True, return_dict=True, **given)["input_ids"])


def _asked_of_the_engine(row: dict[str, Any], tokenizer: Tokenizer, chat: c.Chat) -> list[int]:
    """The ids of the request that a row of a dataset ends in."""
    asked: list[Request] = []

    async def generate(request: Request) -> Completion:
        asked.append(request)
        return samples.completion()

    config = c.RunConfig(prompts=c.GivenRows(), chat=chat)
    prompts = build(config, tokenizer.encode, chat=ChatTemplate(tokenizer, chat), brought=[row])
    prompt = prompts.next()
    assert prompt is not None
    anyio.run(lambda: SingleTurnEnv(Sampling()).play(prompt, generate, key="0", group="0", seed=0))
    return asked[0].tokens.tolist()


def test_engine_reads_a_conversation_as_its_template_says(tokenizer: Tokenizer):
    told = [{"role": "system", "content": "Be brief."}, *ASKED]
    for messages in (ASKED, told, [*told, {"role": "assistant", "content": "2"}, {"role": "user", "content": "Sure?"}]):
        assert _asked_of_the_engine({"prompt": messages}, tokenizer, c.Chat()) == _of(tokenizer, messages)


def test_engine_reads_plain_text_as_the_tokenizer_encodes_it(tokenizer: Tokenizer):
    expected = list(tokenizer.hf("1 + 1 =")["input_ids"])
    assert expected[0] == 0
    assert _asked_of_the_engine({"prompt": "1 + 1 ="}, tokenizer, c.Chat()) == expected


def test_switches_of_a_template_reach_it(tmp_path: Path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path, QWEN3))
    off = c.Chat(template_kwargs={"enable_thinking": False})
    ids = _asked_of_the_engine({"prompt": ASKED}, tokenizer, off)
    assert ids == _of(tokenizer, ASKED, enable_thinking=False)
    assert tokenizer.decode(ids).endswith("<think>\n\n</think>\n\n")
    assert not tokenizer.decode(_of(tokenizer, ASKED)).endswith("</think>\n\n")


def test_system_message_is_added_where_a_conversation_has_none(tokenizer: Tokenizer):
    system = {"role": "system", "content": "Be brief."}
    chat = c.Chat(system="Be brief.")
    own = [{"role": "system", "content": "Be long."}, *ASKED]
    assert _asked_of_the_engine({"prompt": ASKED}, tokenizer, chat) == _of(tokenizer, [system, *ASKED])
    assert _asked_of_the_engine({"prompt": own}, tokenizer, chat) == _of(tokenizer, own)


def test_answer_that_is_begun_is_left_open(tokenizer: Tokenizer):
    begun = [*ASKED, {"role": "assistant", "content": "It is"}]
    ids = _asked_of_the_engine({"prompt": begun}, tokenizer, c.Chat())
    assert ids == _of(tokenizer, begun, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(ids).endswith("It is")


def test_tools_are_offered_where_the_template_knows_them(tmp_path: Path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path, QWEN3))
    offering = ChatTemplate(tokenizer, c.Chat(), tools=[add])
    text, ids = offering.prompt(ASKED)
    assert ids == _of(tokenizer, ASKED, tools=[add])
    assert '"name": "add"' in text
    assert ChatTemplate(tokenizer, c.Chat()).prompt(ASKED, tools=[add]) == (text, ids)
    assert "Tools" not in ChatTemplate(tokenizer, c.Chat()).render(ASKED)
    assert "Tools" not in offering.render(ASKED, tools=())


def test_template_that_is_given_replaces_the_models_own(tmp_path: Path):
    plain = tmp_path / "plain.jinja"
    plain.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    tokenizer = Tokenizer(write_tokenizer(tmp_path, SMOLLM2))
    for template in (str(plain), plain.read_text()):
        assert ChatTemplate(tokenizer, c.Chat(template=template)).render(ASKED) == "[1 + 1?]"


def test_model_without_a_template_is_refused_with_the_key(tmp_path: Path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    with pytest.raises(ConfigError, match=r"chat\.template is empty, and the tokenizer of .* has no chat template"):
        _asked_of_the_engine({"prompt": ASKED}, tokenizer, c.Chat())
    assert _asked_of_the_engine({"prompt": "1"}, tokenizer, c.Chat()), "plain text needs none"


def test_messages_that_a_template_refuses_are_refused_with_their_row(tmp_path: Path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path, LLAMA3))
    messages = [{"role": "wizard", "content": "?"}]
    with pytest.raises(RolloutError, match="who is wizard"):
        ChatTemplate(tokenizer, c.Chat()).render(messages)
    with pytest.raises(ConfigError, match=r"row 0/0: the chat template refuses the messages: .*who is wizard"):
        _asked_of_the_engine({"prompt": messages}, tokenizer, c.Chat())


def test_template_that_is_no_file_is_refused():
    with pytest.raises(
        ConfigError, match=r"chat\.template = 'nowhere\.jinja': it must be a file with a Jinja template"
    ):
        read_template("nowhere.jinja")


@pytest.mark.parametrize("value", [None, "text", [], [1], [{"content": "no role"}], {"role": "user"}, [{"role": 1}]])
def test_conversation_is_a_list_of_messages_and_nothing_else(value: Any):
    assert conversation(value) is None


def test_keys_that_hold_nothing_are_left_out_of_messages():
    """Arrow gives every message the keys of all."""
    assert conversation([{"role": "user", "content": "1", "tool_calls": None}]) == ({"role": "user", "content": "1"},)
    assert json.dumps(conversation(ASKED)) == json.dumps(ASKED)
