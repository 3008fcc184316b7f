"""config.json of a DeepSeek-V3-family checkpoint to a ModelConfig. Nothing is guessed; what is unknown is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kdtree_nb.config import ModelConfig, Yarn
from kdtree_nb.errors import CheckpointError
from kdtree_nb.hf.json_file import read_object
from kdtree_nb.hf.quantization import Quantization, parse_quantization

LATENT_NORM_EPS = 1e-6
"""Epsilon of q_a_layernorm and kv_a_layernorm: the family's modelling code has it fixed, beside rms_norm_eps."""

WRAPPED_PREFIX = "language_model."
"""What tensor names begin with in checkpoints whose text model lies inside a multimodal one."""


@dataclasses.dataclass(frozen=True)
class HfConfig:
    """A checkpoint's model and how its tensors are stored.

    prefix:             what the text model's tensor names begin with, perhaps nothing
    num_extra_layers:   layers behind the last that predict further tokens (MTP); their tensors are not used
    is_multimodal:      whether the folder also holds vision tensors, which are not used
    is_interleaved:     whether rotary pairs lie side by side in the weights (2i, 2i + 1), not R/2 apart
    """

    model: ModelConfig
    quantization: Quantization | None
    prefix: str
    num_extra_layers: int
    is_multimodal: bool
    is_interleaved: bool


def read_config(folder: Path) -> HfConfig:
    """Read `config.json`, and tokens that end a text from `generation_config.json` too: checkpoints often name a chat's
    only there. Raises CheckpointError, naming the file and the field, on anything that is not understood."""
    path, generation = folder / "config.json", folder / "generation_config.json"
    config = parse_config(read_object(path, "load_model"), f"load_model: {path}")
    if not generation.exists():
        return config
    ids = _ids(read_object(generation, "load_model").get("eos_token_id"))
    try:
        ids = dataclasses.replace(config.model, eos_token_ids=ids).eos_token_ids  # all of them inside the vocabulary
    except CheckpointError as error:
        raise CheckpointError(f"load_model: {generation}: {error}") from error
    both = tuple(dict.fromkeys(config.model.eos_token_ids + ids))
    return dataclasses.replace(config, model=dataclasses.replace(config.model, eos_token_ids=both))


def parse_config(fields: dict[str, Any], where: str) -> HfConfig:
    """`read_config` on the parsed object; `where` begins its errors: operation and file."""
    kind = fields.get("model_type")
    if kind in _MULTIMODAL:
        text = fields.get("text_config")
        if not isinstance(text, dict):
            raise CheckpointError(f"{where}: text_config: expected an object, got {text!r}")
        quantization = text.get("quantization_config", fields.get("quantization_config"))
        inner = {**text, "quantization_config": quantization}
        inner.setdefault("tie_word_embeddings", False)
        return dataclasses.replace(_parse_text(inner, f"{where}: text_config"), prefix=WRAPPED_PREFIX,
                                   is_multimodal=True)  # fmt: skip
    return _parse_text(fields, where)


_MULTIMODAL = ("kimi_k25",)
_TEXT = ("deepseek_v2", "deepseek_v3", "kimi_k2")

_TAKEN = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
    "v_head_dim intermediate_size moe_intermediate_size n_routed_experts num_experts_per_tok n_shared_experts "
    "rms_norm_eps max_position_embeddings"
).split()
"""Fields that a ModelConfig has under the same name and that must be there."""

_OPTIONAL = (
    "first_k_dense_replace q_lora_rank scoring_func norm_topk_prob routed_scaling_factor n_group topk_group "
    "topk_method tie_word_embeddings eos_token_id rope_theta rope_scaling rope_parameters rope_interleave "
    "quantization_config num_nextn_predict_layers num_mtp_layers num_key_value_heads model_type"
).split()

_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None), "moe_layer_freq": (1,),
    "attention_dropout": (0, 0.0, None), "pretraining_tp": (1, None), "ep_size": (1,), "is_decoder": (False,),
    "is_encoder_decoder": (False,), "add_cross_attention": (False,), "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,), "torchscript": (False,), "pruned_heads": ({},), "chunk_size_feed_forward": (0,),
    "sliding_window": (None,), "use_sliding_window": (False,),
}  # fmt: skip
"""Fields that change the arithmetic, and the only values that this package computes."""

