"""A fused forward pass for the Llama family: Llama, Mistral, Qwen2, Qwen3, SmolLM.

It computes the same as the Hugging Face modules, and differs from the textbook in these ways:

- activations are feature-major, [features, tokens], so that every product is ``weight [out, in] @ x [in, tokens]``. In this
  orientation an fp32 GEMM with few tokens comes nearest its limit (see matmul.py), and the weights keep the shape they are
  trained in;
- q, k and v are one product, gate and up another; the residual is added by the product itself;
- keys and values go straight to their slots, and with one query per sequence the query heads that share a key head become
  queries of that head, so that grouped attention repeats nothing.

Adapters are added to the four products of a layer (adapters.py); the weights are frozen then.

It does not support biases in the MLP, partial or length-dependent rotary embeddings, or sliding windows shorter than the context.

Shapes: M = R x Q tokens, H hidden, A query heads, G key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from corrente.adapters.base import Factor
from corrente.data.routing import Experts
from corrente.engine.embedded.adapters import BoundLora, LoraProjections, first_unplaced_adapter
from corrente.engine.embedded.kv import KVView, Pair
from corrente.engine.embedded.matmul import add_matmul, matmul, padded_columns
from corrente.engine.embedded.shapes import parameter_shapes
from corrente.sync.layout import Layout, Slab, arrange

FAMILY = ("llama", "mistral", "qwen2", "qwen3")


def unsupported_reason(config: PretrainedConfig) -> str:
    """The reason why this path cannot run the model as its own code does; empty when it can."""
    if config.model_type not in FAMILY:
        return f"it knows {', '.join(FAMILY)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if getattr(config, "mlp_bias", False):
        return "its MLP has biases"
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3", "yarn"):
        return f"its rotary embedding is {kind}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "its rotary embedding is partial"
    return ""


def unsupported_adapter_reason(config: PretrainedConfig, factors: Mapping[str, Factor]) -> str:
    """The reason why this path cannot run these adapters; empty when it can."""
    name = first_unplaced_adapter(factors, _projection_weights(config.num_hidden_layers))
    return f"it has no product for the adapter {name}" if name else ""


class _Layer(NamedTuple):
    norm_in: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    norm_mlp: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class _LayerAdapters(NamedTuple):
    """The adapters of the four products of a layer; None where there is none."""

    qkv: BoundLora | None = None
    out: BoundLora | None = None
    gate_up: BoundLora | None = None
    down: BoundLora | None = None


_FUSED = {
    "norm_in": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "out": ("self_attn.o_proj.weight",),
    "out_bias": ("self_attn.o_proj.bias",),
    "norm_mlp": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}


def _projection_weights(depth: int) -> dict[str, tuple[str, ...]]:
    """The weights of every fused projection that may have adapters, by the projection's name."""
    return {
        f"{layer}.{name}": tuple(f"model.layers.{layer}.{part}" for part in _FUSED[name])
        for layer in range(depth)
        for name in _LayerAdapters._fields
    }


