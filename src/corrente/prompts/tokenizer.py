"""Text to token ids and back, with the tokenizer in a model's folder. transformers is imported on first use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from corrente.common.plain_data import plain_text
from corrente.errors import ConfigError
from corrente.models import pretrained


class Tokenizer:
    """Encodes raw text as the model was trained to read it: with one beginning-of-sequence token, if it has one."""

    def __init__(self, model: Path, *, trust_remote_code: bool = False) -> None:
        self.path, self._trust = model, trust_remote_code

    def encode(self, text: str) -> list[int]:
        """The ids of raw text, as a beginning: what the tokenizer adds after a text is left out."""
        text, bos = plain_text(text), self.hf.bos_token
        if bos and text.startswith(bos):
            return list(self.hf.encode(text, add_special_tokens=False))
        ids = list(self.hf.encode(text, add_special_tokens=True))
        return ids[: len(ids) - self._added_after] if self._added_after else ids

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.hf.decode(list(map(int, tokens)), skip_special_tokens=True))

    @cached_property
    def _added_after(self) -> int:
        """The number of special tokens that the tokenizer adds after a text, such as the end of a sequence."""
        plain, full = (list(self.hf.encode("a", add_special_tokens=added)) for added in (False, True))
        starts = (at for at in range(len(full) - len(plain) + 1) if full[at : at + len(plain)] == plain)
        start = next(starts, None)
        return 0 if start is None or not plain else len(full) - start - len(plain)

    @cached_property
    def hf(self) -> Any:
        """The transformers tokenizer; ConfigError when it cannot be loaded."""
        from transformers import AutoTokenizer  # heavy: only a run that really encodes pays for it

        try:
            return pretrained.load(AutoTokenizer, self.path, trust_remote_code=self._trust)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path = {self.path}: its tokenizer cannot be loaded: {error}") from error