_IGNORED = frozenset(
    "architectures auto_map torch_dtype dtype transformers_version _name_or_path name_or_path use_cache bos_token_id "
    "pad_token_id sep_token_id initializer_range output_router_logits aux_loss_alpha seq_aux router_aux_loss_coef "
    "head_dim qk_head_dim return_dict output_hidden_states output_attentions problem_type finetuning_task id2label "
    "label2id task_specific_params tokenizer_class prefix decoder_start_token_id forced_bos_token_id "
    "forced_eos_token_id bad_words_ids begin_suppress_tokens suppress_tokens do_sample early_stopping "
    "encoder_no_repeat_ngram_size no_repeat_ngram_size exponential_decay_length_penalty length_penalty max_length "
    "min_length num_beams num_beam_groups diversity_penalty num_return_sequences output_scores remove_invalid_values "
    "repetition_penalty return_dict_in_generate temperature top_k top_p typical_p tf_legacy_loss use_bfloat16 "
    "use_flash_attn _attn_implementation attn_implementation unused_1".split()
)
"""Fields that do not touch the arithmetic: training, bookkeeping of libraries, defaults of sampling."""


def _parse_text(fields: dict[str, Any], where: str) -> HfConfig:
    kind = fields.get("model_type")
    if kind not in _TEXT:
        raise CheckpointError(
            f"{where}: model_type: expected one of {[*_TEXT, *_MULTIMODAL]} (multi-head latent attention), got {kind!r}"
        )
    _check_names(fields, where)
    heads = fields.get("num_key_value_heads")
    if heads not in (None, fields["num_attention_heads"]):
        raise CheckpointError(f"{where}: num_key_value_heads: expected num_attention_heads, got {heads!r}")
    theta, yarn = parse_rope(fields, where)
    router = _router(fields, kind, where)
    try:
        model = ModelConfig(
            **{name: fields[name] for name in _TAKEN},
            **router,
            first_k_dense_replace=fields.get("first_k_dense_replace", 0),
            q_lora_rank=fields.get("q_lora_rank"),
            tie_word_embeddings=fields.get("tie_word_embeddings", False),
            eos_token_ids=_ids(fields.get("eos_token_id")),
            rope_theta=theta,
            rope_scaling=yarn,
            latent_norm_eps=LATENT_NORM_EPS,
        )
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    quantization = parse_quantization(fields.get("quantization_config"), where)
    return HfConfig(model, quantization, "", _extra_layers(fields, where), False, _is_interleaved(fields, kind, where))


def _extra_layers(fields: dict[str, Any], where: str) -> int:
    counts = [fields.get(name) for name in ("num_nextn_predict_layers", "num_mtp_layers")]
    counts = [count for count in counts if count is not None] or [0]
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in counts):
        raise CheckpointError(
            f"{where}: num_nextn_predict_layers, num_mtp_layers: expected a number of layers from 0, got {counts}"
        )
    return max(counts)


def _is_interleaved(fields: dict[str, Any], kind: str, where: str) -> bool:
    """Only implementations of "deepseek_v3" know the field; those of the others rotate interleaved pairs whatever it
    says."""
    value = fields.get("rope_interleave", True)
    if not isinstance(value, bool) or not value and kind != "deepseek_v3":
        expected = "true or false" if kind == "deepseek_v3" else f"true with model_type {kind!r}"
        raise CheckpointError(f"{where}: rope_interleave: expected {expected}, got {value!r}")
    return value


def _check_names(fields: dict[str, Any], where: str) -> None:
    missing = [name for name in _TAKEN if fields.get(name) is None]
    if missing:
        raise CheckpointError(f"{where}: expected fields {missing}, got none of these names")
    check_fields(fields, (*_TAKEN, *_OPTIONAL), _FIXED, where)


def check_fields(
    fields: Mapping[str, Any], known: Iterable[str], fixed: Mapping[str, tuple[Any, ...]], where: str
) -> None:
    """Whether this package understands every field of a configuration.

    fields: name -> value, as read
    known:  names that the caller reads
    fixed:  name -> the only values that are computed, where the field is there at all
    where:  begins the error: operation and file

    Raises CheckpointError that names the fields. Fields that never touch the arithmetic may be there.
    """
    unknown = sorted(set(fields) - {*known, *fixed, *_IGNORED})
    if unknown:
        raise CheckpointError(
            f"{where}: expected fields that this package understands, got {unknown}; a field that changes the "
            "arithmetic would be left out silently"
        )
    for name, allowed in fixed.items():
        if name in fields and fields[name] not in allowed:
            raise CheckpointError(f"{where}: {name}: expected {' or '.join(map(repr, allowed))}, got {fields[name]!r}")


