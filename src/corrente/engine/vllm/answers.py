"""How vLLM 0.32 is told to draw, and what it says of tokens besides log-probs: scores, how they ended, kept sets, experts.

Kept sets (``--return-sampling-mask``, a list of ids for every token of a piece) and experts (``--enable-return-routed-experts``,
one base64-encoded .npy per request, with its last piece) come from its Model Runner V2, which needs Triton and so an accelerator.
A server that returns sets takes no request without a top_k, nor at temperature 0: greedy is asked for as top_k 1.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from corrente.data.routing import Routing
from corrente.data.support import Ids
from corrente.data.types import FinishReason, Request, Sampling, Scores, Tokens
from corrente.engine.vllm.client import ServerError
from corrente.errors import AlignmentError

MASK_FLAG = "--return-sampling-mask"
EXPERTS_FLAG = "--enable-return-routed-experts"


def drawing(sampling: Sampling, *, bounded: bool) -> dict[str, Any]:
    """Temperature and top_k as the server takes them; ``bounded``: it returns kept sets."""
    if bounded and sampling.temperature == 0:
        return {"temperature": 1.0, "top_k": 1}
    return {"temperature": sampling.temperature, "top_k": sampling.top_k}


def seed(request: Request) -> int:
    """vLLM takes 63 bits. What goes on after an interruption must not draw again what it has drawn."""
    if not request.written:
        return request.seed & (2**63 - 1)
    digest = hashlib.blake2b(f"{request.seed}/{request.written}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def ended(reason: str) -> FinishReason:
    """How a request ended. ServerError where that is no end of a completion: vLLM says "error" of one that failed in it."""
    try:
        return msgspec.convert(reason, FinishReason)
    except msgspec.ValidationError:
        raise ServerError(f"the server ended the request with {reason!r}") from None


def kept_sets(choice: Mapping[str, Any], sampling: Sampling, *, tokens: int, asked: bool) -> Sequence[Ids | None]:
    """The kept ids of each token of a piece, None where they are not ``asked`` for or nothing is cut off. AlignmentError where
    the server says none, or of more or fewer tokens."""
    if not (asked and sampling.keep_support and sampling.cuts):
        return [None] * tokens
    said: Sequence[Sequence[int]] | None = choice.get("sampling_mask")
    if said is None and tokens:
        raise AlignmentError(f"no kept sets came with {tokens} tokens: start the server with {MASK_FLAG}")
    if len(said or ()) != tokens:
        raise AlignmentError(f"{tokens} tokens and {len(said or ())} kept sets in one piece")
    return [np.array(ids, np.int32) for ids in said or ()]


def routing(encoded: str | None, *, context: int, sampled: int) -> Routing | None:
    """Experts of a request of ``context`` tokens from which ``sampled`` were sampled: all but the last were read. None where the
    server has not said any. AlignmentError where it says too few."""
    if encoded is None:
        return None
    try:
        experts = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, OSError, EOFError) as error:
        raise AlignmentError(f"experts that cannot be read: {error}") from error
    read = context + sampled - 1
    if experts.ndim != 3 or experts.dtype.kind not in "iu" or len(experts) < read:
        raise AlignmentError(f"{read} tokens were read, and experts of {experts.shape} {experts.dtype} came")
    experts = experts.astype(np.int16)
    return Routing(experts=experts[context - 1 : read], context=experts[: context - 1])


def scores(answer: Sequence[Mapping[str, Any] | None], tokens: Tokens, top: int) -> Scores:
    """From {token: {"logprob", "rank"}} per position. The given token is in it whatever its rank."""
    logprobs = np.empty(len(tokens) - 1, np.float32)
    ids, best = np.empty((len(tokens) - 1, top), np.int32), np.empty((len(tokens) - 1, top), np.float32)
    for at, (place, token) in enumerate(zip(answer[1:], tokens[1:].tolist(), strict=True)):
        if place is None or str(token) not in place:
            raise AlignmentError(f"the score of token {at + 1} is missing")
        logprobs[at] = place[str(token)]["logprob"]
        ranked = sorted(place.items(), key=lambda item: item[1]["rank"])[:top]
        ids[at] = [int(name) for name, _ in ranked]
        best[at] = [entry["logprob"] for _, entry in ranked]
    return Scores(logprobs=logprobs, top_ids=ids, top_logprobs=best)
