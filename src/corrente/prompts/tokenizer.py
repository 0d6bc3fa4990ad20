"""Text to token ids and back, with the tokenizer in a model's folder. transformers is imported on first use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from corrente.errors import ConfigError
from corrente.models import pretrained


class Tokenizer:
    """Encodes raw text as the model was trained to read it: with one beginning-of-sequence token, if it has one."""

    def __init__(self, model: Path, *, trust_remote_code: bool = False) -> None:
        self.path, self._trust = model, trust_remote_code

    def encode(self, text: str) -> list[int]:
        bos = self.hf.bos_token
        begun = bool(bos) and text.startswith(bos)
        return list(self.hf.encode(text, add_special_tokens=not begun))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.hf.decode(list(map(int, tokens)), skip_special_tokens=True))

    @cached_property
    def hf(self) -> Any:
        """The transformers tokenizer; ConfigError when it cannot be loaded."""
        from transformers import AutoTokenizer  # heavy: only a run that really encodes pays for it

        try:
            return pretrained.load(AutoTokenizer, self.path, trust_remote_code=self._trust)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path = {self.path}: its tokenizer cannot be loaded: {error}") from error
