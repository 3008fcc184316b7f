"""The shapes of each operation's arrays, so that numpy arrays say all sizes and results can be allocated.

One line each: inputs -> outputs ; the struct's size fields. `x[T D]` has shape [T, D]; `x?[…]` may be left out; `x![…]`
is changed in place; `x{G N K}` is a weight that pack_linear has made of [G, N, K]. A symbol is bound by the first input
that has it alone as a dimension, else by the keyword argument of the size field that is equal to it. `^` rounds up.
"""

from __future__ import annotations

import dataclasses
import re

TEXT = {
    "embed": "weight[V D] token[T] -> out[T D] ; num_rows=T vocab_size=V dim=D",
    "rms_norm": "x[T D] weight[D] -> out[T D] ; num_rows=T dim=D x_stride=D",
    "pack_linear": "weight[G N K] -> packed{G N K} ; num_groups=G num_out=N num_in=K",
    "dequantize_int4": "weight[G N K//8] scale[G N K//J] group_id?[I] -> packed{G N K} ; num_groups=G num_out=N "
    "num_in=K group_size=J num_ids=I",
    "pack_int4": "weight[G N K//8] scale[G N K//J] -> packed[G ^N//64 ^K//32 4 288] ; num_groups=G num_out=N num_in=K "
    "group_size=J",
    "linear": "x[T G K] packed{G N K} residual?[T G N] -> out[T G N] ; num_rows=T num_groups=G num_out=N num_in=K "
    "x_row_stride=G*K x_group_stride=K",
    "rope": "x[T H R] cos_sin[P R] position[T] -> out[T H R] ; num_rows=T num_heads=H dim=R num_positions=P "
    "x_row_stride=H*R x_head_stride=R",
    "swiglu": "gate_up[T 2*I] -> out[T I] ; num_rows=T dim=I",
    "residual_add": "x[T D] y[T D] -> out[T D] ; num_rows=T dim=D",
    "add_partials": "partials[P T D] residual?[T D] -> out[T D] ; num_partials=P num_rows=T dim=D",
    "argmax": "logits[T V] -> token[T] ; num_rows=T vocab_size=V",
    "sample": "logits[T V] stream[T] position[T] temperature[S] top_k[S] top_p[S] seed[S] -> token[T] ; num_rows=T "
    "vocab_size=V num_streams=S",
    "sample_among": "words[T M] largest[T] stream[T] position[T] temperature[S] top_k[S] top_p[S] seed[S] -> word[T] ; "
    "num_rows=T num_words=M vocab_size=V num_streams=S",
    "moe_route": "logits[T E] bias?[E] -> expert_id[T A] weight[T A] ; num_rows=T num_experts=E top_k=A "
    "num_groups=G topk_groups=F",
    "moe_experts": "x[T D] expert_id[T A] weight[T A] gate_up{E 2*I D} down{E D I} shared_gate_up?{1 2*S D} "
    "shared_down?{1 D S} residual?[T D] -> out[T D] ; num_rows=T dim=D num_experts=E top_k=A width=I shared_width=S",
    "cache_append": "latent[T C] k_rope[T R] stream[T] slot[T] cache![S P C+R] -> ; num_rows=T num_streams=S "
    "num_slots=P latent_dim=C rope_dim=R",
    "latent_append": "q_kv[T Q+C+R] q_norm[Q] kv_norm[C] cos_sin[A R] position[T] stream[T] slot[T] cache![S P C+R] -> "
    "q[T Q] ; num_rows=T query_dim=Q latent_dim=C rope_dim=R num_positions=A num_streams=S num_slots=P "
    "q_kv_stride=Q+C+R",
    "absorb_query": "q[T H*K+H*R] packed{H C K} cos_sin[A R] position[T] -> q_latent[T H C] q_rope[T H R] ; num_rows=T "
    "num_heads=H latent_dim=C nope_dim=K rope_dim=R num_positions=A q_stride=H*K+H*R",
    "cache_compact": "cache![Y S P W] prefix_len[S] accepted_path[S L] num_accepted[S] -> ; num_layers=Y "
    "num_streams=S num_slots=P width=W max_depth=L",
    "verify_attn": "q_latent[T H C] q_rope[T H R] cache[S P C+R] stream[T] node[T] parent[S N] depth[S N] "
    "prefix_len[S] -> out[T H C] ; num_rows=T num_heads=H latent_dim=C rope_dim=R num_streams=S num_slots=P "
    "num_tree_slots=N",
    "context_append": "kv[T 2 Y K R] key_norm[Y R] cos_sin[Q R] stream[T] position[T] keys![S P Y K R] "
    "values![S P Y K R] -> ; num_rows=T num_layers=Y num_heads=K dim=R num_streams=S num_slots=P num_positions=Q",
    "block_attn": "qkv[A B H+2*K R] query_norm[R] key_norm[R] cos_sin[Q R] keys[S P Y K R] values[S P Y K R] stream[A] "
    "prefix_len[A] -> out[A B H R] ; num_blocks=A block_size=B num_heads=H num_kv_heads=K dim=R num_streams=S "
    "num_slots=P num_layers=Y num_positions=Q",
    "draft_topk": "logits[T V] -> log_probs[T K] token_ids[T K] ; num_rows=T vocab_size=V num_candidates=K",
    "draft_topk_merge": "words[P T W] -> log_probs[T K] token_ids[T K] ; num_partials=P num_rows=T num_candidates=K",
    "tree_build": "log_probs[B L K] token_ids[B L K] bonus[B] budget[B] -> token[B M+1] parent[B M+1] depth[B M+1] "
    "log_prob[B M+1] ancestor_bits[B M+1 M//64+1] num_nodes[B] status[B] ; num_streams=B max_depth=L "
    "num_candidates=K max_budget=M",
    "tree_rows": "token[B N] depth[B N] num_nodes[B] prefix_len[B] -> row_stream[B*N] row_node[B*N] row_position[B*N] "
    "row_slot[B*N] row_token[B*N] ; num_streams=B num_tree_slots=N",
    "tree_accept": "token[B N] parent[B N] num_nodes[B] target_token[B N] -> accepted_path[B L] num_accepted[B] "
    "next_token[B] ; num_streams=B num_tree_slots=N max_depth=L",
    "step_commit": "accepted_path[S L] num_accepted[S] num_nodes[S] target_token[T] row_begin[S] is_stop[V] "
    "prefix_len![S] bonus![S] remaining![S] active![S] text![S P] ring![R 5+L S] step![1] -> ; num_streams=S "
    "max_depth=L num_rows=T vocab_size=V num_text_slots=P ring_size=R",
    "accepted_features": "hidden_0[T D] hidden_1?[T D] hidden_2?[T D] hidden_3?[T D] hidden_4?[T D] hidden_5?[T D] "
    "hidden_6?[T D] hidden_7?[T D] first_row[S] prefix_len[S] accepted_path[S L] num_accepted[S] active[S] -> "
    "features[S*L+S N*D] stream[S*L+S] position[S*L+S] ; num_layers=N num_rows=T num_streams=S max_depth=L dim=D",
}


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a signature. dims: an expression of symbols per dimension, or [G, N, K] of a packed weight."""

    name: str
    dims: tuple[str, ...]
    is_packed: bool
    is_optional: bool
    is_in_place: bool


@dataclasses.dataclass(frozen=True)
class Signature:
    """Inputs and outputs of an operation, and its size fields as expressions of the symbols."""

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    sizes: dict[str, str]


def _arrays(text: str) -> tuple[Array, ...]:
    found = re.findall(r"(\w+)([?!]?)([\[{])([^\]}]*)[\]}]", text)
    return tuple(
        Array(name, tuple(dims.split()), kind == "{", mark == "?", mark == "!") for name, mark, kind, dims in found
    )


def _parse(text: str) -> Signature:
    arrays, sizes = text.split(";")
    inputs, outputs = arrays.split("->")
    return Signature(_arrays(inputs), _arrays(outputs), dict(size.split("=") for size in sizes.split()))


SIGNATURES = {op: _parse(text) for op, text in TEXT.items()}
"""By operation."""


def value_of(expression: str, symbols: dict[str, int]) -> int:
    """The value of a dimension such as `2*I`. KeyError: a symbol that is not bound."""
    value = 0
    for term in expression.split("+"):
        value += _product(term, symbols)
    return value


def _product(term: str, symbols: dict[str, int]) -> int:
    dividend, _, divisor = term.removeprefix("^").partition("//")
    product = 1
    for factor in dividend.split("*"):
        product *= int(factor) if factor.isdigit() else symbols[factor]
    if not divisor:
        return product
    size = int(divisor) if divisor.isdigit() else symbols[divisor]
    if size == 0 or product % size and not divisor.isdigit():
        raise ValueError(f"expected a size that divides {product}, got {size}")
    return -(-product // size) if term.startswith("^") else product // size


def packed_shape(dims: list[int], is_cpu: bool) -> tuple[int, ...]:
    """The shape of a packed weight of [G, N, K] (PackLinearArgs in op_args.h)."""
    groups, num_out, num_in = dims
    blocks = -(-num_out // 16)
    return (groups, blocks, num_in, 16) if is_cpu else (groups, blocks, -(-num_in // 32), 512)
