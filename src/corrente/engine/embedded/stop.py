"""When a sequence is over by what it says: stop token ids, and stop strings in the decoded text of the generated tokens.

Text is decoded piece by piece: a piece is settled once it does not end inside a multi-byte character, so each token costs the
decoding of a few tokens and not of the whole sequence. Stop strings are found across token borders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Decode = Callable[[Sequence[int]], str]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "spiece.model")


def load_decoder(model: Path) -> Decode | None:
    """Token ids -> text without special tokens; None when the model directory holds no tokenizer."""
    if not any((model / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return decode


class StopStrings:
    """Watches one sequence. ``push`` each sampled token; it returns True once a stop string has appeared."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops, self._decode = tuple(stop for stop in stops if stop), decode
        self._reach = max((len(stop) for stop in self._stops), default=0)
        self._tokens: list[int] = []
        self._anchor = self._settled = 0
        self._text = ""

    def push(self, token: int) -> bool:
        self._tokens.append(token)
        known = self._decode(self._tokens[self._anchor : self._settled])
        now = self._decode(self._tokens[self._anchor :])
        if now.endswith("�") or len(now) <= len(known):
            return False
        searched = max(0, len(self._text) - self._reach + 1)
        self._text += now[len(known) :]
        self._anchor, self._settled = self._settled, len(self._tokens)
        return any(self._text.find(stop, searched) >= 0 for stop in self._stops)


def cut(text: str, stops: Sequence[str]) -> str:
    """``text`` before the first occurrence of any stop string."""
    found = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return text[: min(found)] if found else text
