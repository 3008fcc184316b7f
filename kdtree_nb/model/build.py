"""A Model from its configuration and a source of weights: fused and packed layer by layer, each tensor read once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kdtree_nb.config import ModelConfig
from kdtree_nb.errors import CheckpointError
from kdtree_nb.model.mla import Attention
from kdtree_nb.model.moe import DenseFeedForward, MoeFeedForward
from kdtree_nb.model.ranks import ONE_RANK, Ranks
from kdtree_nb.model.rotary import rope_table
from kdtree_nb.model.share import Part, Range, Share
from kdtree_nb.model.source import Source
from kdtree_nb.model.transformer import Layer, Model
from kdtree_nb.native import ops


class Build(NamedTuple):
    """What a model is built of: its configuration, where its weights are, and which of them this process holds."""

    config: ModelConfig
    read: Source
    ranks: Ranks
    share: Share


def build(config: ModelConfig, read: Source, ranks: Ranks = ONE_RANK) -> Model:
    """Read and pack the weights that this rank holds. Raises CheckpointError from `read`, and ValueError where a
    dimension does not split over the ranks."""
    V, D = config.vocab_size, config.hidden_size
    of = Build(config, read, ranks, Share.of(config, ranks.rank, ranks.num_ranks))
    cos_sin = rope_table(config, read.device)
    embedding = read("model.embed_tokens.weight", V, D)
    if embedding.device.type == "cpu":
        embedding = embedding.clone()  # it may be mapped from a file, which is then free to go
    layers = [_layer(of, i, cos_sin) for i in range(config.num_hidden_layers)]
    norm = read("model.norm.weight", D).clone()
    begin, end = of.share.vocab
    tied = config.tie_word_embeddings
    head = embedding[begin:end] if tied else read("lm_head.weight", V, D, part=Part(0, of.share.vocab))
    return Model(config, embedding, layers, norm, ops.pack_linear(head), ranks)


def _layer(of: Build, index: int, cos_sin: torch.Tensor) -> Layer:
    prefix = f"model.layers.{index}."
    feed_forward = _dense if of.config.is_dense_layer(index) else _moe
    return Layer(_attention(of, index, cos_sin), feed_forward(of, prefix))


def _attention(of: Build, index: int, cos_sin: torch.Tensor) -> Attention:
    config, read, heads = of.config, of.read, of.share.heads
    H, D, C, v = config.num_attention_heads, config.hidden_size, config.kv_lora_rank, config.v_head_dim
    Q, name = config.q_lora_rank, f"model.layers.{index}.self_attn."
    q_rows, q_part = H * config.q_head_dim, Part(0, heads.times(config.q_head_dim))
    kv_rows = config.qk_nope_head_dim + v
    return Attention(
        config,
        layer=index,
        num_heads=heads.length,
        ranks=of.ranks,
        norm=read(f"model.layers.{index}.input_layernorm.weight", D).clone(),
        q_proj=read(name + f"{'q_proj' if Q is None else 'q_b_proj'}.weight", q_rows, Q or D, part=q_part),
        kv_a=read(name + "kv_a_proj_with_mqa.weight", config.latent_dim, D),
        kv_norm=read(name + "kv_a_layernorm.weight", C).clone(),
        kv_b=read(name + "kv_b_proj.weight", H * kv_rows, C, part=Part(0, heads.times(kv_rows))),
        o_proj=read(name + "o_proj.weight", D, H * v, part=Part(1, heads.times(v))),
        cos_sin=cos_sin,
        q_a=None if Q is None else read(name + "q_a_proj.weight", Q, D),
        q_norm=None if Q is None else read(name + "q_a_layernorm.weight", Q).clone(),
    )


def _dense(of: Build, prefix: str) -> DenseFeedForward:
    norm = of.read(prefix + "post_attention_layernorm.weight", of.config.hidden_size).clone()
    weights = _gated(of, prefix + "mlp.", of.config.intermediate_size, of.share.dense)
    return DenseFeedForward(of.config, norm, *weights, of.ranks)


def _moe(of: Build, prefix: str) -> MoeFeedForward:
    config, read = of.config, of.read
    D, E = config.hidden_size, config.n_routed_experts
    norm = read(prefix + "post_attention_layernorm.weight", D).clone()
    router = read(prefix + "mlp.gate.weight", E, D)
    bias = _router_bias(read, prefix + "mlp.gate.e_score_correction_bias", E) if config.use_router_bias else None
    return MoeFeedForward(config, norm, router, _experts(of, prefix + "mlp."), bias, of.ranks)


def _router_bias(read: Source, name: str, num_experts: int) -> torch.Tensor:
    """It only chooses experts, so that a NaN in it would give wrong logits that are finite, without an error."""
    bias = read.float32(name, num_experts).clone()
    if not torch.isfinite(bias).all():
        raise CheckpointError(
            f"load_model: tensor {name!r}: expected finite values, got NaN or infinity: it is damaged"
        )
    return bias


def _experts(of: Build, prefix: str) -> ops.PackedExperts:
    """Experts put into their places one by one, so that a layer never lies in memory twice."""
    width, shared_width = of.share.routed.length, of.share.shared.length
    routed = _int4_experts(of, prefix) or _float_experts(of, prefix)
    gate_up, down, gate_up_scale, down_scale = routed
    if not of.config.n_shared_experts:
        return ops.PackedExperts(gate_up, down, None, None, width, 0, gate_up_scale, down_scale)
    whole_width = of.config.shared_intermediate_size
    gate, up, lower = _gated(of, prefix + "shared_experts.", whole_width, of.share.shared)
    shared_gate_up, shared_down = ops.pack_linear(torch.cat([gate, up])).data, ops.pack_linear(lower).data
    return ops.PackedExperts(gate_up, down, shared_gate_up, shared_down, width, shared_width, gate_up_scale, down_scale)


Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""gate_up, down, gate_up_scale and down_scale of PackedExperts."""


