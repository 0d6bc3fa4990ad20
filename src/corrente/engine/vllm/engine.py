"""One vLLM server as an Engine and a Receiver.

Token ids go in and come out; nothing is tokenised twice. Log-probs are those of the distribution that was sampled from (the
server runs with --logprobs-mode processed_logprobs). Answers are streamed, so that what a request has is known at any time.

Versions. vLLM labels every token with the version that was live in the step that sampled it, and the label changes only while the
scheduler is paused, so spans are exact across an update in flight. Labels are made unique to this engine, so that a server that
served another run before cannot be taken at its old word.

Old keys. A new request may not meet the keys of old weights: its prefix-cache salt is the version that is live when it is sent
(``salt``), or the cache is emptied with every flip (``reset``), of live requests as well, which then rebuild theirs.

Draws. vLLM draws from a stream per request, not by position. A resumed request gets another seed, made of its own and of what it
has written; only greedy decoding goes on as it would have.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

import anyio
import anyio.lowlevel
import msgspec
import numpy as np

from corrente.data.support import Ids, Support
from corrente.data.types import ApplyMode, Completion, FinishReason, Request, Sampling, Scores, Span, Tokens
from corrente.engine.base import EngineStats
from corrente.engine.embedded.stop import Decode, StopStrings, cut, stop_ids
from corrente.engine.vllm import answers
from corrente.engine.vllm.client import Client, ServerError
from corrente.errors import AlignmentError, GenerationError, SyncError
from corrente.sync.base import Update
from corrente.sync.layout import Layout
from corrente.sync.offers import Offer

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
STREAM_INTERVAL = 8
"""Tokens per streamed piece: each costs the server a JSON document. benchmarks/vllm_update.py measures how much."""
POLL_S = 0.02
FLIP_S = 60.0
"""Longest wait for a flip: the step in progress has to end first."""


class LiveRequest:
    """A request that is being served, and what it has been answered so far."""

    def __init__(self, request: Request, *, room: int) -> None:
        self.request, self.room = request, room
        self.aborted = False
        self.begin("", None)

    def begin(self, name: str, update: Update | None) -> None:
        """Nothing was answered yet: an attempt starts, as ``name``, while ``update`` is live."""
        self.name, self.update = name, update
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Span] = []
        self.kept: list[Ids | None] = []
        self.experts: str | None = None
        self.finish_reason: FinishReason | None = None
        self.ended_by_token = False
        self.stopped = False
        """By a stop string that began before the interruption: the server is told to end it, and what follows is dropped."""


class VllmEngine:
    """``open`` it before use. ``decode`` turns tokens into text, None where the model has no tokenizer. ``vocabulary``: of a
    server that returns what it kept for each draw (answers.py); 0: it does not."""

    def __init__(
        self,
        client: Client,
        *,
        decode: Decode | None,
        prefix_cache: Literal["salt", "reset"] = "salt",
        stream_interval: int = STREAM_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
        vocabulary: int = 0,
    ) -> None:
        self._client, self._decode, self._prefix_cache = client, decode, prefix_cache
        self._interval, self._clock, self._vocabulary = stream_interval, clock, vocabulary
        self.flip_s = FLIP_S
        self._mark = secrets.token_hex(4)
        self._model, self.context = "", 0
        self._update: Update | None = None
        self._live: dict[str, LiveRequest] = {}
        self._sent = 0
        self._prefill_tokens = self._decode_tokens = 0
        self._busy_s, self._busy_since = 0.0, 0.0

    async def open(self) -> Layout:
        """Ask the server what it serves; returns the layout it wants weights in. GenerationError when it refuses."""
        await self.look()
        return msgspec.convert(await self._ask("corrente_layout"), Layout)

    async def look(self) -> None:
        """Ask the server for the name and the context of what it serves."""
        served = (await self._client.get("/v1/models"))["data"][0]
        self._model, self.context = served["id"], served["max_model_len"]

    # ---- Engine -------------------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        """See Engine.generate. A request that was lost with its connection is sent again from its beginning."""
        room = self._room(request)
        if request.id in self._live:
            raise GenerationError(f"request {request.id}: an equal id is being served")
        live = LiveRequest(request, room=room)
        if (over := self._over(request, room)) is not None:
            return self._completion(live, over)
        if not self._live:
            self._busy_since = self._clock()
        self._live[request.id] = live
        try:
            return await self._client.insist(lambda: self._attempt(live))
        except GenerationError as error:
            raise GenerationError(f"request {request.id}: {error}") from error
        finally:
            del self._live[request.id]
            if not self._live:
                self._busy_s += self._clock() - self._busy_since

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores:
        """See Engine.score. ``tokens`` must leave room for one more in the context."""
        self._held("score")
        if len(tokens) < 2:
            return Scores(
                logprobs=np.empty(0, np.float32),
                top_ids=np.empty((0, top), np.int32),
                top_logprobs=np.empty((0, top), np.float32),
            )
        body = {
            "model": self.model(self._update),
            "token_ids": tokens.tolist(),
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": top, "detokenize": False}
            | answers.drawing(Sampling(temperature=0.0), bounded=self._vocabulary > 0),
        }
        answer = await self._client.insist(lambda: self._client.post(GENERATE, body, silence_s=600.0))
        return answers.scores(answer["prompt_logprobs"], tokens, top)

    async def abort(self, ids: Sequence[str]) -> None:
        """See Engine.abort. One that has yet to reach the server is ended there with its first tokens."""
        found = [live for one in ids if (live := self._live.get(one)) is not None]
        for live in found:
            live.aborted = True
        if found:
            await self._client.insist(lambda: self._end(found))

    async def _end(self, ended: Sequence[LiveRequest]) -> None:
        await self._client.post(ABORT, {"request_ids": [live.name for live in ended if live.name]})

    async def partials(self, ids: Sequence[str]) -> Mapping[str, Completion]:
        """See Engine.partials. Up to ``STREAM_INTERVAL`` tokens behind what the server has."""
        found = ((one, self._live.get(one)) for one in ids)
        return {one: self._completion(live, "abort") for one, live in found if live is not None and live.tokens}

    async def stats(self) -> EngineStats:
        """Of what this engine sent; a server that serves others as well does more. Waits for an answer of its worker, between two
        steps: whoever asks finds out that it hangs."""
        await self._client.answered("/collective_rpc", {"method": "check_health"})
        busy_s = self._busy_s + (self._clock() - self._busy_since if self._live else 0.0)
        running = sum(1 for live in self._live.values() if live.tokens)
        return EngineStats(
            version=self._update.version if self._update else -1,
            running=running,
            waiting=len(self._live) - running,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            busy_s=busy_s,
        )

    # ---- Receiver -----------------------------------------------------------------------------------------------------------

    def members(self) -> int:
        return 1

    async def reserve(self, slot: int) -> None:
        """See Receiver.reserve. What a transfer that was given up still writes is waited for."""
        if self._update is not None and slot == self._update.slot:
            raise SyncError(f"slot {slot} holds version {self._update.version}, which is in use")
        status = await self._rpc("corrente_status")
        if status["busy"]:
            await self._rpc("corrente_stop")
        while status["busy"]:
            await anyio.sleep(POLL_S)
            status = await self._rpc("corrente_status")

    async def receive(self, offer: Offer) -> None:
        """See Receiver.receive. The server fetches, and packs, beside its requests."""
        await self._session({"receive": msgspec.to_builtins(offer)})
        status = {"busy": True, "failure": ""}
        while status["busy"]:
            await anyio.sleep(POLL_S)
            status = await self._rpc("corrente_status")
        if status["failure"]:
            raise SyncError(f"{self._client.url}: {status['failure']}")

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        """See Receiver.apply. Once begun it is not cancelled half-way: who was cancelled meanwhile finds it done."""
        if mode == "snapshot":
            raise SyncError(
                "vLLM holds one set of weights for all requests; another inflight.kind than snapshot is needed"
            )
        flip = self.order(update, mode)
        pause_s = 0.0
        with anyio.CancelScope(shield=True):
            try:
                pause_s = float((await self._client.post("/corrente/flip", flip, silence_s=self.flip_s))["pause_s"])
            except (ServerError, GenerationError) as error:
                raise SyncError(f"{self._client.url} kept its weights: {error}") from error
            self._update = update
        await anyio.lowlevel.checkpoint()
        return pause_s

    def order(self, update: Update, mode: ApplyMode) -> dict[str, Any]:
        """What /corrente/flip is asked."""
        return {
            "slot": update.slot,
            "version": update.version,
            "label": f"{self._mark}/{update.version}",
            "recompute": mode == "recompute" or self._prefix_cache == "reset",
            "back": (self._update.slot, self._update.version) if self._update else None,
        }

    # ---- one request --------------------------------------------------------------------------------------------------------

    def _held(self, what: str) -> Update:
        if self._update is None:
            raise GenerationError(f"{what}: the engine holds no weights yet")
        return self._update

    def _room(self, request: Request) -> int:
        """Tokens that may still be sampled. GenerationError when the request cannot be served as it is."""
        self._held(f"request {request.id}")
        if not len(request.tokens):
            raise GenerationError(f"request {request.id}: the prompt is empty")
        room, left = self.context - len(request.tokens), request.sampling.max_tokens - request.written
        if left > 0 and room <= 0:
            raise GenerationError(f"request {request.id}: {len(request.tokens)} tokens leave no room in {self.context}")
        if request.sampling.stop and self._decode is None:
            raise GenerationError(f"request {request.id}: stop strings need a tokenizer, and the model has none")
        return min(room, left)

    def _over(self, request: Request, room: int) -> FinishReason | None:
        """Whether what was written before leaves nothing to sample, and why."""
        if request.written and self._said(request, []) != self._text(request, []):
            return "stop"
        return "length" if room <= 0 else None

    async def _attempt(self, live: LiveRequest) -> Completion:
        self._sent += 1
        live.begin(f"generate-tokens-{self._mark}-{self._sent}", self._update)
        if live.aborted:
            return self._completion(live, "abort")
        await self._listen(live)
        if live.finish_reason is None:
            raise ServerError(f"{self._client.url}: the answer has no end")
        return self._completion(live, "stop" if live.stopped else live.finish_reason)

    async def _listen(self, live: LiveRequest) -> None:
        watch = self._watch(live.request)
        async with aclosing(self._client.stream(GENERATE, self._body(live))) as events:
            async for event in events:
                for choice in event["choices"]:
                    self._take(live, choice, watch)
                if live.finish_reason is None and live.stopped:
                    live.finish_reason = "stop"
                    return
                if live.finish_reason is None and live.aborted:
                    await self._end([live])

    def _body(self, live: LiveRequest) -> dict[str, Any]:
        request, sampling = live.request, live.request.sampling
        body = {
            "model": self.model(live.update),
            "request_id": live.name.removeprefix("generate-tokens-"),
            "token_ids": request.tokens.tolist(),
            "stream": True,
            "sampling_params": {
                "max_tokens": live.room,
                **answers.drawing(sampling, bounded=self._vocabulary > 0),
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "seed": answers.seed(request),
                "stop": list(sampling.stop),
                "stop_token_ids": sorted(stop_ids(sampling, self._decode)),
                "logprobs": 0,
                "detokenize": bool(sampling.stop),
                "stream_interval": self._interval,
            },
        }
        if self._prefix_cache == "salt":
            body["cache_salt"] = f"{self._mark}-{self._held(request.id).version}"
        return body

    def _watch(self, request: Request) -> StopStrings | None:
        """Follows a resumed request, for the server does not know what a stop string may have begun with."""
        if not request.written or not request.sampling.stop or self._decode is None:
            return None
        watch = StopStrings(request.sampling.stop, self._decode)
        for token in request.tokens[-request.written :].tolist():
            watch.push(token)
        return watch

    def _take(self, live: LiveRequest, choice: Mapping[str, Any], watch: StopStrings | None) -> None:
        """Add a piece to what is known. AlignmentError when tokens, log-probs and labels do not line up."""
        if not live.tokens and choice["token_ids"]:
            self._prefill_tokens += len(live.request.tokens)
        tokens, content = choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or []
        if [entry["token_id"] for entry in content] != tokens:
            raise AlignmentError(
                f"{len(tokens)} tokens and {len(content)} log-probs in one piece from {self._client.url}"
            )
        sets = answers.kept_sets(choice, live.request.sampling, tokens=len(tokens), asked=self._vocabulary > 0)
        live.experts = choice.get("routed_experts") or live.experts
        for entry, kept in zip(content, sets, strict=True):
            if live.stopped:
                break
            if entry["logprob"] <= -9999.0:
                raise GenerationError("the model's log-probs are not finite")
            live.tokens.append(entry["token_id"])
            live.logprobs.append(entry["logprob"])
            live.kept.append(kept)
            live.stopped = watch is not None and watch.push(entry["token_id"])
        self._decode_tokens += len(tokens)
        if choice["weight_versions"]:
            live.spans = self.spans(live, choice["weight_versions"])
        if choice["finish_reason"] is not None:
            live.finish_reason = answers.ended(choice["finish_reason"])
            live.ended_by_token = live.finish_reason == "stop" and not isinstance(choice["stop_reason"], str)

    def model(self, update: Update | None) -> str:
        """The name under which the server serves ``update``."""
        return self._model

    def spans(self, live: LiveRequest, labels: Sequence[Mapping[str, Any]]) -> list[Span]:
        """Which version sampled which of its tokens, from the server's labels. GenerationError when they are not of this run."""
        spans: list[Span] = []
        for label in labels:
            mark, _, version = label["version"].partition("/")
            if mark != self._mark:
                raise GenerationError(f"sampled by weights {label['version']!r}, which are not of this run")
            spans.append(Span(int(version), label["start"], min(label["end"], len(live.tokens))))
        return spans

    def _completion(self, live: LiveRequest, reason: FinishReason) -> Completion:
        return Completion(
            tokens=np.array(live.tokens, np.int32),
            logprobs=np.array(live.logprobs, np.float32),
            spans=tuple(span for span in live.spans if span.stop > span.start),
            finish_reason=reason,
            text=self._text(live.request, live.tokens[:-1] if live.ended_by_token else live.tokens),
            support=Support.of(live.kept, vocabulary=self._vocabulary)
            if any(k is not None for k in live.kept)
            else None,
            routing=answers.routing(live.experts, context=len(live.request.tokens), sampled=len(live.tokens)),
        )

    def _said(self, request: Request, tokens: list[int]) -> str:
        """What the whole completion says, without special tokens."""
        written = request.tokens[len(request.tokens) - request.written :].tolist()
        return "" if self._decode is None else self._decode(written + tokens)

    def _text(self, request: Request, tokens: list[int]) -> str:
        """The same up to a stop string."""
        return cut(self._said(request, tokens), request.sampling.stop)

    # ---- the worker ---------------------------------------------------------------------------------------------------------

    async def _ask(self, method: str) -> Any:
        answer = await self._client.post("/collective_rpc", {"method": method})
        return answer["results"][0] if answer else None

    async def _rpc(self, method: str) -> Any:
        try:
            return await self._ask(method)
        except (ServerError, GenerationError) as error:
            raise SyncError(str(error)) from error

    async def _session(self, update: dict[str, Any]) -> None:
        """One start, update, finish of vLLM's own interface."""
        try:
            await self._client.post("/start_weight_update")
            await self._client.post("/update_weights", {"update_info": update})
            await self._client.post("/finish_weight_update")
        except (ServerError, GenerationError) as error:
            raise SyncError(str(error)) from error
