"""An unmodified Hugging Face causal LM: loading it, and calling it on the inputs of a micro-batch.

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

from corrente.errors import ConfigError
from corrente.learner import attention
from corrente.learner.packing import PackInputs
from corrente.models.progress_bars import no_progress_bars


def load_model(path: Path, *, device: str) -> Any:
    """Load a Hugging Face causal LM in float32, without dropout, in evaluation mode.

    Raises ConfigError where ``path`` holds none, or lacks some of its weights.
    """
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        with no_progress_bars():
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            # sdpa does no soft capping of attention scores: models that cap them need their own code
            kind = "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else "sdpa"
            options: dict[str, Any] = {"attn_implementation": kind, "local_files_only": True}
            model, notes = load(path, config=config, dtype=torch.float32, output_loading_info=True, **options)
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


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters."""
    return next(model.parameters()).device


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An array as a tensor of the same type on ``device``."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def hidden_states(model: Any, inputs: PackInputs) -> Tensor:
    """Hidden states (B * N, H) of the positions of ``inputs`` after the last norm."""
    return model.base_model(**_arguments(model, inputs)).last_hidden_state.flatten(0, 1)


def model_logits(model: Any, inputs: PackInputs) -> Tensor:
    """The model's own logits (B * N, V) at the positions of ``inputs``."""
    return model(**_arguments(model, inputs)).logits.flatten(0, 1)


def _arguments(model: Any, inputs: PackInputs) -> dict[str, Any]:
    device = device_of(model)
    arguments: dict[str, Any] = {"input_ids": to_device(inputs.tokens, device).long(), "use_cache": False}
    if inputs.tree is not None:
        arguments["position_ids"] = to_device(inputs.positions, device)
        # models leave a mask of four dimensions as it is: this one only keeps them from making their own
        arguments["attention_mask"] = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
        arguments["tree_blocks"] = attention.tree_blocks(inputs.tree, device=device)
    elif inputs.mask is not None:
        # rows begin at position 0, as models assume; recurrent ones do not take positions at all
        arguments["attention_mask"] = to_device(inputs.mask, device).long()
    return arguments
