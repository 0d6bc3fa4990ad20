"""Low-rank adapters, added to a model in place by peft: y = W x + (alpha / rank) B A x (Hu et al. 2021, arXiv:2106.09685).

The learner and an engine call the same function with the same settings, so they agree on what is adapted and how it is named.
Names are those of a peft directory, which ``tensors`` ships and checkpoints hold: "base_model.model.", the layer,
"lora_A.weight". The modules are peft's own; nothing is wrapped around the model, so its class, its attributes and the names of
layers without adapters stay.

Adapters' dropout acts where a gradient is recorded, and nowhere else: not when a frozen policy or a probe is computed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from corrente import config
from corrente.adapters.base import PREFIX, Factor, matches_layer, unmatched_message
from corrente.errors import ConfigError

NAME = "default"
"""peft's name for the only adapter; it does not appear in ours."""
ALL_LINEAR = "all-linear"
_OWN_NAME = re.compile(rf"(\.lora_\w+)\.{NAME}(?=\.|$)")


def require_peft() -> Any:
    """Import and return peft. Raises ConfigError, with the package to install, where it is missing."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"adapters.kind: LoRA needs {error.name}: pip install 'corrente[lora]'") from error
    return peft


def inject_adapters(model: Any, settings: config.Lora | config.LoraMerged, *, source: Path, seed: int = 0) -> Any:
    """Add adapters that change nothing yet (B is 0, A is drawn from ``seed``), freeze the rest, and return peft's configuration.

    The model may be on the meta device. Raises ConfigError for a target that the model does not have.
    """
    peft = require_peft()
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    for target in settings.target_parameters:
        if not matches_layer(target, parameters):
            raise ConfigError(unmatched_message("adapters.target_parameters", target, parameters, parts=2))
    made = _peft_config(peft, settings, source)
    meta = next(model.parameters()).is_meta
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*_pattern keys did not match"
            )  # those of parameters peft itself added
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # and then sets it right
            warnings.filterwarnings(
                "ignore", message="Model has `tie_word_embeddings=True`"
            )  # merging refuses it itself
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(made, model, adapter_name=NAME, low_cpu_mem_usage=meta)
    except (ValueError, TypeError) as error:
        _refuse_unmatched(settings, made, modules)
        raise ConfigError(f"adapters.targets = {list(settings.targets)}: {error}") from error
    _refuse_unmatched(settings, made, modules)
    _dropout_with_gradient(model)
    return made


def meta_model(source: Path) -> Any:
    """The model of a directory without its weights, on the meta device. Raises ConfigError."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {str(source)!r}: not a causal LM that can be loaded: {error}") from error


def verify_targets(source: Path, settings: config.Lora | config.LoraMerged) -> dict[str, Factor]:
    """Check the targets, and return every adapter tensor the settings ask for by the name it is shipped under.

    From the model's configuration alone; no weights are read. Raises ConfigError.
    """
    model = meta_model(source)
    inject_adapters(model, settings, source=source)
    return adapter_factors(model)


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters, by the name they are shipped under."""
    return {shipped_name(name): p for name, p in model.named_parameters() if ".lora_" in name}


def shipped_name(name: str) -> str:
    """A parameter's name in a peft directory."""
    return PREFIX + _OWN_NAME.sub(r"\1", name)


def base_name(name: str) -> str:
    """The name that a state-dict entry of an adapted model had before the adapters were added."""
    return name.replace(".base_layer", "")


def adapter_factors(model: nn.Module) -> dict[str, Factor]:
    """Shape and scaling of every adapter tensor, by the name it is shipped under."""
    scalings = {name: layer.scaling[NAME] for name, layer in adapted_layers(model)}
    return {
        shipped_name(name): Factor(tuple(p.shape), float(scalings[name.partition(".lora_")[0]]))
        for name, p in model.named_parameters()
        if ".lora_" in name
    }


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that have an adapter, by name."""
    from peft.tuners.lora.layer import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Inside the context the model is the one without adapters."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def adapters_replaced(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the context the adapters have the values of ``tensors``; nothing is copied."""
    own = adapter_parameters(model)
    before = {name: parameter.data for name, parameter in own.items()}
    for name, parameter in own.items():
        parameter.data = tensors[name]
    try:
        yield
    finally:
        for name, parameter in own.items():
            parameter.data = before[name]


def _peft_config(peft: Any, settings: config.Lora | config.LoraMerged, source: Path) -> Any:
    targets = settings.targets
    return peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets),
        target_parameters=list(settings.target_parameters) or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(source.absolute()),
    )


def _refuse_unmatched(settings: config.Lora | config.LoraMerged, made: Any, modules: list[str]) -> None:
    """Raise ConfigError for a target that no layer has. A target that peft turned into a target parameter is the name that the
    layer has in an older layout of the model."""
    for target in settings.targets:
        turned = target not in (made.target_modules or ()) and bool(made.target_parameters)
        if target != ALL_LINEAR and not turned and not matches_layer(target, modules):
            raise ConfigError(unmatched_message("adapters.targets", target, modules))


class _GradientDropout(nn.Dropout):
    """Dropout that acts where a gradient is recorded, whatever the mode of the module."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.dropout(input, self.p, training=torch.is_grad_enabled())


def _dropout_with_gradient(model: nn.Module) -> None:
    for _, layer in adapted_layers(model):
        for name, dropout in layer.lora_dropout.items():
            if isinstance(dropout, nn.Dropout):
                layer.lora_dropout[name] = _GradientDropout(dropout.p)
