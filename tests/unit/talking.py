"""A tokenizer of bytes with chat templates of its own, and completions made of text: for conversations without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from corrente.config import Chat
from corrente.data.types import Completion
from corrente.env.chat_renderer import ChatRenderer
from corrente.prompts.chat import ChatTemplate
from corrente.testing import samples

END = "<|end|>"

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Every role alike, and no word of tools."""

WITH_TOOLS = (
    "{% if tools %}<|tools|>{{ tools | tojson }}<tool_call><|end|>\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Shows tools and calls, the latter in a spelling of its own."""

FORGETS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Takes the thinking out of what was said before the last message of the user."""


class ByteTokenizer:
    """What prompts/tokenizer.py is, without a directory."""

    path = Path("bytes")

    def __init__(self, template: str = PLAIN) -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        bytes_of = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
        bytes_of.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bytes_of.decoder = decoders.ByteLevel()
        self.hf: Any = PreTrainedTokenizerFast(
            tokenizer_object=bytes_of, eos_token=END, clean_up_tokenization_spaces=False
        )
        self.hf.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|tool|>"]})
        self.hf.chat_template = template

    def encode(self, text: str) -> list[int]:
        return list(self.hf.encode(text, add_special_tokens=False))

    def decode(self, tokens: Any) -> str:
        return str(self.hf.decode([int(token) for token in tokens]))


def voice(template: str = PLAIN, **how: Any) -> tuple[ChatRenderer, ByteTokenizer]:
    tokenizer = ByteTokenizer(template)
    return ChatRenderer(ChatTemplate(tokenizer, Chat()), tokenizer, **how), tokenizer  # type: ignore[arg-type]


def said(tokenizer: ByteTokenizer, text: str, *, end: str = END, finish: Any = "stop", version: int = 0) -> Completion:
    """A completion that says ``text``."""
    tokens = np.array(tokenizer.encode(text + end), np.int32)
    return sampled(tokens, finish=finish, version=version, text=text)


def sampled(tokens: Any, *, finish: Any = "stop", version: int = 0, text: str = "") -> Completion:
    return samples.completion(tokens=tokens, versions=version, finish_reason=finish, text=text)


class CharTokenizer:
    """Every id is one letter: what a virtual engine says, whose ids are numbers without a meaning. Chat and tokenizer in one."""

    all_special_ids: tuple[int, ...] = ()
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    chat_template = ""
    first = 0x20000

    @property
    def hf(self) -> CharTokenizer:
        return self

    def decode(self, ids: Any, **how: Any) -> str:
        return "".join(chr(self.first + int(i)) for i in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(self.first + token)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - self.first if ord(letter) >= self.first else ord(letter) for letter in text]

    def render(self, messages: Any, *, tools: Any = None, generation: bool = True) -> str:
        shown = "".join(f"{m['role'][0]}{m['content']}." for m in messages)
        return shown + ("a" if generation else "")

    def prompt(self, messages: Any, *, tools: Any = None) -> tuple[str, list[int]]:
        text = self.render(messages)
        return text, self.encode(text)
