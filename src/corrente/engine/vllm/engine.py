"""One vLLM server as an Engine and a Receiver.

Token ids go in and come out; nothing is tokenised twice. Log-probs are those of the distribution that was sampled from (the
server runs with --logprobs-mode processed_logprobs). Answers are streamed, so the tokens of a request so far are always known.

Versions. vLLM labels every token with the version that was live in the step that sampled it, and the label changes only while the
scheduler is paused, so spans are exact across an update in flight. Labels contain a random mark of this engine, so that tokens
which the server's weights of an earlier run sampled are recognised.

Old keys. A new request must not use the cached keys of old weights: its prefix-cache salt is the version that is live when it is
sent (``salt``), or every flip empties the cache (``reset``), also for live requests, which then rebuild theirs.

Draws. vLLM draws from a random stream per request, not by position. A resumed request gets another seed, derived from its own and
from the number of tokens it has; only greedy decoding continues as it would have without the interruption.
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
from corrente.engine.embedded.stop_conditions import Decode, StopStrings, cut_at_stop, request_stop_ids
from corrente.engine.vllm import answers
from corrente.engine.vllm.client import Client, ServerError
from corrente.errors import AlignmentError, GenerationError, SyncError
from corrente.sync.base import Update
from corrente.sync.layout import Layout
from corrente.sync.offers import Offer

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
STREAM_INTERVAL = 8
"""Tokens per streamed piece; each piece costs the server a JSON document. benchmarks/vllm_update.py measures the cost."""
POLL_S = 0.02
FLIP_S = 60.0
"""The longest wait, in seconds, for a flip: the step in progress has to end first."""


class LiveRequest:
    """A request that is being served, and the answer so far."""

    def __init__(self, request: Request, *, max_new_tokens: int) -> None:
        self.request, self.max_new_tokens = request, max_new_tokens
        self.aborted = False
        self.start_attempt("", None)

    def start_attempt(self, name: str, update: Update | None) -> None:
        """Start an attempt under the server-side id ``name`` while ``update`` is live; drops the answer of an earlier one."""
        self.name, self.update = name, update
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Span] = []
        self.kept_ids: list[Ids | None] = []
        self.experts: str | None = None
        self.finish_reason: FinishReason | None = None
        self.ended_by_token = False
        self.stopped = False
        """True once a stop string that began before the interruption is complete; later tokens are dropped."""


class VllmEngine:
    """Implements Engine and Receiver over one server; call ``open`` before use.

    ``decode`` turns tokens into text; None where the model has no tokenizer. ``vocabulary``: the vocabulary size for a server
    that returns the kept set of each draw (answers.py); 0 for one that does not.
    """

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
        self.client, self._decode, self.prefix_cache = client, decode, prefix_cache
        self.stream_interval, self._clock, self._vocabulary = stream_interval, clock, vocabulary
        self.flip_s = FLIP_S
        self._run_label = secrets.token_hex(4)
        self.served_model, self.context = "", 0
        self.current_update: Update | None = None
        self._live: dict[str, LiveRequest] = {}
        self._attempts_sent = 0
        self._prefill_tokens = self._decode_tokens = 0
        self._busy_s, self._busy_since = 0.0, 0.0

    async def open(self) -> Layout:
        """Read what the server serves, and return the layout in which it takes weights. GenerationError when it refuses."""
        await self.read_served_model()
        return msgspec.convert(await self._collective_rpc("corrente_layout"), Layout)

    async def read_served_model(self) -> None:
        """Read the name and the context length of the served model."""
        served = (await self.client.get("/v1/models"))["data"][0]
        self.served_model, self.context = served["id"], served["max_model_len"]

    # ---- Engine -------------------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        """See Engine.generate. A request whose connection was lost is sent again from its beginning."""
        room = self._token_budget(request)
        if request.id in self._live:
            raise GenerationError(f"request {request.id}: an equal id is being served")
        live = LiveRequest(request, max_new_tokens=room)
        if (over := self._finish_reason_before_sampling(request, room)) is not None:
            return self._to_completion(live, over)
        if not self._live:
            self._busy_since = self._clock()
        self._live[request.id] = live
        try:
            return await self.client.call_with_retries(lambda: self._attempt_request(live))
        except GenerationError as error:
            raise GenerationError(f"request {request.id}: {error}") from error
        finally:
            del self._live[request.id]
            if not self._live:
                self._busy_s += self._clock() - self._busy_since

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores:
        """See Engine.score. ``tokens`` must leave room for one more in the context."""
        self._require_weights("score")
        if len(tokens) < 2:
            return Scores(
                logprobs=np.empty(0, np.float32),
                top_ids=np.empty((0, top), np.int32),
                top_logprobs=np.empty((0, top), np.float32),
            )
        body = {
            "model": self.model_name(self.current_update),
            "token_ids": tokens.tolist(),
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": top, "detokenize": False}
            | answers.sampling_params(Sampling(temperature=0.0), returns_kept_sets=self._vocabulary > 0),
        }
        answer = await self.client.call_with_retries(lambda: self.client.post(GENERATE, body, timeout_s=600.0))
        return answers.parse_scores(answer["prompt_logprobs"], tokens, top)

    async def abort(self, ids: Sequence[str]) -> None:
        """See Engine.abort. A request that has not reached the server yet is aborted there after its first tokens."""
        found = [live for one in ids if (live := self._live.get(one)) is not None]
        for live in found:
            live.aborted = True
        if found:
            await self.client.call_with_retries(lambda: self._abort_on_server(found))

    async def _abort_on_server(self, ended: Sequence[LiveRequest]) -> None:
        await self.client.post(ABORT, {"request_ids": [live.name for live in ended if live.name]})

    async def partial_completions(self, ids: Sequence[str]) -> Mapping[str, Completion]:
        """See Engine.partial_completions. They are up to ``STREAM_INTERVAL`` tokens behind the server."""
        found = ((one, self._live.get(one)) for one in ids)
        return {one: self._to_completion(live, "abort") for one, live in found if live is not None and live.tokens}

    async def stats(self) -> EngineStats:
        """Counters of the requests that this engine sent; a server may serve others as well.

        The call waits until the worker answers between two steps, so it does not return while the worker hangs.
        """
        await self.client.wait_for_answer("/collective_rpc", {"method": "check_health"})
        busy_s = self._busy_s + (self._clock() - self._busy_since if self._live else 0.0)
        running = sum(1 for live in self._live.values() if live.tokens)
        return EngineStats(
            version=self.current_update.version if self.current_update else -1,
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
        """See Receiver.reserve. A cancelled transfer that still writes is stopped and waited for."""
        if self.current_update is not None and slot == self.current_update.slot:
            raise SyncError(f"slot {slot} holds version {self.current_update.version}, which is in use")
        status = await self._worker_rpc("corrente_status")
        if status["busy"]:
            await self._worker_rpc("corrente_stop")
        while status["busy"]:
            await anyio.sleep(POLL_S)
            status = await self._worker_rpc("corrente_status")

    async def receive(self, offer: Offer) -> None:
        """See Receiver.receive. The server fetches and packs the weights in a thread, while requests run."""
        await self._update_session({"receive": msgspec.to_builtins(offer)})
        status = {"busy": True, "failure": ""}
        while status["busy"]:
            await anyio.sleep(POLL_S)
            status = await self._worker_rpc("corrente_status")
        if status["failure"]:
            raise SyncError(f"{self.client.url}: {status['failure']}")

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        """See Receiver.apply. A flip that has begun is completed even if the caller is cancelled."""
        if mode == "snapshot":
            raise SyncError(
                "vLLM holds one set of weights for all requests; another inflight.kind than snapshot is needed"
            )
        flip = self.flip_request(update, mode)
        pause_s = 0.0
        with anyio.CancelScope(shield=True):
            try:
                pause_s = float((await self.client.post("/corrente/flip", flip, timeout_s=self.flip_s))["pause_s"])
            except (ServerError, GenerationError) as error:
                raise SyncError(f"{self.client.url} kept its weights: {error}") from error
            self.current_update = update
        await anyio.lowlevel.checkpoint()
        return pause_s

    def flip_request(self, update: Update, mode: ApplyMode) -> dict[str, Any]:
        """The body of the request to /corrente/flip."""
        return {
            "slot": update.slot,
            "version": update.version,
            "label": f"{self._run_label}/{update.version}",
            "recompute": mode == "recompute" or self.prefix_cache == "reset",
            "back": (self.current_update.slot, self.current_update.version) if self.current_update else None,
        }

    def _require_weights(self, what: str) -> Update:
        if self.current_update is None:
            raise GenerationError(f"{what}: the engine holds no weights yet")
        return self.current_update

    def _token_budget(self, request: Request) -> int:
        """The number of tokens that may still be sampled. GenerationError when the request cannot be served."""
        self._require_weights(f"request {request.id}")
        if not len(request.tokens):
            raise GenerationError(f"request {request.id}: the prompt is empty")
        room, left = self.context - len(request.tokens), request.sampling.max_tokens - request.written
        if left > 0 and room <= 0:
            raise GenerationError(f"request {request.id}: {len(request.tokens)} tokens leave no room in {self.context}")
        if request.sampling.stop and self._decode is None:
            raise GenerationError(f"request {request.id}: stop strings need a tokenizer, and the model has none")
        return min(room, left)

    def _finish_reason_before_sampling(self, request: Request, room: int) -> FinishReason | None:
        """The finish reason of a resumed request that has nothing left to sample; else None."""
        if request.written and self._decoded_text(request, []) != self._text_before_stop(request, []):
            return "stop"
        return "length" if room <= 0 else None

    async def _attempt_request(self, live: LiveRequest) -> Completion:
        self._attempts_sent += 1
        live.start_attempt(f"generate-tokens-{self._run_label}-{self._attempts_sent}", self.current_update)
        if live.aborted:
            return self._to_completion(live, "abort")
        await self._stream_answer(live)
        if live.finish_reason is None:
            raise ServerError(f"{self.client.url}: the answer has no end")
        return self._to_completion(live, "stop" if live.stopped else live.finish_reason)

    async def _stream_answer(self, live: LiveRequest) -> None:
        watch = self._resumed_stop_strings(live.request)
        async with aclosing(self.client.stream(GENERATE, self._request_body(live))) as events:
            async for event in events:
                for choice in event["choices"]:
                    self._add_piece(live, choice, watch)
                if live.finish_reason is None and live.stopped:
                    live.finish_reason = "stop"
                    return
                if live.finish_reason is None and live.aborted:
                    await self._abort_on_server([live])

    def _request_body(self, live: LiveRequest) -> dict[str, Any]:
        request, sampling = live.request, live.request.sampling
        body = {
            "model": self.model_name(live.update),
            "request_id": live.name.removeprefix("generate-tokens-"),
            "token_ids": request.tokens.tolist(),
            "stream": True,
            "sampling_params": {
                "max_tokens": live.max_new_tokens,
                **answers.sampling_params(sampling, returns_kept_sets=self._vocabulary > 0),
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "seed": answers.request_seed(request),
                "stop": list(sampling.stop),
                "stop_token_ids": sorted(request_stop_ids(sampling, self._decode)),
                "logprobs": 0,
                "detokenize": bool(sampling.stop),
                "stream_interval": self.stream_interval,
            },
        }
        if self.prefix_cache == "salt":
            body["cache_salt"] = f"{self._run_label}-{self._require_weights(request.id).version}"
        return body

    def _resumed_stop_strings(self, request: Request) -> StopStrings | None:
        """The stop strings of a resumed request, fed with its earlier tokens; None for any other request.

        The server does not see that a stop string may have begun before the interruption.
        """
        if not request.written or not request.sampling.stop or self._decode is None:
            return None
        watch = StopStrings(request.sampling.stop, self._decode)
        for token in request.tokens[-request.written :].tolist():
            watch.push_token(token)
        return watch

    def _add_piece(self, live: LiveRequest, choice: Mapping[str, Any], stop_strings: StopStrings | None) -> None:
        """Add a streamed piece to the request's answer. AlignmentError when tokens, log-probs and labels do not line up."""
        if not live.tokens and choice["token_ids"]:
            self._prefill_tokens += len(live.request.tokens)
        tokens, content = choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or []
        if [entry["token_id"] for entry in content] != tokens:
            raise AlignmentError(
                f"{len(tokens)} tokens and {len(content)} log-probs in one piece from {self.client.url}"
            )
        sets = answers.parse_kept_sets(
            choice, live.request.sampling, tokens=len(tokens), returns_kept_sets=self._vocabulary > 0
        )
        live.experts = choice.get("routed_experts") or live.experts
        for entry, kept in zip(content, sets, strict=True):
            if live.stopped:
                break
            if entry["logprob"] <= -9999.0:  # vLLM clamps log-probs there, since JSON has no infinity
                raise GenerationError("the model's log-probs are not finite")
            live.tokens.append(entry["token_id"])
            live.logprobs.append(entry["logprob"])
            live.kept_ids.append(kept)
            live.stopped = stop_strings is not None and stop_strings.push_token(entry["token_id"])
        self._decode_tokens += len(tokens)
        if choice["weight_versions"]:
            live.spans = self.version_spans(live, choice["weight_versions"])
        if choice["finish_reason"] is not None:
            live.finish_reason = answers.parse_finish_reason(choice["finish_reason"])
            live.ended_by_token = live.finish_reason == "stop" and not isinstance(choice["stop_reason"], str)

    def model_name(self, update: Update | None) -> str:
        """The model name under which the server serves ``update``."""
        return self.served_model

    def version_spans(self, live: LiveRequest, labels: Sequence[Mapping[str, Any]]) -> list[Span]:
        """The version spans of the request's tokens, from the server's labels. GenerationError for labels of another run."""
        spans: list[Span] = []
        for label in labels:
            mark, _, version = label["version"].partition("/")
            if mark != self._run_label:
                raise GenerationError(f"sampled by weights {label['version']!r}, which are not of this run")
            spans.append(Span(int(version), label["start"], min(label["end"], len(live.tokens))))
        return spans

    def _to_completion(self, live: LiveRequest, reason: FinishReason) -> Completion:
        return Completion(
            tokens=np.array(live.tokens, np.int32),
            logprobs=np.array(live.logprobs, np.float32),
            spans=tuple(span for span in live.spans if span.stop > span.start),
            finish_reason=reason,
            text=self._text_before_stop(live.request, live.tokens[:-1] if live.ended_by_token else live.tokens),
            support=Support.from_sets(live.kept_ids, vocabulary=self._vocabulary)
            if any(k is not None for k in live.kept_ids)
            else None,
            routing=answers.parse_routing(live.experts, context=len(live.request.tokens), sampled=len(live.tokens)),
        )

    def _decoded_text(self, request: Request, tokens: list[int]) -> str:
        """The text of the whole completion, without special tokens."""
        written = request.tokens[len(request.tokens) - request.written :].tolist()
        return "" if self._decode is None else self._decode(written + tokens)

    def _text_before_stop(self, request: Request, tokens: list[int]) -> str:
        """The text of the whole completion up to a stop string."""
        return cut_at_stop(self._decoded_text(request, tokens), request.sampling.stop)

    async def _collective_rpc(self, method: str) -> Any:
        answer = await self.client.post("/collective_rpc", {"method": method})
        return answer["results"][0] if answer else None

    async def _worker_rpc(self, method: str) -> Any:
        try:
            return await self._collective_rpc(method)
        except (ServerError, GenerationError) as error:
            raise SyncError(str(error)) from error

    async def _update_session(self, update: dict[str, Any]) -> None:
        """Run one session of vLLM's weight-update interface: start, update, finish."""
        try:
            await self.client.post("/start_weight_update")
            await self.client.post("/update_weights", {"update_info": update})
            await self.client.post("/finish_weight_update")
        except (ServerError, GenerationError) as error:
            raise SyncError(str(error)) from error
