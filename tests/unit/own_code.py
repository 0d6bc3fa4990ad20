"""Model folders with Python code of their own, which leaves a marker when it is imported, and pickles that leave one."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

FILE = "modeling_own.py"
CODE = """
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification, LlamaModel, LlamaPreTrainedModel
from transformers import PreTrainedTokenizerFast
from transformers.modeling_outputs import SequenceClassifierOutput

with Path({marker!r}).open("a") as marker:
    marker.write("imported\\n")


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


class OwnForSequenceClassification(LlamaPreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = torch.nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask):
        scores = self.score(self.model(input_ids, attention_mask=attention_mask).last_hidden_state)
        return SequenceClassifierOutput(logits=scores[torch.arange(len(scores)), attention_mask.sum(-1) - 1])


class OwnForTokenClassification(LlamaForTokenClassification):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
AUTO_MAP = {
    "AutoConfig": "modeling_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    "AutoModelForSequenceClassification": "modeling_own.OwnForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_own.OwnForTokenClassification",
}


def give_code(folder: Path, marker: Path, *, model_type: str = "own", tokenizer: bool = False) -> Path:
    """Have a folder with a model say that its classes are those of ``FILE``; with ``tokenizer``, that of its tokenizer alone.
    ``model_type``: what transformers takes the model for, which has classes for "llama" and none for "own"."""
    (folder / FILE).write_text(CODE.format(marker=str(marker)))
    if tokenizer:
        named = {"auto_map": {"AutoTokenizer": [None, "modeling_own.OwnTokenizer"]}}
        unknown = {"tokenizer_class": "OwnTokenizer"} if model_type == "own" else {}
        _update(folder / "tokenizer_config.json", named | unknown)
        _update(folder / "config.json", {"model_type": model_type})
    else:
        _update(folder / "config.json", {"auto_map": AUTO_MAP, "model_type": model_type})
    return folder


class Malicious:
    """An object whose pickle leaves a marker where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._marker,)


def write_pickle(file: Path, marker: Path) -> Path:
    """A file as torch wrote them before its zip format, which is a pickle."""
    file.write_bytes(pickle.dumps(Malicious(marker), protocol=2))
    return file


def _update(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
