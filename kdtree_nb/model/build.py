"""A Model from its configuration and a source of weights: fused and packed layer by layer, each tensor read once."""

from __future__ import annotations

import torch

from kdtree_nb.config import ModelConfig
from kdtree_nb.errors import CheckpointError
from kdtree_nb.model.mla import Attention
from kdtree_nb.model.moe import DenseFeedForward, MoeFeedForward
from kdtree_nb.model.rotary import rope_table
from kdtree_nb.model.source import Source
from kdtree_nb.model.transformer import Layer, Model
from kdtree_nb.native import ops


def build(config: ModelConfig, read: Source) -> Model:
    """Read and pack all weights. Raises CheckpointError from `read`."""
    V, D = config.vocab_size, config.hidden_size
    cos_sin = rope_table(config, read.device)
    embedding = read("model.embed_tokens.weight", V, D)
    if embedding.device.type == "cpu":
        embedding = embedding.clone()  # it may be mapped from a file, which is then free to go
    layers = [_layer(config, read, i, cos_sin) for i in range(config.num_hidden_layers)]
    norm = read("model.norm.weight", D).clone()
    head = embedding if config.tie_word_embeddings else read("lm_head.weight", V, D)
    return Model(config, embedding, layers, norm, ops.pack_linear(head))


def _layer(config: ModelConfig, read: Source, index: int, cos_sin: torch.Tensor) -> Layer:
    prefix = f"model.layers.{index}."
    feed_forward = _dense if config.is_dense_layer(index) else _moe
    return Layer(_attention(config, read, index, cos_sin), feed_forward(config, read, prefix))


def _attention(config: ModelConfig, read: Source, index: int, cos_sin: torch.Tensor) -> Attention:
    H, D, C, v = config.num_attention_heads, config.hidden_size, config.kv_lora_rank, config.v_head_dim
    Q, name = config.q_lora_rank, f"model.layers.{index}.self_attn."
    q_rows = H * config.q_head_dim
    return Attention(
        config,
        layer=index,
        norm=read(f"model.layers.{index}.input_layernorm.weight", D).clone(),
        q_proj=read(name + "q_proj.weight", q_rows, D) if Q is None else read(name + "q_b_proj.weight", q_rows, Q),
        kv_a=read(name + "kv_a_proj_with_mqa.weight", config.latent_dim, D),
        kv_norm=read(name + "kv_a_layernorm.weight", C).clone(),
        kv_b=read(name + "kv_b_proj.weight", H * (config.qk_nope_head_dim + v), C),
        o_proj=read(name + "o_proj.weight", D, H * v),
        cos_sin=cos_sin,
        q_a=None if Q is None else read(name + "q_a_proj.weight", Q, D),
        q_norm=None if Q is None else read(name + "q_a_layernorm.weight", Q).clone(),
    )


def _dense(config: ModelConfig, read: Source, prefix: str) -> DenseFeedForward:
    norm = read(prefix + "post_attention_layernorm.weight", config.hidden_size).clone()
    return DenseFeedForward(config, norm, *_gated(config, read, prefix + "mlp.", config.intermediate_size))


def _moe(config: ModelConfig, read: Source, prefix: str) -> MoeFeedForward:
    D, E = config.hidden_size, config.n_routed_experts
    norm = read(prefix + "post_attention_layernorm.weight", D).clone()
    router = read(prefix + "mlp.gate.weight", E, D)
    bias = _router_bias(read, prefix + "mlp.gate.e_score_correction_bias", E) if config.use_router_bias else None
    return MoeFeedForward(config, norm, router, _experts(config, read, prefix + "mlp."), bias)


def _router_bias(read: Source, name: str, num_experts: int) -> torch.Tensor:
    """It only chooses experts, so that a NaN in it would give wrong logits that are finite, without an error."""
    bias = read.float32(name, num_experts).clone()
    if not torch.isfinite(bias).all():
        raise CheckpointError(
            f"load_model: tensor {name!r}: expected finite values, got NaN or infinity: it is damaged"
        )
    return bias


def _experts(config: ModelConfig, read: Source, prefix: str) -> ops.PackedExperts:
    """Experts put into their places one by one, so that a layer never lies in memory twice."""
    width = config.moe_intermediate_size
    routed = _int4_experts(config, read, prefix) or _float_experts(config, read, prefix)
    gate_up, down, gate_up_scale, down_scale = routed
    if not config.n_shared_experts:
        return ops.PackedExperts(gate_up, down, None, None, width, 0, gate_up_scale, down_scale)
    shared_width = config.shared_intermediate_size
    gate, up, lower = _gated(config, read, prefix + "shared_experts.", shared_width)
    shared_gate_up, shared_down = ops.pack_linear(torch.cat([gate, up])).data, ops.pack_linear(lower).data
    return ops.PackedExperts(gate_up, down, shared_gate_up, shared_down, width, shared_width, gate_up_scale, down_scale)


Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""gate_up, down, gate_up_scale and down_scale of PackedExperts."""


def _float_experts(config: ModelConfig, read: Source, prefix: str) -> Routed:
    gate_up, down = _Places(config.n_routed_experts), _Places(config.n_routed_experts)
    for e in range(config.n_routed_experts):
        gate, up, lower = _gated(config, read, f"{prefix}experts.{e}.", config.moe_intermediate_size)
        gate_up.put(e, ops.pack_linear(torch.cat([gate, up])).data[0])
        down.put(e, ops.pack_linear(lower).data[0])
    return gate_up.whole, down.whole, None, None


def _int4_experts(config: ModelConfig, read: Source, prefix: str) -> Routed | None:
    """INT4 experts as they are stored; None if this layer's are not INT4."""
    shapes = _gated_shapes(config, config.moe_intermediate_size)
    places = [_Places(config.n_routed_experts) for _ in range(4)]
    dtypes: set[torch.dtype] = set()
    for e in range(config.n_routed_experts):
        parts = [read.int4(f"{prefix}experts.{e}.{name}", *shape) for name, shape in shapes.items()]
        if any(part is None for part in parts):
            if all(part is None for part in parts) and e == 0:
                return None
            raise CheckpointError(
                f"load_model: {prefix}experts.{e}: expected all of a layer's experts as INT4, got some"
            )
        gate, up, lower = parts
        dtypes |= {scale.dtype for _, scale in parts}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"load_model: {prefix}experts.{e}: expected scales of one dtype in all of a layer's experts, got "
                f"{sorted(map(str, dtypes))}"
            )
        values = (torch.cat([gate[0], up[0]]), lower[0], torch.cat([gate[1], up[1]]), lower[1])
        for place, value in zip(places, values, strict=True):
            place.put(e, value)
    gate_up, down, gate_up_scale, down_scale = (place.whole for place in places)
    return gate_up, down, gate_up_scale, down_scale


class _Places:
    """A tensor [count, …] filled part by part, made when the first part shows its shape."""

    def __init__(self, count: int) -> None:
        self.count, self.whole = count, torch.empty(0)

    def put(self, index: int, part: torch.Tensor) -> None:
        if not self.whole.numel():
            self.whole = part.new_empty((self.count, *part.shape))
        self.whole[index] = part


def _gated_shapes(config: ModelConfig, width: int) -> dict[str, tuple[int, int]]:
    D = config.hidden_size
    return {"gate_proj.weight": (width, D), "up_proj.weight": (width, D), "down_proj.weight": (D, width)}


def _gated(config: ModelConfig, read: Source, prefix: str, width: int) -> tuple[torch.Tensor, ...]:
    return tuple(read(prefix + name, *shape) for name, shape in _gated_shapes(config, width).items())
