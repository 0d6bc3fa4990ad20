"""An unmodified Hugging Face causal LM as a function from a micro-batch to log-probabilities of its trained tokens.

Two ways to forward a micro-batch, equal in value:
- as a prefix tree: one sequence of distinct prefixes, with attention (attention.py) and positions of our making. Nothing is
  computed twice.
- as padded rows, for architectures that do not take these (recurrent ones, for example), and for micro-batches deeper than a
  sliding attention window. Which one applies is found out when the model is loaded, by comparing both on a probe.

Likewise the output layer is applied to the predicting positions alone where hidden state and output weights give the model's
logits, as a second probe finds out; otherwise (scaled or capped logits) the model's own logits are used.

Precision: parameters, gradients and optimizer state are float32. With ``model.dtype`` bfloat16 (and auto, on an accelerator that
has it) matrix products run in bfloat16 under autocast; softmax, loss and update stay in float32.
Dropout is switched off: the policy that is trained must be the one that sampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from corrente.data.types import Tokens
from corrente.errors import AlignmentError, ConfigError
from corrente.learner import attention
from corrente.learner.base import Pulse, unheard
from corrente.learner.head import TokenLogprobs, from_logits, token_logprobs
from corrente.learner.lessons import also
from corrente.learner.packing import Inputs, Pack, as_rows, as_tree
from corrente.learner.support import KeptSets
from corrente.models.moe_routing import routers_of
from corrente.models.progress_bars import no_progress_bars

BLOCK_TOKENS = {"cpu": 96, "accelerator": 1024}
"""Nodes attended to at once: small enough to skip what a tree masks, large enough to be worth a call."""
PROBE_TOLERANCE = 2e-5
"""Relative; float32 rounding is 1e-6, a wrong mask is far above even in a model of small random weights."""


def load_model(path: Path, *, device: str) -> Any:
    """A Hugging Face causal LM in float32, without dropout, in evaluation mode. Raises ConfigError when there is none, or not all
    of it."""
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        with no_progress_bars():
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            kind = "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else "sdpa"
            told: dict[str, Any] = {"attn_implementation": kind, "local_files_only": True, "output_loading_info": True}
            model, notes = load(path, config=config, dtype=torch.float32, **told)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {str(path)!r}: not a causal LM that can be loaded: {error}") from error
    if missing := sorted(notes["missing_keys"]):  # transformers fills these with random numbers
        raise ConfigError(f"model.path = {str(path)!r}: there are no weights for {missing[0]}; give a complete model")
    for module in model.modules():
        for name in ("p", "attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float) and (name != "p" or isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)
    return model.to(device).eval()


def recompute_activations(model: Any) -> None:
    """Keep one activation a layer and recompute the rest in the backward pass. Raises ConfigError where a model cannot."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"learner.gradient_checkpointing = true: {error}") from error


def compute_dtype(wanted: str, device: str) -> torch.dtype:
    """The dtype of matrix products for ``model.dtype``."""
    if wanted == "auto":
        accelerator = device.startswith("cuda") and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if accelerator else torch.float32
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