class LeanModel:
    """Implements ModelRunner for the Llama family. ``context``: the number of positions with tabulated rotary angles.

    With ``frozen``, a model's weights by name, those are used as they are, and only the adapters ``factors`` are bound.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        context: int,
        frozen: Mapping[str, torch.Tensor] | None = None,
        factors: Mapping[str, Factor] | None = None,
    ) -> None:
        self._shapes = parameter_shapes(config)
        self._depth: int = config.num_hidden_layers
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_size: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._eps: float = config.rms_norm_eps
        self._dtype = dtype
        self._tied = "lm_head.weight" not in self._shapes
        self._cos, self._sin = _rotary_tables(config, context, dtype, device)
        self._layers: list[_Layer] = []
        self._adapters = [_LayerAdapters()] * self._depth
        self._lora: LoraProjections | None = None
        if frozen is not None:
            outputs = {name: shape[0] for name, shape in self._shapes.items()}
            self._lora = LoraProjections(factors or {}, _projection_weights(self._depth), outputs)
            self._bind_model_weights(
                {
                    slab.name: torch.cat([frozen[source] for source in slab.sources]).to(device, dtype)
                    for slab in self._weight_layout().slabs
                }
            )

    def layout(self) -> Layout:
        return self._weight_layout() if self._lora is None else arrange(self._lora.weight_slabs(self._dtype))

    def _weight_layout(self) -> Layout:
        names: dict[str, tuple[str, ...]] = {"embed": ("model.embed_tokens.weight",)}
        for layer in range(self._depth):
            for name, parts in _FUSED.items():
                sources = tuple(f"model.layers.{layer}.{part}" for part in parts)
                if sources[0] in self._shapes:
                    names[f"{layer}.{name}"] = sources
        names["norm"] = ("model.norm.weight",)
        if not self._tied:
            names["head"] = ("lm_head.weight",)
        return arrange([self._fused_slab(name, sources) for name, sources in names.items()])

    def _fused_slab(self, name: str, sources: tuple[str, ...]) -> Slab:
        parts = [self._shapes[source] for source in sources]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        return Slab(name=name, shape=shape, dtype=str(self._dtype).removeprefix("torch."), offset=0, sources=sources)

    def bind_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._lora is None:
            self._bind_model_weights(tensors)
            return
        added = self._lora.bind_weights(tensors)
        self._adapters = [
            _LayerAdapters(*(added.get(f"{layer}.{field}") for field in _LayerAdapters._fields))
            for layer in range(self._depth)
        ]

    def _bind_model_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._embed, self._norm = tensors["embed"], tensors["norm"]
        self._head = tensors["embed"] if self._tied else tensors["head"]
        self._layers = [
            _Layer(*(tensors.get(f"{layer}.{field}") for field in _Layer._fields))  # pyright: ignore[reportArgumentType]
            for layer in range(self._depth)
        ]

    def routing_shape(self) -> tuple[int, int] | None:
        return None

    def recorded_experts(self) -> Experts:
        raise AssertionError("the Llama family has no experts")

    def forward(
        self, ids_RQ: torch.Tensor, positions_RQ: torch.Tensor, mask_R1QN: torch.Tensor, kv: KVView, keep: torch.Tensor
    ) -> torch.Tensor:
        shape = ids_RQ.shape
        tokens = ids_RQ.numel()
        # Spare columns round the products up to whole vectors (matmul.py). Their values are computed and never read.
        spare = padded_columns(tokens, ids_RQ.device) - tokens
        flat = F.pad(positions_RQ.flatten(), (0, spare))
        turn = self._cos.index_select(1, flat), self._sin.index_select(1, flat)
        x_HM = self._embed.index_select(0, F.pad(ids_RQ.flatten(), (0, spare))).t().contiguous()
        for index, (layer, extra) in enumerate(zip(self._layers, self._adapters, strict=True)):
            qkv = _matmul_with_lora(layer.qkv, self._rms_norm(x_HM, layer.norm_in), extra.qkv)
            if layer.qkv_bias is not None:
                qkv += layer.qkv_bias[:, None]
            query, key, value = self._split_and_rotate_heads(layer, qkv, turn, shape)
            mixed = self._attention(query, kv.update(index, key, value), mask_R1QN)
            _add_matmul_with_lora(x_HM, layer.out, F.pad(mixed, (0, 0, 0, spare)).t(), extra.out)
            if layer.out_bias is not None:
                x_HM += layer.out_bias[:, None]
            gate, up = _matmul_with_lora(layer.gate_up, self._rms_norm(x_HM, layer.norm_mlp), extra.gate_up).chunk(2)
            _add_matmul_with_lora(x_HM, layer.down, F.silu(gate, inplace=True).mul_(up), extra.down)
        if len(keep) < tokens:
            x_HM = x_HM.index_select(1, F.pad(keep, (0, padded_columns(len(keep), keep.device) - len(keep))))
        return matmul(self._head, self._rms_norm(x_HM, self._norm)).t()[: len(keep)]

    def _split_and_rotate_heads(
        self, layer: _Layer, qkv: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], shape: torch.Size
    ) -> tuple[torch.Tensor, ...]:
        """Rotated queries (R, A, Q, D), rotated keys and values (R, G, Q, D), without the spare columns; overwrites ``qkv``."""
        heads, kv_heads, size = self._heads, self._kv_heads, self._head_size
        both = qkv[: (heads + kv_heads) * size].view(heads + kv_heads, size, -1)
        if layer.q_norm is not None and layer.k_norm is not None:
            both[:heads] = self._rms_norm(both[:heads], layer.q_norm)
            both[heads:] = self._rms_norm(both[heads:], layer.k_norm)
        swapped = both.view(heads + kv_heads, 2, size // 2, -1).flip(1).view_as(both)
        both.mul_(rotation[0]).addcmul_(swapped, rotation[1])
        real = qkv.view(heads + 2 * kv_heads, size, -1)[:, :, : shape.numel()]
        return real.unflatten(2, shape).permute(2, 0, 3, 1).contiguous().split((heads, kv_heads, kv_heads), 1)

    def _attention(self, query: torch.Tensor, pair: Pair, mask: torch.Tensor) -> torch.Tensor:
        """Attention of queries (R, A, Q, D) to keys and values (R, G, N, D); returns (M, A x D)."""
        rows, heads, queries, size = query.shape
        keys, values = pair
        if queries == 1:
            # The heads of a group become queries of their key head, so that keys and values are not repeated in memory.
            grouped = query.reshape(rows, self._kv_heads, heads // self._kv_heads, size)
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(rows, heads * size)
        same = heads == self._kv_heads
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=not same)
        return mixed.transpose(1, 2).reshape(rows * queries, heads * size)

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the dimension before the last, in float32 (Zhang & Sennrich 2019): w x / sqrt(mean(x^2) + eps)."""
        wide = x.float()
        scale = (wide * wide).sum(-2, keepdim=True).mul_(1 / x.shape[-2]).add_(self._eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(weight[:, None])


def _matmul_with_lora(weight: torch.Tensor, x: torch.Tensor, lora: BoundLora | None) -> torch.Tensor:
    y = matmul(weight, x)
    if lora is not None:
        lora.add_to(y, x)
    return y


def _add_matmul_with_lora(target: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, lora: BoundLora | None) -> None:
    add_matmul(target, weight, x)
    if lora is not None:
        lora.add_to(target, x)


def _rotary_tables(
    config: PretrainedConfig, context: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of cos and sin (D, positions) for RoPE (Su et al. 2021, arXiv:2104.09864), as transformers computes them.

    The first half of sin is negated, so that x cos + swap(x) sin rotates the two halves of a head.
    """
    rotary = LlamaRotaryEmbedding(config)  # pyright: ignore[reportArgumentType]
    cos, sin = rotary(torch.empty(0, dtype=dtype), torch.arange(context)[None])
    sin = sin.clone()
    sin[..., : sin.shape[-1] // 2] *= -1
    return cos[0].t().contiguous().to(device), sin[0].t().contiguous().to(device)
