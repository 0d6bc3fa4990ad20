"""Shapes of models: from a config.json, or from a table of well-known ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from corrente.errors import ConfigError


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder by the sizes that its cost depends on, as config.json names them.

    ``experts`` 0: a dense model. ``dense_layers``: the first layers of a mixture that are dense. ``kv_rank`` above 0: keys and
    values are kept compressed to so many numbers a layer (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434), and
    ``q_rank``, ``rope_dim``, ``value_dim`` are its other sizes.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    active_experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention of one layer."""
        if self.kv_rank:
            nope = self.head_dim
            queries = (
                self.hidden * self.q_rank + self.q_rank * self.heads * (nope + self.rope_dim)
                if self.q_rank
                else self.hidden * self.heads * (nope + self.rope_dim)
            )
            keys = self.hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * self.heads * (nope + self.value_dim)
            return queries + keys + self.heads * self.value_dim * self.hidden
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert of one layer."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def dense_parameters(self) -> int:
        """Parameters that every token uses in every layer, the output layer among them; without the input embedding."""
        feed_forward = (self.layers - self.moe_layers) * 3 * self.hidden * self.intermediate
        shared = self.moe_layers * (3 * self.hidden * self.shared_intermediate + self.hidden * self.experts)
        return self.layers * self.attention_parameters + feed_forward + shared + self.embedding_parameters

    @property
    def parameters(self) -> int:
        """All parameters, but for norms and biases."""
        embeddings = 0 if self.tied else self.embedding_parameters
        return self.dense_parameters + embeddings + self.moe_layers * self.experts * self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with."""
        return self.dense_parameters + self.moe_layers * self.active_experts * self.expert_parameters

    def read_parameters(self, tokens: float) -> float:
        """Parameters read by a pass over so many tokens: an expert is read if any of them is routed to it.

        Expected number under even routing: E (1 - (1 - k/E)^n).
        """
        if not self.experts:
            return float(self.dense_parameters)
        share = 1.0 - (1.0 - self.active_experts / self.experts) ** max(0.0, tokens)
        return self.dense_parameters + self.moe_layers * self.experts * share * self.expert_parameters

    @property
    def kv_numbers(self) -> int:
        """Numbers of keys and values kept for a token."""
        if self.kv_rank:
            return self.layers * (self.kv_rank + self.rope_dim)
        return 2 * self.layers * self.kv_heads * self.head_dim

    def attention_flops(self, context: float) -> float:
        """FLOPs of the scores and sums of attention of one sequence of ``context`` tokens, forward, causal: 2 L H D c^2."""
        width = self.head_dim + self.rope_dim if self.kv_rank else self.head_dim
        return 2.0 * self.layers * self.heads * width * context * context

    @property
    def largest_layer_parameters(self) -> int:
        layer = self.attention_parameters + (
            self.experts * self.expert_parameters if self.experts else 3 * self.hidden * self.intermediate
        )
        return max(layer, self.embedding_parameters)


def _dense(
    name: str, layers: int, hidden: int, heads: int, kv: int, dim: int, inner: int, vocabulary: int, tied: bool = False
) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv,
        head_dim=dim,
        intermediate=inner,
        vocabulary=vocabulary,
        tied=tied,
    )


def _mixture(name: str, base: ModelShape, experts: int, active: int, inner: int) -> ModelShape:
    return msgspec.structs.replace(base, name=name, experts=experts, active_experts=active, expert_intermediate=inner)


MODELS: Mapping[str, ModelShape] = {
    shape.name.lower(): shape
    for shape in (
        _dense("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, True),
        _dense("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151936, True),
        _dense("DeepSeek-R1-Distill-Qwen-1.5B", 28, 1536, 12, 2, 128, 8960, 151936),
        _dense("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064),
        _dense("Qwen2.5-Math-7B", 28, 3584, 28, 4, 128, 18944, 152064),
        _dense("DeepSeek-R1-Distill-Qwen-7B", 28, 3584, 28, 4, 128, 18944, 152064),
        _dense("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064),
        _dense("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, True),
        _dense("Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, 151936, True),
        _dense("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, True),
        _dense("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936),
        _dense("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936),
        _dense("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936),
        _mixture("Qwen3-30B-A3B", _dense("", 48, 2048, 32, 4, 128, 6144, 151936), 128, 8, 768),
        _mixture("Qwen3-235B-A22B", _dense("", 94, 4096, 64, 4, 128, 12288, 151936), 128, 8, 1536),
        _dense("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, True),
        _dense("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256),
        _dense("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape(
            name="DeepSeek-V3",
            layers=61,
            hidden=7168,
            heads=128,
            kv_heads=128,
            head_dim=128,
            intermediate=18432,
            vocabulary=129280,
            experts=256,
            active_experts=8,
            expert_intermediate=2048,
            shared_intermediate=2048,
            dense_layers=3,
            q_rank=1536,
            kv_rank=512,
            rope_dim=64,
            value_dim=128,
        ),
    )
}
"""Well-known models by name in lower case, from their config.json."""


def find_model(name: str) -> ModelShape:
    """The shape of a model: a directory with a config.json, such a file, or a name of ``MODELS``. ConfigError for neither."""
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return read_shape(file)
    short = name.rpartition("/")[2].lower()
    for ending in ("", "-instruct", "-base"):
        if short.endswith(ending) and (found := MODELS.get(short.removesuffix(ending))) is not None:
            return found
    known = ", ".join(shape.name for shape in MODELS.values())
    raise ConfigError(f"no model {name!r} is known: give a directory with a config.json, or one of {known}")


def read_shape(file: Path) -> ModelShape:
    """The shape that a config.json describes. ConfigError when a size is missing."""
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    values = values.get("text_config") or values

    def size(*names: str, default: int | None = None) -> int:
        for name in names:
            if isinstance(values.get(name), int):
                return int(values[name])
        if default is None:
            raise ConfigError(f"{file}: it has no {names[0]!r}; the shape of this model is not known")
        return default

    hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    experts = size("num_experts", "n_routed_experts", "num_local_experts", default=0)
    latent = size("kv_lora_rank", default=0)
    expert_inner = size("moe_intermediate_size", "intermediate_size", default=0) if experts else 0
    layers = size("num_hidden_layers", "n_layer")
    return ModelShape(
        name=file.parent.name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("qk_nope_head_dim", default=0) if latent else size("head_dim", default=hidden // heads),
        intermediate=size("intermediate_size", "n_inner", default=4 * hidden),
        vocabulary=size("vocab_size"),
        tied=bool(values.get("tie_word_embeddings", False)),
        experts=experts,
        active_experts=size("num_experts_per_tok", default=0) if experts else 0,
        expert_intermediate=expert_inner,
        shared_intermediate=size("shared_expert_intermediate_size", default=0)
        or size("n_shared_experts", default=0) * expert_inner,
        dense_layers=size("first_k_dense_replace", default=0) if experts else 0,
        q_rank=size("q_lora_rank", default=0) if latent else 0,
        kv_rank=latent,
        rope_dim=size("qk_rope_head_dim", default=0) if latent else 0,
        value_dim=size("v_head_dim", default=0) if latent else 0,
    )
