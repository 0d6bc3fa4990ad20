"""Stop conditions of a completion: stop token ids, and stop strings in the decoded text.

The text has no special tokens. A stop string that is a special token is found by its id, and so is the tokenizer's
end-of-sequence token.

Text is decoded in pieces, and a piece is final once it does not end inside a multi-byte character. So each token costs the
decoding of a few tokens and not of the whole sequence. Stop strings are found across token borders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from corrente.data.types import Sampling
from corrente.models import pretrained

Decode = Callable[[Sequence[int]], str]

_INCOMPLETE_CHARACTER = "\ufffd"
"""A decoder returns this character for bytes that are not a whole character yet."""
REPLAYED_TOKENS = 16
"""The number of earlier tokens that a resumed request replays one by one, so that the next one decodes as it would have."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "spiece.model")


class Decoder:
    """Decodes token ids to text without special tokens, with a Hugging Face tokenizer.

    ``special``: the ids of the special tokens by their text. ``end``: the id of the end-of-sequence token, or empty.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {token.content: at for at, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special: Mapping[str, int] = added | dict(
            zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        )
        self.end = frozenset(() if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),))

    def __call__(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def request_stop_ids(sampling: Sampling, decode: Decode | None) -> frozenset[int]:
    """The ids that end a completion besides those of the model: those the request names, and those of the tokenizer."""
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
    """Finds stop strings in the text of one sequence, token by token."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops, self._decode = tuple(stop for stop in stops if stop), decode
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._tokens: list[int] = []
        self._anchor = self._settled = 0
        self._text = ""

    def push_all(self, tokens: Sequence[int]) -> bool:
        """Push the first tokens of the sequence, but decode most of them at once; True if a stop string has appeared."""
        head = max(0, len(tokens) - REPLAYED_TOKENS)
        while head and self._decode(tokens[:head]).endswith(_INCOMPLETE_CHARACTER):
            head -= 1
        self._tokens = list(tokens[:head])
        self._anchor, self._settled = max(0, head - REPLAYED_TOKENS), head
        self._text = self._decode(self._tokens)
        found = any(stop in self._text for stop in self._stops)
        for token in tokens[head:]:
            found |= self.push_token(token)
        return found

    def push_token(self, token: int) -> bool:
        """Add the next token; True if it completes a stop string."""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._anchor : self._settled])
        now = self._decode(self._tokens[self._anchor :])
        if now.endswith(_INCOMPLETE_CHARACTER) or len(now) <= len(known):
            return False
        searched = max(0, len(self._text) - self._longest + 1)
        self._text += now[len(known) :]
        self._anchor, self._settled = self._settled, len(self._tokens)
        return any(self._text.find(stop, searched) >= 0 for stop in self._stops)


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The part of ``text`` before the first occurrence of any stop string."""
    found = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return text[: min(found)] if found else text
