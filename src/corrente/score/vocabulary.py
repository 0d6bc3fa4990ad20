"""Compares a teacher's vocabulary with the policy's. Imports transformers on use only, and no torch."""

from __future__ import annotations

from typing import Any

from corrente.errors import ConfigError


def check_same_vocabulary(policy: str, teacher: str) -> None:
    """Raise ConfigError unless the tokenizers in these two directories are the same map from tokens to ids."""
    from transformers import AutoTokenizer

    try:
        ours, theirs = (AutoTokenizer.from_pretrained(path, local_files_only=True) for path in (policy, teacher))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{teacher} has no tokenizer to be compared with the policy's: {error}") from error
    if difference := vocabulary_difference(ours, theirs):
        raise ConfigError(f"{teacher} does not read the policy's tokens: {difference}")


def vocabulary_difference(one: Any, other: Any) -> str:
    """Describe the difference of two tokenizers: the first token that differs, or the token that begins or ends a text; empty
    when they agree. A policy that ends its texts with another token would learn from its teacher never to end."""
    ours, theirs = one.get_vocab(), other.get_vocab()
    for name in ("bos_token", "eos_token"):
        if getattr(one, name) != getattr(other, name):
            return f"its {name} is {getattr(other, name)!r}, the policy's {getattr(one, name)!r}"
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            return f"{token!r} is {number} there, and {theirs.get(token, 'unknown')} here"
    extra = len(theirs) - len(ours)
    return f"it has {extra} tokens more" if extra > 0 else ""
