"""The engine: a synchronous loop of admit, decode, retire. One thread, no event loop, no clock but for counting its own work.

A step first admits waiting requests (one prefill for all of them, shared prefixes computed once), then samples one token for
every live sequence, then retires those that are over; their rows are reused at once. Weights change only between two steps,
by pointing the model at the other of two buffers: nothing is copied. Sequences may finish under the weights they began with
(mode "snapshot"): a step then computes for the rows of each version in turn (rows.py). With one buffer the engine pauses while
it is written. What it does not do: paging, preemption, speculative decoding. Admission is by order of arrival.
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
from corrente.engine.embedded.kv import KVCache, KVRows
from corrente.engine.embedded.rows import LiveRows, Segment
from corrente.engine.embedded.sampling import SamplingRules, compile_rules, draw
from corrente.engine.embedded.sequence import LiveSequence
from corrente.engine.embedded.stop import load_decoder, stop_ids
from corrente.engine.embedded.weights import Buffers, EmbeddedWeights
from corrente.errors import ConfigError, GenerationError, SyncError
from corrente.sync.base import Update
from corrente.sync.layout import Layout

Outcome = Completion | GenerationError
Ending = FinishReason | GenerationError

PREFILL_TOKENS = 4096
"""Prompt tokens admitted in one step, before what is shared is folded: bounds how long live sequences wait."""


class EmbeddedCore:
    """Serves one model. ``max_context`` 0 means what the model allows, at most 4096; ``path`` is auto, lean or hf. With
    ``adapters`` it loads the frozen weights from ``model``, and its layout holds the adapters alone. ``keep_routing``: record the
    experts of a mixture; None: where there are any."""

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
    ) -> None:
        if path not in ("auto", "lean", "hf"):
            raise ConfigError(f"engine.path: {path!r} given; auto, lean or hf are allowed")
        if max_sequences < 1:
            raise ConfigError(f"engine.max_sequences: {max_sequences} given; it must be at least 1")
        config = models.read_config(model)
        self._dtype, self._device = models.resolve_dtype(dtype, device), torch.device(device)
        self._limit = max_sequences
        self._context = models.context_limit(config, max_context)
        self._vocabulary: int = config.vocab_size
        self._model = models.build(
            config,
            path=path,
            dtype=self._dtype,
            device=self._device,
            context=self._context,
            source=model,
            adapters=adapters,
            keep_routing=keep_routing,
        )
        self._end_ids = models.end_ids(model, config)
        self._decode = load_decoder(model)
        self._cache = KVCache(max_rows=max_sequences, max_slots=self._context)
        self.buffers, self._paused = Buffers(Layout(())), False
        self._newest: EmbeddedWeights | None = None
        self._bound: EmbeddedWeights | None = None
        self._waiting: deque[LiveSequence] = deque()
        self._rows = LiveRows(self._cache)
        self._rules: list[SamplingRules] = []
        self._ids: set[str] = set()
        self._done: list[tuple[str, Outcome]] = []
        self._prefill_tokens = self._decode_tokens = 0
        self._busy_s = 0.0

    @property
    def idle(self) -> bool:
        """Nothing to do: no request waits or runs, or none may while paused, and no outcome waits to be fetched by ``step``."""
        return not (self._done or ((len(self._rows) or self._waiting) and not self._paused))

    @property
    def model(self) -> models.ModelPath:
        """The model path that computes: the lean one where it applies, else the modules of transformers."""
        return self._model

    @property
    def device(self) -> str:
        """Where it computes, and where its weight buffers have to be."""
        return str(self._device)

    @property
    def context(self) -> int:
        """Tokens of prompt and completion together, at most."""
        return self._context

    def stats(self) -> EngineStats:
        """Version -1 means that no weights have arrived yet."""
        return EngineStats(
            version=self._newest.version if self._newest else -1,
            running=len(self._rows),
            waiting=len(self._waiting),
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            busy_s=self._busy_s,
        )

    # ---- weights ----------------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """What the engine wants its weights to look like; see sync/layout.py."""
        return self._model.layout()

    def attach(self, buffers: Sequence[torch.Tensor]) -> None:
        """Take one or two uint8 buffers of ``layout().nbytes`` each, which somebody else fills."""
        self.buffers = Buffers(self.layout(), buffers)

    def pause(self) -> None:
        """Sample nothing until the next ``apply``: the only buffer is about to be written to. Live sequences stay as they are."""
        self._paused = True

    @property
    def held(self) -> Update | None:
        """The newest weights: those that the next request uses."""
        return self._newest.update if self._newest else None

    def vacant(self, slot: int) -> bool:
        """Whether no live sequence samples from buffer ``slot``. Unless the newest weights are there, it may be written to."""
        return all(segment.weights.slot != slot for segment in self._rows.segments)

    def apply(self, update: Update, mode: ApplyMode) -> None:
        """Sample from ``update`` from now on; what that means for live sequences: sync.base.ApplyMode.

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
        self._use(weights)
        if mode == "recompute" and len(self._rows):
            self._rebuild(before)
        if mode != "snapshot":
            self._rows.move_to(weights, rebuilt=mode == "recompute")
        self._newest, self._rules, self._paused = weights, [], False

    def _rebuild(self, before: EmbeddedWeights | None) -> None:
        """Compute the keys and values of all live sequences with the bound weights."""
        try:
            with self._working():
                filled = self._fill([live.cached for live in self._rows], first_row=0, donors=(), logits=False)
                for live, experts in zip(self._rows, filled.experts or (), strict=filled.experts is not None):
                    assert live.routes is not None
                    live.routes.reread(experts)
        except RuntimeError as error:
            if before:
                self._use(before)
            stays = ", the old weights stay" if before else ""
            raise SyncError(f"keys and values could not be rebuilt{stays}: {error}") from error
        self._prefill_tokens += filled.computed

    def _use(self, weights: EmbeddedWeights) -> None:
        """Point the model at ``weights``, if it is not there already."""
        if self._bound is not weights:
            self._model.bind(weights.tensors)
            self._bound = weights

    # ---- requests ---------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. GenerationError when it cannot be served as it is."""
        self._check(request)
        left = request.sampling.max_tokens - request.written
        room = self._context - len(request.tokens)
        if left > 0 and room <= 0:
            raise GenerationError(
                f"request {request.id}: {len(request.tokens)} tokens leave no room in {self._context}"
            )
        live = LiveSequence(
            request,
            room=min(room, left),
            stop_ids=self._end_ids | stop_ids(request.sampling, self._decode),
            decode=self._decode,
            vocabulary=self._vocabulary,
        )
        self._ids.add(request.id)
        if reason := live.over():
            self._finish(live, reason)
        else:
            self._waiting.append(live)

    def _check(self, request: Request) -> None:
        who, tokens = f"request {request.id}", request.tokens
        if self._newest is None:
            raise GenerationError(f"{who}: the engine holds no weights yet")
        if request.id in self._ids:
            raise GenerationError(f"{who}: an equal id is being served")
        if len(tokens) <= request.written:
            raise GenerationError(f"{who}: the prompt is empty")
        if request.written < 0:
            raise GenerationError(f"{who}: written is {request.written}; it counts tokens, from 0 on")
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            raise GenerationError(f"{who}: token ids must lie in [0, {self._vocabulary})")
        if request.sampling.stop and self._decode is None:
            raise GenerationError(f"{who}: stop strings need a tokenizer, and the model has none")

    def abort(self, ids: Sequence[str]) -> None:
        """End requests; what they have comes back from the next ``step`` with finish_reason "abort". Unknown ids are ignored."""
        named = set(ids)
        for live in [live for live in self._waiting if live.request.id in named]:
            self._waiting.remove(live)
            self._finish(live, "abort")
        with torch.inference_mode():
            self._retire({at: "abort" for at, live in enumerate(self._rows) if live.request.id in named})

    def partials(self, ids: Sequence[str]) -> dict[str, Completion]:
        """What the live requests among ``ids`` have sampled so far, as if they were aborted now; they go on."""
        named = set(ids)
        return {
            live.request.id: live.complete("abort", self._decode)
            for live in self._rows
            if live.sampled and live.request.id in named
        }

    def step(self) -> list[tuple[str, Outcome]]:
        """Admit, decode one token for every live sequence, and return what ended since the last step."""
        with self._working():
            if self._waiting and len(self._rows) < self._limit and not self._paused:
                self._admit()
            if len(self._rows) and not self._paused:
                self._advance()
        done, self._done = self._done, []
        return done

    def score(self, tokens: Tokens, top: int = 0, *, temperature: float = 1.0) -> Scores:
        """Log-probs of tokens[1:] given what precedes each, at ``temperature``, and the ``top`` likeliest at each place, by the
        newest weights, which the answer names. Counted in ``busy_s`` alone."""
        if self._newest is None:
            raise GenerationError("score: the engine holds no weights yet")
        if self._paused:
            raise GenerationError("score: the engine's weights are being written")
        if len(tokens) > self._context or (len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocabulary):
            raise GenerationError(f"score: at most {self._context} token ids in [0, {self._vocabulary}) are allowed")
        if not 0 <= top <= self._vocabulary:
            raise GenerationError(f"score: top is {top}; 0 to {self._vocabulary} are allowed")
        with self._working():
            self._use(self._newest)
            scores = prefill.score(
                self._model, tokens, top=top, temperature=temperature, dtype=self._dtype, device=self._device
            )
        return msgspec.structs.replace(scores, version=self._newest.version)

    # ---- the parts of a step ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Prefill as many waiting requests as there are rows, and sample the first token of each."""
        assert self._newest is not None
        weights, first = self._newest, len(self._rows)
        new: list[LiveSequence] = []
        tokens = 0
        while self._waiting and first + len(new) < self._limit:
            tokens += len(self._waiting[0].request.tokens)
            if new and tokens > PREFILL_TOKENS:
                break
            new.append(self._waiting.popleft())
        donors = [self._donor(row, live) for row, live in enumerate(self._rows) if live.kv is weights]
        self._use(weights)
        filled = self._fill([live.tokens for live in new], first_row=first, donors=donors, logits=True)
        assert filled.logits_SV is not None
        self._prefill_tokens += filled.computed
        for at, live in enumerate(new):
            live.filled(filled.experts[at] if filled.experts is not None else None)
        self._rows.append(new, weights)
        self._rules = []
        self._retire(self._sample(filled.logits_SV, self._compile(new), Segment(weights, first, first + len(new))))

    @staticmethod
    def _donor(row: int, live: LiveSequence) -> prefill.Donor:
        experts = live.routes.cached(live.length - 1) if live.routes is not None else None
        return prefill.Donor(row, live.cached, experts)

    def _advance(self) -> None:
        """One token for every live sequence: a forward pass over the rows of each version in use, newest last."""
        segments = self._rows.segments
        if not self._rules:
            self._rules = [self._compile(self._rows[segment.first : segment.stop]) for segment in segments]
        ended: dict[int, Ending] = {}
        for segment, rules in zip(segments, self._rules, strict=True):
            ended |= self._sample(self._forward(segment), rules, segment)
        self._retire(ended)

    def _forward(self, segment: Segment) -> torch.Tensor:
        """Logits of the next token of each sequence of a segment; its last token enters the cache."""
        rows = self._rows[segment.first : segment.stop]
        positions = np.array([live.length - 1 for live in rows], np.int64)
        longest = int(positions.max()) + 1
        self._cache.reserve(segment.stop, longest)
        ids = np.array([live.last for live in rows], np.int64)
        at_R1 = torch.from_numpy(positions).to(self._device)[:, None]
        hidden = torch.arange(longest, device=self._device) > at_R1
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)
        self._use(segment.weights)
        logits = self._model.forward(
            torch.from_numpy(ids).to(self._device)[:, None],
            at_R1,
            mask[:, None, None],
            KVRows(self._cache, at_R1[:, 0], longest, first=segment.first),
            torch.arange(len(rows), device=self._device),
        )
        if self._model.routing() is not None:
            for live, experts in zip(rows, self._model.routed(), strict=True):
                assert live.routes is not None
                live.routes.read(experts)
        return logits

    def _sample(self, logits: torch.Tensor, rules: SamplingRules, segment: Segment) -> dict[int, Ending]:
        """Draw a token for each sequence of a segment; the rows of those that it ends, and how."""
        rows = self._rows[segment.first : segment.stop]
        draws = draw(logits, rules, np.array([live.length for live in rows], np.int64))
        self._decode_tokens += len(rows)
        ended: dict[int, Ending] = {}
        drawn = zip(draws.tokens.tolist(), draws.logprobs.tolist(), draws.kept, strict=True)
        for row, live, (token, logprob, kept) in zip(range(segment.first, segment.stop), rows, drawn, strict=True):
            if not np.isfinite(logprob):
                ended[row] = GenerationError(f"request {live.request.id}: the model's log-probs are not finite")
            elif reason := live.push(token, logprob, segment.weights.version, kept):
                ended[row] = reason
        return ended

    # ---- bookkeeping ------------------------------------------------------------------------------------------------------

    def _fill(
        self, contexts: Sequence[Tokens], *, first_row: int, donors: Sequence[prefill.Donor], logits: bool
    ) -> prefill.Filled:
        self._cache.reserve(first_row + len(contexts), max(len(context) for context in contexts))
        return prefill.fill(
            self._model,
            self._cache,
            contexts,
            first_row=first_row,
            donors=donors,
            logits=logits,
            dtype=self._dtype,
            device=self._device,
        )

    def _compile(self, rows: Sequence[LiveSequence]) -> SamplingRules:
        return compile_rules(
            [(live.request.sampling, live.request.seed) for live in rows],
            vocabulary=self._vocabulary,
            device=self._device,
        )

    def _retire(self, ended: Mapping[int, Ending]) -> None:
        """End live sequences by row."""
        if ended:
            for row, live in enumerate(self._rows):
                if row in ended:
                    self._finish(live, ended[row])
            self._rows.remove(ended)
            self._rules = []

    def _finish(self, live: LiveSequence, how: Ending) -> None:
        outcome = how if isinstance(how, GenerationError) else live.complete(how, self._decode)
        self._ids.discard(live.request.id)
        self._done.append((live.request.id, outcome))

    @contextmanager
    def _working(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                yield
        finally:
            self._busy_s += time.perf_counter() - start