def _float_experts(of: Build, prefix: str) -> Routed:
    num_experts, width = of.config.n_routed_experts, of.config.moe_intermediate_size
    gate_up, down = _Places(num_experts), _Places(num_experts)
    for e in range(num_experts):
        gate, up, lower = _gated(of, f"{prefix}experts.{e}.", width, of.share.routed)
        gate_up.put(e, ops.pack_linear(torch.cat([gate, up])).data[0])
        down.put(e, ops.pack_linear(lower).data[0])
    return gate_up.whole, down.whole, None, None


def _int4_experts(of: Build, prefix: str) -> Routed | None:
    """INT4 experts; None if this layer's are not INT4."""
    weights = _gated_weights(of.config, of.config.moe_intermediate_size, of.share.routed)
    num_experts = of.config.n_routed_experts
    places = [_Places(num_experts) for _ in range(4)]
    dtypes: set[torch.dtype] = set()
    for e in range(num_experts):
        parts = [of.read.int4(f"{prefix}experts.{e}.{name}", *shape, part=part) for name, shape, part in weights]
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
        gate_up = torch.cat([gate[0], up[0]]), torch.cat([gate[1], up[1]])
        for place, value in zip(places, _int4_values(of.read, gate_up, lower), strict=True):
            if value is not None:
                place.put(e, value)
    gate_up, down, gate_up_scale, down_scale = (place.whole for place in places)
    return (gate_up, down, None, None) if gate_up.dtype == torch.uint8 else (gate_up, down, gate_up_scale, down_scale)


Int4 = tuple[torch.Tensor, torch.Tensor]
"""Words and scales of an INT4 weight."""


def _int4_values(read: Source, gate_up: Int4, down: Int4) -> Routed:
    """One expert as it is stored, or packed where the products read it so."""
    is_packed = _reads_packed_int4(read)
    for words, scale in (gate_up, down):
        is_packed = is_packed and scale.dtype == torch.bfloat16 and scale.numel() > 0
        is_packed = is_packed and 8 * words.shape[-1] // scale.shape[-1] % ops.INT4_UNIT == 0
    if not is_packed:
        return gate_up[0], down[0], gate_up[1], down[1]
    return *(ops.pack_int4(words[None], scale[None])[0] for words, scale in (gate_up, down)), None, None


def _reads_packed_int4(read: Source) -> bool:
    """Whether products read INT4 weights in groups of whole units, with BF16 scales, as `pack_int4` leaves them."""
    return read.device.type == "cuda" and read.dtype == torch.bfloat16 and not read.keeps_words


class _Places:
    """A tensor [count, …] filled part by part, made when the first part shows its shape."""

    def __init__(self, count: int) -> None:
        self.count, self.whole = count, torch.empty(0)

    def put(self, index: int, part: torch.Tensor) -> None:
        if index == 0:
            self.whole = part.new_empty((self.count, *part.shape))
        self.whole[index] = part


def _gated_weights(config: ModelConfig, width: int, held: Range) -> list[tuple[str, tuple[int, int], Part]]:
    """Names, shapes and parts of the weights of a block of `width`, of which a range is held here."""
    up, down = (width, config.hidden_size), (config.hidden_size, width)
    names = [("gate_proj.weight", up), ("up_proj.weight", up), ("down_proj.weight", down)]
    return [(name, shape, Part(int(shape is down), held)) for name, shape in names]


def _gated(of: Build, prefix: str, width: int, held: Range) -> tuple[torch.Tensor, ...]:
    return tuple(
        of.read(prefix + name, *shape, part=part) for name, shape, part in _gated_weights(of.config, width, held)
    )
