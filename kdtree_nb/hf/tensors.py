"""Which tensors a checkpoint of a configuration has, with their shapes; and what is left aside."""

from __future__ import annotations

from collections.abc import Iterator

from kdtree_nb.config import ModelConfig
from kdtree_nb.errors import CheckpointError
from kdtree_nb.hf.config import HfConfig
from kdtree_nb.hf.folder import CheckpointFolder
from kdtree_nb.hf.quantization import Int4Groups

Shape = tuple[int, ...]

VISION_PREFIXES = ("vision_tower.", "mm_projector.", "multi_modal_projector.", "vision_model.")
"""Beginnings of the names of vision tensors, which a text model leaves aside."""

FLOATS = ("F32", "BF16", "F16")


def weights(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of every tensor of the unquantised text model, in the order of the layers."""
    V, D = config.vocab_size, config.hidden_size
    yield "model.embed_tokens.weight", (V, D)
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        yield prefix + "input_layernorm.weight", (D,)
        yield from _attention(config, prefix + "self_attn.")
        yield prefix + "post_attention_layernorm.weight", (D,)
        if config.is_dense_layer(i):
            yield from _gated(prefix + "mlp.", D, config.intermediate_size)
        else:
            yield from _experts(config, prefix + "mlp.")
    yield "model.norm.weight", (D,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (V, D)


def _attention(config: ModelConfig, prefix: str) -> Iterator[tuple[str, Shape]]:
    H, D, C, Q = config.num_attention_heads, config.hidden_size, config.kv_lora_rank, config.q_lora_rank
    if Q is None:
        yield prefix + "q_proj.weight", (H * config.q_head_dim, D)
    else:
        yield prefix + "q_a_proj.weight", (Q, D)
        yield prefix + "q_a_layernorm.weight", (Q,)
        yield prefix + "q_b_proj.weight", (H * config.q_head_dim, Q)
    yield prefix + "kv_a_proj_with_mqa.weight", (config.latent_dim, D)
    yield prefix + "kv_a_layernorm.weight", (C,)
    yield prefix + "kv_b_proj.weight", (H * (config.qk_nope_head_dim + config.v_head_dim), C)
    yield prefix + "o_proj.weight", (D, H * config.v_head_dim)


def _experts(config: ModelConfig, prefix: str) -> Iterator[tuple[str, Shape]]:
    D = config.hidden_size
    yield prefix + "gate.weight", (config.n_routed_experts, D)
    if config.use_router_bias:
        yield prefix + "gate.e_score_correction_bias", (config.n_routed_experts,)
    for e in range(config.n_routed_experts):
        yield from _gated(f"{prefix}experts.{e}.", D, config.moe_intermediate_size)
    if config.n_shared_experts:
        yield from _gated(prefix + "shared_experts.", D, config.shared_intermediate_size)


def _gated(prefix: str, dim: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield prefix + "gate_proj.weight", (width, dim)
    yield prefix + "up_proj.weight", (width, dim)
    yield prefix + "down_proj.weight", (dim, width)


def is_int4(config: HfConfig, folder: CheckpointFolder, name: str) -> bool:
    """Whether the linear weight `name` (with prefix and `.weight`) is stored as INT4. Raises CheckpointError where
    config.json and the stored tensors disagree."""
    layer = name.removesuffix(".weight")
    if f"{layer}.weight_packed" not in folder.entries:
        return False
    if not isinstance(config.quantization, Int4Groups) or not config.quantization.covers(layer):
        raise CheckpointError(
            f"load_model: {folder.folder}: {layer}.weight_packed: expected {layer}.weight, since config.json's "
            "quantization_config does not quantise this layer; config and weights disagree"
        )
    return True


def check_tensors(config: HfConfig, folder: CheckpointFolder) -> list[str]:
    """Check names, shapes and dtypes of all tensors before any is loaded; returns the names left aside.

    Raises CheckpointError on a missing or extra tensor, and on a shape or dtype that the configuration does not give.
    """
    expected: set[str] = set()
    for name, shape in weights(config.model):
        expected |= _check_weight(config, folder, config.prefix + name, shape)
    left = [name for name in folder.entries if name not in expected]
    extra = [name for name in left if not _is_aside(config, name)]
    if extra:
        raise CheckpointError(
            f"load_model: {folder.folder / folder.entries[extra[0]].shard}: expected no tensor {extra[0]!r} "
            f"(and {len(extra) - 1} more) with this config.json; config and weights disagree"
        )
    return left


def _is_aside(config: HfConfig, name: str) -> bool:
    layer = name.removeprefix(config.prefix + "model.layers.").partition(".")[0] if config.num_extra_layers else ""
    num_layers = config.model.num_hidden_layers
    is_extra = layer.isdecimal() and num_layers <= int(layer) < num_layers + config.num_extra_layers
    is_vision = config.is_multimodal and name.startswith(VISION_PREFIXES)
    is_tied_head = config.model.tie_word_embeddings and name == config.prefix + "lm_head.weight"
    return is_vision or is_tied_head or is_extra or name.endswith(".rotary_emb.inv_freq")


def _check_weight(config: HfConfig, folder: CheckpointFolder, name: str, shape: Shape) -> set[str]:
    layer = name.removesuffix(".weight")
    if len(shape) != 2:  # norms and biases are never quantised
        _expect(folder, name, shape, FLOATS)
        return {name}
    if is_int4(config, folder, name):
        return _check_int4(config.quantization.group_size, folder, layer, shape)
    scale = f"{layer}.weight_scale_inv"
    if folder.entry(name).dtype == "F8_E4M3" or scale in folder.entries:
        return _check_fp8(config, folder, name, scale, shape)
    _expect(folder, name, shape, FLOATS)
    return {name}


def _check_int4(group_size: int, folder: CheckpointFolder, layer: str, shape: Shape) -> set[str]:
    num_out, num_in = shape
    if num_in % group_size:
        raise CheckpointError(
            f"load_model: {folder.folder}: {layer}: expected inputs in whole groups of {group_size}, got {num_in}"
        )
    _expect(folder, f"{layer}.weight_packed", (num_out, -(-num_in // 8)), ("I32",))
    _expect(folder, f"{layer}.weight_scale", (num_out, num_in // group_size), FLOATS)
    _expect(folder, f"{layer}.weight_shape", (2,), ("I32", "I64"))
    stored = folder.tensor(f"{layer}.weight_shape").tolist()
    if stored != list(shape):
        raise CheckpointError(
            f"load_model: {folder.folder}: {layer}.weight_shape: expected {list(shape)}, got {stored}"
        )
    return {f"{layer}.weight_packed", f"{layer}.weight_scale", f"{layer}.weight_shape"}


def _check_fp8(config: HfConfig, folder: CheckpointFolder, name: str, scale: str, shape: Shape) -> set[str]:
    blocks = config.quantization
    if not hasattr(blocks, "rows"):
        raise CheckpointError(
            f"load_model: {folder.folder}: {name}: expected FP8 only with a quantization_config of quant_method 'fp8', "
            f"got {blocks}; config and weights disagree"
        )
    _expect(folder, name, shape, ("F8_E4M3",))
    _expect(folder, scale, (-(-shape[0] // blocks.rows), -(-shape[1] // blocks.columns)), ("F32",))
    return {name, scale}


def _expect(folder: CheckpointFolder, name: str, shape: Shape, dtypes: tuple[str, ...]) -> None:
    entry = folder.entry(name)
    if entry.shape != shape or entry.dtype not in dtypes:
        raise CheckpointError(
            f"load_model: {folder.folder / entry.shard}: tensor {name!r}: expected shape {shape} and "
            f"{' or '.join(dtypes)}, got {entry.shape} and {entry.dtype}"
        )
