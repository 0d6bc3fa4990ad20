"""When a sequence is over by what it says: stop token ids, and stop strings in the decoded text of the generated tokens.

The text is without special tokens. A stop string that is one of them is found by its id, and so is the tokenizer's own end.

Text is decoded piece by piece: a piece is settled once it does not end inside a multi-byte character, so each token costs the
decoding of a few tokens and not of the whole sequence. Stop strings are found across token borders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from corrente.data.types import Sampling
from corrente.models import pretrained

Decode = Callable[[Sequence[int]], str]

_HALF = "\ufffd"
"""What a decoder gives for bytes that are no whole character yet."""
TAIL = 16
"""Tokens of what was written before that are followed one by one, so that the next is decoded as it would have been."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "spiece.model")


class Decoder:
    """Token ids -> text without special tokens, of a Hugging Face tokenizer; ``special``: their ids, ``end``: that of its
    end-of-sequence token."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {token.content: at for at, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special: Mapping[str, int] = added | dict(
            zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        )
        self.end = frozenset(() if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),))

    def __call__(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stop_ids(sampling: Sampling, decode: Decode | None) -> frozenset[int]:
    """Ids that end a completion besides those the model names: what is asked for, and what the tokenizer says."""
    asked = frozenset(sampling.stop_token_ids)
    if not isinstance(decode, Decoder):
        return asked
    return asked | decode.end | {decode.special[stop] for stop in sampling.stop if stop in decode.special}


def load_decoder(model: Path, *, trust_remote_code: bool = False) -> Decoder | None:
    """None when the model directory holds no tokenizer."""
    if not any((model / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    return Decoder(pretrained.load(AutoTokenizer, model, trust_remote_code=trust_remote_code))


class StopStrings:
    """Watches one sequence. ``push`` each sampled token; it returns True once a stop string has appeared."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops, self._decode = tuple(stop for stop in stops if stop), decode
        self._reach = max((len(stop) for stop in self._stops), default=0)
        self._tokens: list[int] = []
        self._anchor = self._settled = 0
        self._text = ""

    def catch_up(self, tokens: Sequence[int]) -> bool:
        """Be where pushing all of ``tokens``, the first of the sequence, leads to, but decode most of them at once."""
        head = max(0, len(tokens) - TAIL)
        while head and self._decode(tokens[:head]).endswith(_HALF):
            head -= 1
        self._tokens = list(tokens[:head])
        self._anchor, self._settled = max(0, head - TAIL), head
        self._text = self._decode(self._tokens)
        found = any(stop in self._text for stop in self._stops)
        for token in tokens[head:]:
            found |= self.push(token)
        return found

    def push(self, token: int) -> bool:
        """Take the next token; True once a stop string has appeared."""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._anchor : self._settled])
        now = self._decode(self._tokens[self._anchor :])
        if now.endswith(_HALF) or len(now) <= len(known):
            return False
        searched = max(0, len(self._text) - self._reach + 1)
        self._text += now[len(known) :]
        self._anchor, self._settled = self._settled, len(self._tokens)
        return any(self._text.find(stop, searched) >= 0 for stop in self._stops)


def cut(text: str, stops: Sequence[str]) -> str:
    """``text`` before the first occurrence of any stop string."""
    found = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return text[: min(found)] if found else text
