"""The engine: a synchronous loop of admit, decode, retire. One thread, no event loop, no clock but for counting its own work.

A step first admits waiting requests (one prefill for all of them, shared prefixes computed once), then samples one token for
every live sequence, then retires those that are over; their rows are reused at once. Weights change only between two steps,
by pointing the model at the other of two buffers: nothing is copied.

What it does not do: paging, preemption, speculative decoding. Admission is by order of arrival.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from corrente.engine.base import ApplyMode, EngineStats
from corrente.engine.embedded import model as models
from corrente.engine.embedded import prefill
from corrente.engine.embedded.kv import KVCache, Rows
from corrente.engine.embedded.sampling import Rules, compile_rules, draw
from corrente.engine.embedded.sequence import Live
from corrente.engine.embedded.stop import load_decoder
from corrente.engine.embedded.weights import Buffers
from corrente.errors import ConfigError, GenerationError, SyncError
from corrente.sync.base import Update
from corrente.sync.layout import Layout
from corrente.types import Completion, FinishReason, Floats, Request, Tokens

Outcome = Completion | GenerationError

PREFILL_TOKENS = 4096
"""Prompt tokens admitted in one step, before what is shared is folded: bounds how long live sequences wait."""


class EngineCore:
    """Serves one model. ``max_context`` 0 means what the model allows, at most 4096; ``path`` is auto, lean or hf."""

    def __init__(
        self,
        *,
        model: Path,
        dtype: str = "float32",
        device: str = "cpu",
        max_sequences: int = 64,
        max_context: int = 0,
        path: str = "auto",
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
        self._model = models.build(config, path=path, dtype=self._dtype, device=self._device, context=self._context)
        self._end_ids = models.end_ids(model, config)
        self._decode = load_decoder(model)
        self._cache = KVCache(max_rows=max_sequences, max_slots=self._context)
        self._buffers: Buffers | None = None
        self._update: Update | None = None
        self._waiting: deque[Live] = deque()
        self._live: list[Live] = []
        self._ids: set[str] = set()
        self._rules: Rules | None = None
        self._done: list[tuple[str, Outcome]] = []
        self._prefill_tokens = self._decode_tokens = 0
        self._busy_s = 0.0

    @property
    def idle(self) -> bool:
        """Nothing to do: no request waits or runs, and no outcome waits to be fetched by ``step``."""
        return not (self._live or self._waiting or self._done)

    @property
    def context(self) -> int:
        """Tokens of prompt and completion together, at most."""
        return self._context

    def stats(self) -> EngineStats:
        """Version -1 means that no weights have arrived yet."""
        return EngineStats(
            version=self._update.version if self._update else -1,
            running=len(self._live),
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
        """Take two uint8 buffers of ``layout().nbytes`` each, which somebody else fills."""
        self._buffers = Buffers(self.layout(), buffers)

    def apply(self, update: Update, mode: ApplyMode) -> None:
        """Sample from ``update`` from now on. ``recompute`` rebuilds the keys and values of live sequences under it.

        SyncError when there is no such buffer, or when rebuilding fails; the old weights are then in use as before.
        """
        if self._buffers is None or not 0 <= update.slot < len(self._buffers):
            raise SyncError(
                f"version {update.version} is said to be in buffer {update.slot}, which the engine was not given"
            )
        before, self._update = self._update, update
        self._model.bind(self._buffers[update.slot])
        for live in self._live:
            live.kv_version = None
        if mode == "recompute" and self._live:
            self._rebuild(before)

    def _rebuild(self, before: Update | None) -> None:
        try:
            with self._working():
                contexts = [live.cached for live in self._live]
                filled = self._fill(contexts, first_row=0, donors=(), logits=False)
        except RuntimeError as error:
            if before is not None and self._buffers is not None:
                self._update = before
                self._model.bind(self._buffers[before.slot])
            raise SyncError(f"keys and values could not be rebuilt, the old weights stay: {error}") from error
        self._prefill_tokens += filled.computed
        for live in self._live:
            live.kv_version = self._version

    @property
    def _version(self) -> int:
        assert self._update is not None
        return self._update.version

    # ---- requests ---------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. GenerationError when it cannot be served as it is."""
        if self._update is None:
            raise GenerationError(f"request {request.id}: the engine holds no weights yet")
        if request.id in self._ids:
            raise GenerationError(f"request {request.id}: an equal id is being served")
        tokens, sampling = request.tokens, request.sampling
        if not len(tokens):
            raise GenerationError(f"request {request.id}: the prompt is empty")
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            raise GenerationError(f"request {request.id}: token ids must lie in [0, {self._vocabulary})")
        room = self._context - len(tokens)
        if room <= 0:
            raise GenerationError(f"request {request.id}: {len(tokens)} tokens leave no room in {self._context}")
        if sampling.stop and self._decode is None:
            raise GenerationError(f"request {request.id}: stop strings need a tokenizer, and the model has none")
        live = Live(
            request,
            room=min(room, sampling.max_tokens),
            stop_ids=self._end_ids | frozenset(sampling.stop_token_ids),
            decode=self._decode,
        )
        self._ids.add(request.id)
        if live.room <= 0:
            self._finish(live, "length")
        else:
            self._waiting.append(live)

    def abort(self, ids: Sequence[str]) -> None:
        """End requests; what they have comes back from the next ``step`` with finish_reason "abort". Unknown ids are ignored."""
        named = set(ids)
        for live in [live for live in self._waiting if live.request.id in named]:
            self._waiting.remove(live)
            self._finish(live, "abort")
        with torch.inference_mode():
            self._retire({at: "abort" for at, live in enumerate(self._live) if live.request.id in named})

    def step(self) -> list[tuple[str, Outcome]]:
        """Admit, decode one token for every live sequence, and return what ended since the last step."""
        with self._working():
            if self._waiting and len(self._live) < self._limit:
                self._admit()
            if self._live:
                self._advance()
        done, self._done = self._done, []
        return done

    def score(self, tokens: Tokens) -> Floats:
        """Log-prob of tokens[1:] given what precedes each, at temperature 1: (T-1,)."""
        if self._update is None:
            raise GenerationError("score: the engine holds no weights yet")
        if len(tokens) > self._context or (len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocabulary):
            raise GenerationError(f"score: at most {self._context} token ids in [0, {self._vocabulary}) are allowed")
        with self._working():
            return prefill.score(self._model, tokens, dtype=self._dtype, device=self._device)

    # ---- the parts of a step ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Prefill as many waiting requests as there are rows, and sample the first token of each."""
        new: list[Live] = []
        tokens = 0
        while self._waiting and len(self._live) + len(new) < self._limit:
            tokens += len(self._waiting[0].request.tokens)
            if new and tokens > PREFILL_TOKENS:
                break
            new.append(self._waiting.popleft())
        donors = [
            prefill.Donor(row, live.cached) for row, live in enumerate(self._live) if live.kv_version == self._version
        ]
        filled = self._fill([live.tokens for live in new], first_row=len(self._live), donors=donors, logits=True)
        assert filled.logits_SV is not None
        self._prefill_tokens += filled.computed
        first = len(self._live)
        self._live.extend(new)
        self._rules = None
        for live in new:
            live.kv_version = self._version
        self._sample(filled.logits_SV, self._compile(new), first)

    def _advance(self) -> None:
        """One token for every live sequence."""
        positions = np.array([live.length - 1 for live in self._live], np.int64)
        longest = int(positions.max()) + 1
        self._cache.reserve(len(self._live), longest)
        ids = np.array([live.context[live.length - 1] for live in self._live], np.int64)
        at_R1 = torch.from_numpy(positions).to(self._device)[:, None]
        hidden = torch.arange(longest, device=self._device) > at_R1
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)
        logits = self._model.forward(
            torch.from_numpy(ids).to(self._device)[:, None],
            at_R1,
            mask[:, None, None],
            Rows(self._cache, at_R1[:, 0], longest),
            torch.arange(len(self._live), device=self._device),
        )
        if self._rules is None:
            self._rules = self._compile(self._live)
        self._sample(logits, self._rules, 0)

    def _sample(self, logits: torch.Tensor, rules: Rules, first: int) -> None:
        """Draw a token for the live sequences from ``first`` on, and retire those that it ends."""
        drawn_for = self._live[first:]
        tokens, logprobs = draw(logits, rules, np.array([live.length for live in drawn_for], np.int64))
        self._decode_tokens += len(drawn_for)
        ended: dict[int, FinishReason | GenerationError] = {}
        for row, (live, token, logprob) in enumerate(
            zip(drawn_for, tokens.tolist(), logprobs.tolist(), strict=True), start=first
        ):
            if not np.isfinite(logprob):
                ended[row] = GenerationError(f"request {live.request.id}: the model's log-probs are not finite")
            elif reason := live.push(token, logprob, self._version):
                ended[row] = reason
        self._retire(ended)

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

    def _compile(self, rows: Sequence[Live]) -> Rules:
        return compile_rules(
            [(live.request.sampling, live.request.seed) for live in rows],
            vocabulary=self._vocabulary,
            device=self._device,
        )

    def _retire(self, ended: dict[int, FinishReason | GenerationError]) -> None:
        """End live sequences by row; the last row takes the place of each."""
        for row in sorted(ended, reverse=True):
            self._finish(self._live[row], ended[row])
            moved = self._live.pop()
            if row < len(self._live):
                self._live[row] = moved
                self._cache.move(len(self._live), row, moved.length - 1)
        if ended:
            self._rules = None

    def _finish(self, live: Live, how: FinishReason | GenerationError) -> None:
        outcome = how if isinstance(how, GenerationError) else live.complete(how, self._decode)
        self._ids.discard(live.request.id)
        self._done.append((live.request.id, outcome))

    @contextmanager
    def _working(self) -> Iterator[None]:
        start = time.perf_counter()
        with torch.inference_mode():
            yield
        self._busy_s += time.perf_counter() - start
