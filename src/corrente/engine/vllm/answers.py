"""Sampling parameters for vLLM 0.32, and the parsing of its answers: scores, finish reasons, kept sets, experts.

Kept sets (``--return-sampling-mask``, a list of ids for every token of a piece) and experts (``--enable-return-routed-experts``,
one base64-encoded .npy per request, with its last piece) come from vLLM's Model Runner V2, which needs Triton and so an
accelerator. A server that returns kept sets refuses requests without a top_k or at temperature 0: greedy is sent as top_k 1.

Shapes: T sampled tokens, L layers with experts, k experts of a token.
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


def sampling_params(sampling: Sampling, *, returns_kept_sets: bool) -> dict[str, Any]:
    """Temperature and top_k as the server takes them. ``returns_kept_sets``: the server was started to return kept sets."""
    if returns_kept_sets and sampling.temperature == 0:
        return {"temperature": 1.0, "top_k": 1}
    return {"temperature": sampling.temperature, "top_k": sampling.top_k}


def request_seed(request: Request) -> int:
    """The seed of a request, in the 63 bits that vLLM takes."""
    # vLLM starts its random stream at the seed, so a resumed request needs another one, or it would repeat its first draws.
    if not request.written:
        return request.seed & (2**63 - 1)
    digest = hashlib.blake2b(f"{request.seed}/{request.written}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def parse_finish_reason(reason: str) -> FinishReason:
    """The finish reason of a request. ServerError for any other reason: vLLM answers "error" when it failed itself."""
    try:
        return msgspec.convert(reason, FinishReason)
    except msgspec.ValidationError:
        raise ServerError(f"the server ended the request with {reason!r}") from None


def parse_kept_sets(
    choice: Mapping[str, Any], sampling: Sampling, *, tokens: int, returns_kept_sets: bool
) -> Sequence[Ids | None]:
    """The kept ids of each token of a piece; None where the server returns none or nothing was cut off.

    AlignmentError when the kept sets are missing, or are not one for each token.
    """
    if not (returns_kept_sets and sampling.keep_support and sampling.truncates):
        return [None] * tokens
    sets: Sequence[Sequence[int]] | None = choice.get("sampling_mask")
    if sets is None and tokens:
        raise AlignmentError(f"no kept sets came with {tokens} tokens: start the server with {MASK_FLAG}")
    if len(sets or ()) != tokens:
        raise AlignmentError(f"{tokens} tokens and {len(sets or ())} kept sets in one piece")
    return [np.array(ids, np.int32) for ids in sets or ()]


def parse_routing(encoded: str | None, *, context: int, sampled: int) -> Routing | None:
    """The routing of a request of ``context`` tokens after which ``sampled`` tokens were sampled.

    The server read all of these tokens but the last. None where it returned no experts; AlignmentError where these cannot be
    read or are too few.
    """
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


def parse_scores(answer: Sequence[Mapping[str, Any] | None], tokens: Tokens, top: int) -> Scores:
    """Scores of tokens (T,) from vLLM's prompt log-probs: {token: {"logprob", "rank"}} per position, with the given token.

    AlignmentError when the given token is missing.
    """
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