def _ids(value: Any) -> Any:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _router(fields: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    """The router's fields. DeepSeek-V2's is a softmax chosen greedily, V3's a sigmoid with a bias, in groups."""
    is_v2 = kind == "deepseek_v2"
    method = fields.get("topk_method", "greedy" if is_v2 else "noaux_tc")
    scoring = fields.get("scoring_func", "softmax" if is_v2 else "sigmoid")
    supported = {("greedy", "softmax"), ("noaux_tc", "sigmoid")}
    if not isinstance(method, str) or not isinstance(scoring, str) or (method, scoring) not in supported:
        raise CheckpointError(
            f"{where}: topk_method, scoring_func: expected one of {sorted(supported)}, got {(method, scoring)}"
        )
    renormalize = fields.get("norm_topk_prob", not is_v2)
    if method == "greedy" and renormalize and fields.get("routed_scaling_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{where}: norm_topk_prob: expected false with topk_method 'greedy' and a routed_scaling_factor other than "
            "1, which implementations apply differently; got true"
        )
    grouped = method == "noaux_tc"
    missing = [name for name in ("n_group", "topk_group") if grouped and name not in fields]
    if missing:
        raise CheckpointError(
            f"{where}: expected fields {missing} with topk_method 'noaux_tc', got none of these names; 1 and 1 mean no "
            "groups"
        )
    return {
        "scoring_func": scoring,
        "norm_topk_prob": renormalize,
        "routed_scaling_factor": fields.get("routed_scaling_factor", 1.0 if is_v2 else 2.5),
        "n_group": fields["n_group"] if grouped else 1,
        "topk_group": fields["topk_group"] if grouped else 1,
        "use_router_bias": grouped,
    }


def parse_rope(fields: dict[str, Any], where: str) -> tuple[Any, Yarn | None]:
    """(theta, YaRN or none) in either spelling: rope_theta and rope_scaling, or rope_parameters with both. Raises
    CheckpointError, which `where` begins, on anything else."""
    name, scaling = _scaling(fields, where)
    inner, outer = scaling.pop("rope_theta", None), fields.get("rope_theta")
    theta = outer if inner is None else inner
    if theta is None:
        raise CheckpointError(f"{where}: rope_theta: expected a number (also in rope_parameters), got none")
    if outer not in (None, theta):
        raise CheckpointError(f"{where}: rope_theta: expected the same as in {name}, {theta!r}, got {outer!r}")
    kinds = [scaling.pop(key) for key in ("rope_type", "type") if key in scaling] or ["default"]
    if kinds[0] not in ("default", "yarn") or kinds[-1] != kinds[0]:
        raise CheckpointError(f"{where}: {name}: rope_type: expected 'default' or 'yarn', got {kinds}")
    if kinds[0] == "default":
        if set(scaling) - {"partial_rotary_factor"}:
            raise CheckpointError(f"{where}: {name}: expected nothing beside rope_theta, got {sorted(scaling)}")
        return theta, None
    return theta, _yarn(scaling, f"{where}: {name}")


def _scaling(fields: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """The field that says how positions are rotated, and a copy of it; empty where there is none."""
    given = {name: fields[name] for name in ("rope_parameters", "rope_scaling") if fields.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, dict):
            raise CheckpointError(f"{where}: {name}: expected an object, got {value!r}")
    name = next(iter(given), "rope_scaling")
    if any(value != given[name] for value in given.values()):
        raise CheckpointError(
            f"{where}: rope_parameters, rope_scaling: expected one of them or two that agree, got {given}"
        )
    return name, dict(given.get(name, {}))


def _yarn(scaling: dict[str, Any], where: str) -> Yarn:
    scaling = {name: value for name, value in scaling.items() if value is not None}
    for name, only in (("truncate", True), ("partial_rotary_factor", 1.0)):
        value = scaling.pop(name, only)
        if value != only:
            raise CheckpointError(f"{where}: {name}: expected {only}, got {value!r}")
    known = {field.name for field in dataclasses.fields(Yarn)}
    unknown = sorted(set(scaling) - known)
    missing = sorted({"factor", "original_max_position_embeddings"} - set(scaling))
    if unknown or missing:
        raise CheckpointError(f"{where}: unknown fields {unknown}, missing fields {missing}")
    _check_mscales(scaling, where)
    return Yarn(**scaling)


def _check_mscales(scaling: dict[str, Any], where: str) -> None:
    """Both mscales, or none that has an effect: implementations read one alone differently."""
    one, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    is_plain = one in (None, 1) and all_dim in (None, 0)
    if not (is_plain or (one and all_dim) or "attention_factor" in scaling):
        raise CheckpointError(
            f"{where}: mscale, mscale_all_dim: expected both or none, got {one!r} and {all_dim!r}, which "
            "implementations apply differently"
        )
