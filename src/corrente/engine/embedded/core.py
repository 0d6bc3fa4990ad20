"""The synchronous engine loop: admit, decode, retire, in one thread and without an event loop.

A step first admits waiting requests (one prefill for all of them, shared prefixes computed once), then samples one token for
every live sequence, then retires the finished ones; their rows are reused at once. Weights change only between two steps, by
pointing the model at the other of two buffers, so nothing is copied. In mode "snapshot" sequences finish under the weights they
began with: a step then runs one forward pass per version in use (live_rows.py). With one buffer the engine pauses while that is
written.

It does no paging, no preemption and no speculative decoding. Requests are admitted in order of arrival.

Shapes: R rows of a segment, S sequences of a prefill, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch

from corrente.config import Lora
from corrente.data.types import ApplyMode, Completion, FinishReason, Request, Scores, Tokens
from corrente.engine.base import EngineStats
from corrente.engine.embedded import model as models
from corrente.engine.embedded import prefill
from corrente.engine.embedded.kv import DecodeKV, KVCache
from corrente.engine.embedded.live_rows import LiveRows, Segment
from corrente.engine.embedded.sampling import SamplingRules, compile_rules, draw_tokens
from corrente.engine.embedded.sequence import LiveSequence, check_request
from corrente.engine.embedded.stop_conditions import load_decoder, request_stop_ids
from corrente.engine.embedded.weights import EmbeddedWeights, WeightBuffers
from corrente.errors import ConfigError, GenerationError, SyncError
from corrente.sync.base import Update
from corrente.sync.layout import Layout

RequestOutcome = Completion | GenerationError
EndReason = FinishReason | GenerationError

PREFILL_TOKENS = 4096
"""Prompt tokens admitted in one step, counted before shared prefixes are merged. Bounds how long live sequences wait."""


class EmbeddedCore:
    """Serves one model, step by step.

    ``max_context`` 0 takes the model's own limit, at most 4096 tokens. ``path`` is auto, lean or hf. With ``adapters`` the frozen
    weights are loaded from ``model`` and the layout holds the adapters only. ``keep_routing``: record the experts of a mixture;
    None records them where the model has any. ConfigError for settings that the model does not allow.
    """

    def __init__(
        self,
        *,
        model: Path,
        dtype: str = "float32",
        device: str = "cpu",
        max_sequences: int = 64,
        max_context: int = 0,
        path: str = "auto",
        adapters: Lora | None = None,
        keep_routing: bool | None = False,
        trust_remote_code: bool = False,
    ) -> None:
        if path not in ("auto", "lean", "hf"):
            raise ConfigError(f"engine.path: {path!r} given; auto, lean or hf are allowed")
        if max_sequences < 1:
            raise ConfigError(f"engine.max_sequences: {max_sequences} given; it must be at least 1")
        config = models.read_model_config(model, trust_remote_code=trust_remote_code)
        self._dtype, self._device = models.resolve_dtype(dtype, device), torch.device(device)
        self._max_sequences = max_sequences
        self.max_context = models.context_limit(config, max_context)
        self._vocabulary: int = config.vocab_size
        self._model = models.build_model_runner(
            config,
            path=path,
            dtype=self._dtype,
            device=self._device,
            context=self.max_context,
            source=model,
            adapters=adapters,
            keep_routing=keep_routing,
            trust_remote_code=trust_remote_code,
        )
        self._end_ids = models.end_token_ids(model, config)
        self._decode = load_decoder(model, trust_remote_code=trust_remote_code)
        self._cache = KVCache(max_rows=max_sequences, max_slots=self.max_context)
        self.buffers, self._paused = WeightBuffers(Layout(())), False
        self._newest: EmbeddedWeights | None = None
        self._bound: EmbeddedWeights | None = None
        self._waiting: deque[LiveSequence] = deque()
        self._rows = LiveRows(self._cache)
        self._rules: list[SamplingRules] = []
        self._ids: set[str] = set()
        self._done: list[tuple[str, RequestOutcome]] = []
        self._prefill_tokens = self._decode_tokens = 0
        self._busy_s = 0.0

    @property
    def idle(self) -> bool:
        """True when there is nothing to do: no request waits or runs, or none may while paused, and ``step`` has no outcome
        left."""
        return not (self._done or ((len(self._rows) or self._waiting) and not self._paused))

    @property
    def model(self) -> models.ModelRunner:
        """The runner of the model: lean where it supports the model, else hf."""
        return self._model

    @property
    def device(self) -> str:
        """The torch device that computes; the weight buffers must be on it."""
        return str(self._device)

    def stats(self) -> EngineStats:
        """Counters so far; version -1 means that no weights have arrived yet."""
        return EngineStats(
            version=self._newest.version if self._newest else -1,
            running=len(self._rows),
            waiting=len(self._waiting),
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            busy_s=self._busy_s,
        )

    def layout(self) -> Layout:
        """The layout in which the engine takes its weights; see sync/layout.py."""
        return self._model.layout()

    def attach_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Take one or two uint8 buffers of ``layout().nbytes`` each, which somebody else fills."""
        self.buffers = WeightBuffers(self.layout(), buffers)

    def pause(self) -> None:
        """Sample nothing until the next ``apply``: the only buffer is about to be written to. Live sequences stay as they are."""
        self._paused = True

    @property
    def newest_update(self) -> Update | None:
        """The newest weights: those that the next request uses."""
        return self._newest.update if self._newest else None

    def is_slot_free(self, slot: int) -> bool:
        """True when no live sequence samples from buffer ``slot``; it may be written unless it holds the newest weights."""
        return all(segment.weights.slot != slot for segment in self._rows.segments)

    def apply(self, update: Update, mode: ApplyMode) -> None:
        """Sample from ``update`` from now on; ``mode`` says what live sequences do (data.types.ApplyMode).

        SyncError when there is no such buffer, when sequences sample from another version in it, or when rebuilding keys and
        values fails; the old weights are then in use as before. A paused engine goes on; after an error it stays paused.
        """
        tensors, before = self.buffers[update.slot], None if self._paused else self._newest
        if self._paused and mode == "snapshot":
            raise SyncError('mode "snapshot" keeps the old weights for live sequences, and they were overwritten')
        for used in (segment.weights for segment in self._rows.segments):
            if used.slot == update.slot and used.version != update.version and not self._paused:
                raise SyncError(
                    f"version {update.version} is said to be in buffer {update.slot}, which sequences under version "
                    f"{used.version} sample from: it should have been reserved"
                )
        weights = EmbeddedWeights(update, tensors)
        self._bind_weights(weights)
        if mode == "recompute" and len(self._rows):
            self._rebuild_kv(before)
        if mode != "snapshot":
            self._rows.sample_all_from(weights, rebuilt=mode == "recompute")
        self._newest, self._rules, self._paused = weights, [], False

    def _rebuild_kv(self, before: EmbeddedWeights | None) -> None:
        """Compute the keys and values of all live sequences with the bound weights."""
        try:
            with self._timed_inference():
                contexts = [live.cached_tokens for live in self._rows]
                filled = self._prefill_contexts(contexts, first_row=0, cached_prefixes=(), logits=False)
                for live, experts in zip(self._rows, filled.experts or (), strict=filled.experts is not None):
                    assert live.routing_recorder is not None
                    live.routing_recorder.record_rebuilt_cache(experts)
        except RuntimeError as error:
            if before:
                self._bind_weights(before)
            stays = ", the old weights stay" if before else ""
            raise SyncError(f"keys and values could not be rebuilt{stays}: {error}") from error
        self._prefill_tokens += filled.computed

    def _bind_weights(self, weights: EmbeddedWeights) -> None:
        """Point the model at ``weights``, if it is not there already."""
        if self._bound is not weights:
            self._model.bind_weights(weights.tensors)
            self._bound = weights

    def submit(self, request: Request) -> None:
        """Queue a request; GenerationError when it cannot be served."""
        self._check_request(request)
        left = request.sampling.max_tokens - request.written
        room = self.max_context - len(request.tokens)
        if left > 0 and room <= 0:
            raise GenerationError(
                f"request {request.id}: {len(request.tokens)} tokens leave no room in {self.max_context}"
            )
        live = LiveSequence(
            request,
            max_new_tokens=min(room, left),
            stop_ids=self._end_ids | request_stop_ids(request.sampling, self._decode),
            decode=self._decode,
            vocabulary=self._vocabulary,
        )
        self._ids.add(request.id)
        if reason := live.finish_reason_before_sampling():
            self._finish_request(live, reason)
        else:
            self._waiting.append(live)

    def _check_request(self, request: Request) -> None:
        if self._newest is None:
            raise GenerationError(f"request {request.id}: the engine holds no weights yet")
        if request.id in self._ids:
            raise GenerationError(f"request {request.id}: an equal id is being served")
        check_request(request, vocabulary=self._vocabulary, has_tokenizer=self._decode is not None)

    def abort(self, ids: Sequence[str]) -> None:
        """End requests: the next ``step`` returns what they have, with finish_reason "abort". Unknown ids are ignored."""
        named = set(ids)
        for live in [live for live in self._waiting if live.request.id in named]:
            self._waiting.remove(live)
            self._finish_request(live, "abort")
        with torch.inference_mode():
            self._retire_rows({at: "abort" for at, live in enumerate(self._rows) if live.request.id in named})

    def partial_completions(self, ids: Sequence[str]) -> dict[str, Completion]:
        """Return what the live requests among ``ids`` have sampled so far, by id; the requests go on."""
        named = set(ids)
        return {
            live.request.id: live.to_completion("abort", self._decode)
            for live in self._rows
            if live.sampled_count and live.request.id in named
        }

    def step(self) -> list[tuple[str, RequestOutcome]]:
        """Admit, decode one token for every live sequence, and return what ended since the last step."""
        with self._timed_inference():
            if self._waiting and len(self._rows) < self._max_sequences and not self._paused:
                self._admit_waiting()
            if len(self._rows) and not self._paused:
                self._decode_all()
        done, self._done = self._done, []
        return done

    def score(self, tokens: Tokens, top: int = 0, *, temperature: float = 1.0) -> Scores:
        """Log-probs of tokens[1:] at ``temperature``, and the ``top`` likeliest at each place, under the newest weights.

        The result names their version. The work counts in ``busy_s`` only. GenerationError for tokens that do not fit.
        """
        if self._newest is None:
            raise GenerationError("score: the engine holds no weights yet")
        if self._paused:
            raise GenerationError("score: the engine's weights are being written")
        if len(tokens) > self.max_context or (len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocabulary):
            raise GenerationError(f"score: at most {self.max_context} token ids in [0, {self._vocabulary}) are allowed")
        if not 0 <= top <= self._vocabulary:
            raise GenerationError(f"score: top is {top}; 0 to {self._vocabulary} are allowed")
        with self._timed_inference():
            self._bind_weights(self._newest)
            scores = prefill.score_tokens(
                self._model, tokens, top=top, temperature=temperature, dtype=self._dtype, device=self._device
            )
        return msgspec.structs.replace(scores, version=self._newest.version)

    def _admit_waiting(self) -> None:
        """Prefill as many waiting requests as there are rows, and sample the first token of each."""
        assert self._newest is not None
        weights, first = self._newest, len(self._rows)
        new: list[LiveSequence] = []
        tokens = 0
        while self._waiting and first + len(new) < self._max_sequences:
            tokens += len(self._waiting[0].request.tokens)
            if new and tokens > PREFILL_TOKENS:  # the first is always admitted, however long its prompt is
                break
            new.append(self._waiting.popleft())
        prefixes = [self._cached_prefix(row, live) for row, live in enumerate(self._rows) if live.kv_weights is weights]
        self._bind_weights(weights)
        contexts = [live.tokens for live in new]
        filled = self._prefill_contexts(contexts, first_row=first, cached_prefixes=prefixes, logits=True)
        assert filled.logits_SV is not None
        self._prefill_tokens += filled.computed
        for at, live in enumerate(new):
            live.start_decoding(filled.experts[at] if filled.experts is not None else None)
        self._rows.append_rows(new, weights)
        self._rules = []
        segment = Segment(weights, first, first + len(new))
        self._retire_rows(self._sample_tokens(filled.logits_SV, self._compile_rules(new), segment))

    @staticmethod
    def _cached_prefix(row: int, live: LiveSequence) -> prefill.CachedPrefix:
        experts = live.routing_recorder.cached_experts(live.length - 1) if live.routing_recorder is not None else None
        return prefill.CachedPrefix(row, live.cached_tokens, experts)

    def _decode_all(self) -> None:
        """Sample one token for every live sequence, with one forward pass per version in use, newest last."""
        segments = self._rows.segments
        if not self._rules:
            self._rules = [self._compile_rules(self._rows[segment.first : segment.stop]) for segment in segments]
        ended: dict[int, EndReason] = {}
        for segment, rules in zip(segments, self._rules, strict=True):
            ended |= self._sample_tokens(self._forward_segment(segment), rules, segment)
        self._retire_rows(ended)

    def _forward_segment(self, segment: Segment) -> torch.Tensor:
        """Next-token logits (R, V) of the sequences of a segment; their last tokens enter the cache."""
        rows = self._rows[segment.first : segment.stop]
        positions = np.array([live.length - 1 for live in rows], np.int64)
        longest = int(positions.max()) + 1
        self._cache.ensure_capacity(segment.stop, longest)
        ids = np.array([live.last_token for live in rows], np.int64)
        at_R1 = torch.from_numpy(positions).to(self._device)[:, None]
        # All rows read the slots of the longest one; the additive mask hides those beyond a row's own length.
        hidden = torch.arange(longest, device=self._device) > at_R1
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)
        self._bind_weights(segment.weights)
        logits = self._model.forward(
            torch.from_numpy(ids).to(self._device)[:, None],
            at_R1,
            mask[:, None, None],
            DecodeKV(self._cache, at_R1[:, 0], longest, first=segment.first),
            torch.arange(len(rows), device=self._device),
        )
        if self._model.routing_shape() is not None:
            for live, experts in zip(rows, self._model.recorded_experts(), strict=True):
                assert live.routing_recorder is not None
                live.routing_recorder.record_token(experts)
        return logits

    def _sample_tokens(self, logits: torch.Tensor, rules: SamplingRules, segment: Segment) -> dict[int, EndReason]:
        """Draw one token for each sequence of a segment; returns the rows that ended and why."""
        rows = self._rows[segment.first : segment.stop]
        draws = draw_tokens(logits, rules, np.array([live.length for live in rows], np.int64))
        self._decode_tokens += len(rows)
        ended: dict[int, EndReason] = {}
        drawn = zip(draws.tokens.tolist(), draws.logprobs.tolist(), draws.kept_ids, strict=True)
        for row, live, (token, logprob, kept) in zip(range(segment.first, segment.stop), rows, drawn, strict=True):
            if not np.isfinite(logprob):
                ended[row] = GenerationError(f"request {live.request.id}: the model's log-probs are not finite")
            elif reason := live.push_token(token, logprob, segment.weights.version, kept):
                ended[row] = reason
        return ended

    def _prefill_contexts(
        self,
        contexts: Sequence[Tokens],
        *,
        first_row: int,
        cached_prefixes: Sequence[prefill.CachedPrefix],
        logits: bool,
    ) -> prefill.PrefillResult:
        self._cache.ensure_capacity(first_row + len(contexts), max(len(context) for context in contexts))
        return prefill.prefill_rows(
            self._model,
            self._cache,
            contexts,
            first_row=first_row,
            cached_prefixes=cached_prefixes,
            logits=logits,
            dtype=self._dtype,
            device=self._device,
        )

    def _compile_rules(self, rows: Sequence[LiveSequence]) -> SamplingRules:
        samplings = [(live.request.sampling, live.request.seed) for live in rows]
        return compile_rules(samplings, vocabulary=self._vocabulary, device=self._device)

    def _retire_rows(self, ended: Mapping[int, EndReason]) -> None:
        """End the sequences in these rows and close the gaps."""
        if ended:
            for row, live in enumerate(self._rows):
                if row in ended:
                    self._finish_request(live, ended[row])
            self._rows.remove_rows(ended)
            self._rules = []

    def _finish_request(self, live: LiveSequence, how: EndReason) -> None:
        outcome = how if isinstance(how, GenerationError) else live.to_completion(how, self._decode)
        self._ids.discard(live.request.id)
        self._done.append((live.request.id, outcome))

    @contextmanager
    def _timed_inference(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                yield
        finally:
            self._busy_s += time.perf_counter() - start
