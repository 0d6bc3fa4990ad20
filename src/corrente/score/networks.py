"""The models behind ``models``, in their own process. It is the only file of this folder that needs torch.

    reward_model      a sequence classifier     prompt + completion, or as a chat      -> one logit
    process_model     a token classifier        prompt, then step, separator, ...      -> a score where each separator ends
    teacher           a causal LM               token ids                              -> log-probs of tokens[1:], the likeliest

Texts longer than the model can read are refused, never cut. Batches are padded on the right, for sequence classifiers by a token
that does not occur in them where the tokenizer's own pad token does: some find the end of a text by its first pad token.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from corrente.errors import ConfigError
from corrente.score import messages, vocabulary
from corrente.score.messages import Opinion, Sample, Step

Respond = Callable[[messages.Question], messages.Answer]
Encoded = tuple[list[int], str]
"""Token ids, and the reason where there are none."""

NO_LIMIT = 1 << 30


def reward_model(*, path: str, dtype: str, chat: bool | str, label: int) -> Respond:
    """The role of a sequence classifier. With ``chat``, a tokenizer that has a chat template renders prompt and completion as a
    user's and an assistant's message, or if it is "given" only where they are messages; without, and where there is none, they
    are joined as they are, if it is "given" without special tokens."""
    from transformers import AutoModelForSequenceClassification

    model, tokenizer = _load_scoring_model(AutoModelForSequenceClassification, path, dtype)
    if not 0 <= label < model.config.num_labels:
        raise ConfigError(f"label = {label}: {path} has {model.config.num_labels} labels, the first is 0")
    given, chat = chat == "given", bool(chat and getattr(tokenizer, "chat_template", None))

    def encode(sample: Sample) -> list[int]:
        if not chat or (given and not sample.messages):
            return list(tokenizer(sample.prompt + sample.completion, add_special_tokens=not given).input_ids)
        pair = [{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": sample.completion}]
        said = sample.messages or pair
        return list(tokenizer(tokenizer.apply_chat_template(said, tokenize=False), add_special_tokens=False).input_ids)

    def judge(texts: list[list[int]], samples: list[Sample]) -> list[Opinion]:
        config = model.config.get_text_config()
        filler = _unused_token(texts, tokenizer.pad_token_id, vocabulary=config.vocab_size)
        if filler is None and len(texts) > 1:
            return [opinion for text in texts for opinion in judge([text], samples)]
        config.pad_token_id = config.vocab_size if filler is None else filler
        ids, mask = _pad_batch(texts, filler or 0)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, label].float()
        return [Opinion(score=value) for value in logits.tolist()]

    return _make_role(encode, judge, limit=_position_limit(model))


def process_model(*, path: str, dtype: str, tokenizer: str, delimiter: str, separator: str, label: int) -> Respond:
    """The role of a token classifier, prompted as TRL's PRMTrainer trains it: the prompt, then each step followed by
    ``separator``; the score of a step is the probability of ``label`` where its separator ends (of a single label: its sigmoid).

    Steps are what ``delimiter``, a regular expression, splits a completion into. ``tokenizer`` is the policy's: it tells which
    of the completion's tokens a step is made of.
    """
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    model, own = _load_scoring_model(AutoModelForTokenClassification, path, dtype)
    if not 0 <= label < model.config.num_labels:
        raise ConfigError(f"label = {label}: {path} has {model.config.num_labels} labels, the first is 0")
    policy = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    begin = [own.bos_token_id] if own.bos_token_id is not None else []
    mark = own(separator, add_special_tokens=False).input_ids
    if not mark:
        raise ConfigError(f"separator = {separator!r}: it is no token of {path}")
    ends: dict[int, tuple[list[tuple[int, int]], list[int]]] = {}

    def encode(sample: Sample) -> list[int]:
        ids = begin + list(own(sample.prompt, add_special_tokens=False).input_ids)
        pieces = split_steps(sample.completion, delimiter)
        places: list[int] = []
        for start, stop in pieces:
            ids += [*own(sample.completion[start:stop], add_special_tokens=False).input_ids, *mark]
            places.append(len(ids) - 1)
        spans = token_spans(sample.tokens, pieces, lambda tokens: policy.decode(tokens, skip_special_tokens=True))
        ends[id(sample)] = (spans, places)
        return ids

    def judge(texts: list[list[int]], samples: list[Sample]) -> list[Opinion]:
        ids, mask = _pad_batch(texts, own.pad_token_id or 0)
        logits = model(input_ids=ids, attention_mask=mask).logits.float()
        good = logits[..., 0].sigmoid() if logits.shape[-1] == 1 else logits.softmax(-1)[..., label]
        opinions: list[Opinion] = []
        for row, sample in enumerate(samples):
            spans, places = ends.pop(id(sample))
            steps = [Step(*span, float(good[row, at])) for span, at in zip(spans, places, strict=True)]
            opinions.append(Opinion(steps=steps))
        ends.clear()  # those of refused samples are left
        return opinions

    return _make_role(encode, judge, limit=_position_limit(model))


def teacher(*, path: str, dtype: str, tokenizer: str, temperature: float = 1.0) -> Respond:
    """The role of a causal LM. ConfigError when it does not read the vocabulary of ``tokenizer``, the policy's; that is found
    before its weights are loaded."""
    from transformers import AutoModelForCausalLM

    if tokenizer:
        vocabulary.check_same_vocabulary(tokenizer, path)
    model, own = _load_scoring_model(AutoModelForCausalLM, path, dtype)

    def answer(question: messages.Question) -> messages.Answer:
        assert isinstance(question, messages.Judge)

        def judge(texts: list[list[int]], samples: list[Sample]) -> list[Opinion]:
            ids, mask = _pad_batch(texts, own.pad_token_id or 0)
            logits = model(input_ids=ids, attention_mask=mask).logits
            return [
                _teacher_opinion(logits[row, : len(text)] / temperature, text, question.top)
                for row, text in enumerate(texts)
            ]

        return _make_role(lambda sample: sample.tokens, judge, limit=_position_limit(model))(question)

    return answer


def _teacher_opinion(logits: torch.Tensor, text: list[int], top: int) -> Opinion:
    logprobs = logits[:-1].float().log_softmax(-1)
    taken = logprobs.gather(-1, torch.tensor(text[1:]).unsqueeze(-1)).squeeze(-1)
    likeliest = logprobs.topk(top) if top else None
    return Opinion(
        logprobs=taken.tolist(),
        top_ids=likeliest.indices.tolist() if likeliest else [],
        top_logprobs=likeliest.values.tolist() if likeliest else [],
    )


def _make_role(
    encode: Callable[[Sample], list[int]],
    judge: Callable[[list[list[int]], list[Sample]], list[Opinion]],
    *,
    limit: int,
) -> Respond:
    """Make a role that scores the samples that fit into the model, and refuses the others with a reason."""

    @torch.inference_mode()
    def answer(question: messages.Question) -> messages.Answer:
        assert isinstance(question, messages.Judge)
        texts = [encode(sample) for sample in question.samples]
        refused = [_refusal(len(text), limit) for text in texts]
        fit = [at for at, why in enumerate(refused) if not why]
        judged = judge([texts[at] for at in fit], [question.samples[at] for at in fit]) if fit else []
        opinions = iter(judged)
        return messages.Judged(opinions=[Opinion(error=why) if why else next(opinions) for why in refused])

    return answer


def _refusal(length: int, limit: int) -> str:
    if not length:
        return "there is nothing to judge: prompt and completion are empty"
    return f"{length} tokens, and the model reads at most {limit}" if length > limit else ""


def _load_scoring_model(kind: Any, path: str, dtype: str) -> tuple[Any, Any]:
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_bars

    transformers_bars.disable_progress_bar()
    if not Path(path).is_dir():
        raise ConfigError(f"{path} is not a directory with a model")
    try:
        model, notes = kind.from_pretrained(
            path, dtype=getattr(torch, dtype), local_files_only=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{path} cannot be loaded as {kind.__name__.removeprefix('AutoModelFor')}: {error}"
        ) from error
    if missing := sorted(notes["missing_keys"]):
        raise ConfigError(f"{path} has no weights for {missing[0]}: it was not trained as {kind.__name__[12:]}")
    return model.eval().requires_grad_(False), tokenizer


def _position_limit(model: Any) -> int:
    config = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or NO_LIMIT)


def _pad_batch(texts: Sequence[list[int]], filler: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad texts on the right. Returns ids and attention mask (B, L)."""
    longest = max(len(text) for text in texts)
    ids = torch.full((len(texts), longest), filler)
    mask = torch.zeros((len(texts), longest), dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = 1
    return ids, mask


def _unused_token(texts: Sequence[list[int]], pad: int | None, *, vocabulary: int) -> int | None:
    """Find a token that occurs in no text: ``pad`` if possible, else the smallest; None when all are used."""
    used = {token for text in texts for token in text}
    candidates = (token for token in (pad, *range(vocabulary)) if token is not None and token not in used)
    return next(candidates, None)


def split_steps(text: str, delimiter: str) -> list[tuple[int, int]]:
    """Character spans of the steps of a text: the parts between matches of ``delimiter`` that are not blank."""
    bounds = [0, *(place for found in re.finditer(delimiter, text) for place in found.span()), len(text)]
    pieces = list(zip(bounds[::2], bounds[1::2], strict=True))
    return [(start, stop) for start, stop in pieces if text[start:stop].strip()]


def token_spans(
    tokens: list[int], pieces: Sequence[tuple[int, int]], decode: Callable[[list[int]], str]
) -> list[tuple[int, int]]:
    """Tokens [start, stop) of each piece. Together they cover all tokens: what separates two pieces belongs to the first, what
    comes before the first piece to it, and what comes after the last, an end-of-sequence token too, to the last.

    A token that holds the end of one and the beginning of the next belongs to the next.
    """

    def first_reaching(characters: int) -> int:
        low, high = 0, len(tokens)
        while low < high:
            middle = (low + high) // 2
            if len(decode(tokens[:middle])) > characters:
                high = middle
            else:
                low = middle + 1
        return max(0, low - 1)

    starts = [0, *(first_reaching(start) for start, _ in pieces[1:]), len(tokens)] if pieces else []
    return list(itertools.pairwise(starts))
