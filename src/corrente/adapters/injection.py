"""peft puts low-rank adapters into a model, in place: y = W x + (alpha / rank) B A x (Hu et al. 2021, arXiv:2106.09685).

The learner and an engine call the same function with the same settings, so they agree on what is adapted and how it is named.
Names are those of a peft directory, which is what ``tensors`` ships and checkpoints hold: "base_model.model.", the layer,
"lora_A.weight". The modules are peft's own; nothing is wrapped around the model, so its class, its attributes and the names of
what is not adapted stay.

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
from corrente.adapters.base import PREFIX, Factor, matches, unmatched
from corrente.errors import ConfigError

NAME = "default"
"""peft's name for the only adapter; it does not appear in ours."""
ALL_LINEAR = "all-linear"
_OWN_NAME = re.compile(rf"(\.lora_\w+)\.{NAME}(?=\.|$)")


def require_peft() -> Any:
    """The peft module. ConfigError, with what to install, where it is missing."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"adapters.kind: LoRA needs {error.name}: pip install 'corrente[lora]'") from error
    return peft


def inject(model: Any, settings: config.Lora | config.LoraMerged, *, source: Path, seed: int = 0) -> Any:
    """Add adapters that change nothing yet (B is 0, A is drawn from ``seed``), freeze the rest, and return peft's configuration
    of them. The model may be on the meta device. Raises ConfigError for what the model does not have."""
    peft = require_peft()
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    for target in settings.target_parameters:
        if not matches(target, parameters):
            raise ConfigError(unmatched("adapters.target_parameters", target, parameters, parts=2))
    made = _peft_config(peft, settings, source)
    meta = next(model.parameters()).is_meta
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*_pattern keys did not match"
            )  # of parameters peft itself added
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


def outline(source: Path) -> Any:
    """The model of a directory without its weights, on the meta device. Raises ConfigError."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {str(source)!r}: not a causal LM that can be loaded: {error}") from error


def verify(source: Path, settings: config.Lora | config.LoraMerged) -> dict[str, Factor]:
    """Every adapter tensor the settings ask for, by the name it is shipped under; from the model's configuration alone, no
    weights are read. Raises ConfigError."""
    model = outline(source)
    inject(model, settings, source=source)
    return factors(model)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters, by the name they are shipped under."""
    return {shipped_name(name): p for name, p in model.named_parameters() if ".lora_" in name}


def shipped_name(name: str) -> str:
    """A parameter's name in a peft directory."""
    return PREFIX + _OWN_NAME.sub(r"\1", name)


def base_name(name: str) -> str:
    """What a state-dict entry of an adapted model was called before the adapters came."""
    return name.replace(".base_layer", "")


def factors(model: nn.Module) -> dict[str, Factor]:
    """Shape and scaling of every adapter tensor, by the name it is shipped under."""
    scalings = {name: layer.scaling[NAME] for name, layer in adapted(model)}
    return {
        shipped_name(name): Factor(tuple(p.shape), float(scalings[name.partition(".lora_")[0]]))
        for name, p in model.named_parameters()
        if ".lora_" in name
    }


def adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that have an adapter, by name."""
    from peft.tuners.lora.layer import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Inside, the model is what it was before the adapters came."""
    layers = [layer for _, layer in adapted(model)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def holding(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the adapters have the values of ``tensors``; nothing is copied."""
    own = trained(model)
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
    """ConfigError for a target that no layer has. What peft turned into a target parameter was a name of an older layout."""
    for target in settings.targets:
        turned = target not in (made.target_modules or ()) and bool(made.target_parameters)
        if target != ALL_LINEAR and not turned and not matches(target, modules):
            raise ConfigError(unmatched("adapters.targets", target, modules))


class _GradientDropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.dropout(input, self.p, training=torch.is_grad_enabled())


def _dropout_with_gradient(model: nn.Module) -> None:
    for _, layer in adapted(model):
        for name, dropout in layer.lora_dropout.items():
            if isinstance(dropout, nn.Dropout):
                layer.lora_dropout[name] = _GradientDropout(dropout.p)