class Policy:
    """Log-probabilities under one model. Holds no optimizer and takes no step."""

    def __init__(self, model: Any, *, temperature: float = 1.0, dtype: torch.dtype | None = None) -> None:
        self.model = model
        self.temperature = temperature or 1.0
        self.pulse: Pulse = unheard
        """Called before each forward pass."""
        self.device = next(model.parameters()).device
        self.dtype: torch.dtype = dtype or next(model.parameters()).dtype
        self._block_tokens = BLOCK_TOKENS["cpu" if self.device.type == "cpu" else "accelerator"]
        self._window = _sliding_window(model.config)
        self._routers = routers_of(model)
        before = model.config._attn_implementation
        model.set_attn_implementation(attention.NAME)
        self.folds = self._probe_tree()
        if not self.folds:
            model.set_attn_implementation(before)
        self.splits = self._probe_head()

    def logprobs(self, pack: Pack, *, likeliest: bool = False) -> tuple[TokenLogprobs, Inputs]:
        """Log-probs (K,) of the trained tokens, at the sampling temperature, among what was kept for each draw and through the
        experts that were kept, and what was forwarded to get them; with ``likeliest``, also those of the tokens that teachers
        find likeliest."""
        self.pulse()
        deepest = max(len(context) for context in pack.contexts)
        tree = self.folds and (self._window is None or deepest <= self._window)
        inputs = as_tree(pack) if tree else as_rows(pack)
        slot_K, targets_K = self._tensor(inputs.slot_K), self._tensor(pack.targets_K)
        select_M = self._tensor(inputs.select_M)
        more_KJ = also(pack.said) if likeliest else None
        also_KJ = None if more_KJ is None else self._tensor(more_KJ).long()
        kept = None if inputs.support is None else KeptSets(inputs.support, device=self.device)
        self._lay_down(inputs)
        with torch.autocast(self.device.type, self.dtype, enabled=self._mixed):
            if not self.splits:
                logits = self.model(**self._arguments(inputs)).logits.flatten(0, 1)[select_M]
                kwargs = {"slot_K": slot_K, "targets_K": targets_K, "temperature": self.temperature}
                return from_logits(logits, **kwargs, also_KJ=also_KJ, kept=kept), inputs
            hidden_MH = self._hidden(inputs)[select_M].to(self.dtype)
        head = self.model.get_output_embeddings()
        out = token_logprobs(
            hidden_MH,
            head.weight,
            getattr(head, "bias", None),
            slot_K=slot_K,
            targets_K=targets_K,
            temperature=self.temperature,
            also_KJ=also_KJ,
            kept=kept,
        )
        return out, inputs

    def _lay_down(self, inputs: Inputs) -> None:
        """Have the next forward pass, and its recomputation, route as was recorded."""
        if not isinstance(self._routers, str):
            self._routers.replay(None if inputs.experts is None else self._tensor(inputs.experts).long())
        elif inputs.experts is not None:
            raise AlignmentError(
                f"the rows say which experts were chosen, but they cannot be replayed: {self._routers}"
            )

    @property
    def _mixed(self) -> bool:
        return self.dtype in (torch.bfloat16, torch.float16)

    def _hidden(self, inputs: Inputs) -> Tensor:
        """Hidden states (B * N, H) after the last norm."""
        return self.model.base_model(**self._arguments(inputs)).last_hidden_state.flatten(0, 1)

    def _arguments(self, inputs: Inputs) -> dict[str, Any]:
        arguments: dict[str, Any] = {"input_ids": self._tensor(inputs.tokens).long(), "use_cache": False}
        if inputs.tree is not None:
            arguments["position_ids"] = self._tensor(inputs.positions)
            # models leave a mask of four dimensions as it is: this one only keeps them from making their own
            arguments["attention_mask"] = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device)
            arguments["tree_blocks"] = attention.blocks(inputs.tree, size=self._block_tokens, device=self.device)
        elif inputs.mask is not None:
            # rows begin at position 0, as models assume; recurrent ones do not take positions at all
            arguments["attention_mask"] = self._tensor(inputs.mask).long()
        return arguments

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    @torch.no_grad()
    def _probe_tree(self) -> bool:
        """Whether a folded batch gives every position the hidden state it has in its own sequence."""
        pack = _probe(self.model.config)
        try:
            folded = self._hidden(as_tree(pack))[as_tree(pack).select_M]
        except (TypeError, ValueError, RuntimeError, IndexError):
            return False
        for r, context in enumerate(pack.contexts):
            ids = self._tensor(context).long()[None]
            alone = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
            mine = pack.row_K == r
            if not _close(folded[self._tensor(as_tree(pack).slot_K[mine])], alone[self._tensor(pack.at_K[mine])]):
                return False
        return True

    @torch.no_grad()
    def _probe_head(self) -> bool:
        """Whether output weights times hidden state are the model's logits."""
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            return False
        inputs = as_rows(_probe(self.model.config))
        logits = self.model(**self._arguments(inputs)).logits.flatten(0, 1)[inputs.select_M]
        return _close(head(self._hidden(inputs)[inputs.select_M]), logits)


def _probe(config: Any) -> Pack:
    """Three sequences that share beginnings and differ in length; every position is asked for."""
    ids: Tokens = (np.arange(7, 23, dtype=np.int32) * 37) % config.get_text_config().vocab_size
    contexts = (ids[:8], np.concatenate([ids[:5], ids[9:16]]), np.concatenate([ids[:5], ids[8:11]]))
    counts = [len(context) for context in contexts]
    at_K = np.concatenate([np.arange(count) for count in counts])
    blank_K = np.zeros(len(at_K), np.float32)
    return Pack(
        contexts=contexts,
        row_K=np.repeat(np.arange(3), counts),
        at_K=at_K,
        targets_K=np.zeros(len(at_K), np.int64),
        behaviour_K=blank_K,
        advantages_K=blank_K,
        weights_K=blank_K.astype(np.float64),
        lags_K=np.zeros(len(at_K), np.int32),
        mixed_K=np.zeros(len(at_K), np.bool_),
    )


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= PROBE_TOLERANCE * b.abs().max())


def _sliding_window(config: Any) -> int | None:
    """Depth from which some layer no longer sees everything before it; None when every layer always does."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if getattr(text, "window_size", None):
        return 0
    if (kinds and all(kind == "full_attention" for kind in kinds)) or not getattr(text, "use_sliding_window", True):
        return None
    limits = (getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return min((limit for limit in limits if limit), default=None)
