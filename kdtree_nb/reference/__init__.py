"""The numpy reference: every operation in its clearest form, the oracle of everything else.

Arrays are float64 unless told otherwise. Functions have the names of the native operations, on unpacked weights; those
that round take `rounding`: `exact` (default) or `round_bf16`.
"""

from kdtree_nb.reference.absorb_query import absorb_query
from kdtree_nb.reference.accepted_features import accepted_features
from kdtree_nb.reference.add_partials import add_partials
from kdtree_nb.reference.argmax import argmax
from kdtree_nb.reference.block_attn import block_attn, block_sees, context_append
from kdtree_nb.reference.cache import cache_append, cache_compact
from kdtree_nb.reference.dequantize_int4 import dequantize_int4
from kdtree_nb.reference.draft_topk import draft_topk
from kdtree_nb.reference.embed import embed
from kdtree_nb.reference.feed_forward import Dense, Moe, feed_forward, feed_forward_weights
from kdtree_nb.reference.latent_append import latent_append
from kdtree_nb.reference.linear import linear, linear_heads
from kdtree_nb.reference.mla import MlaWeights, mla_absorbed, mla_naive, mla_weights
from kdtree_nb.reference.model import DecodeState, ReferenceModel
from kdtree_nb.reference.moe_experts import Experts, moe_experts
from kdtree_nb.reference.moe_route import moe_route
from kdtree_nb.reference.pack_int4 import pack_int4
from kdtree_nb.reference.precision import Precision, exact, round_bf16
from kdtree_nb.reference.residual_add import residual_add
from kdtree_nb.reference.rms_norm import rms_norm
from kdtree_nb.reference.rope import rope, rope_table
from kdtree_nb.reference.sample import gumbel_noise, kept_tokens, philox, sample
from kdtree_nb.reference.step_commit import Streams, step_commit
from kdtree_nb.reference.swiglu import swiglu
from kdtree_nb.reference.tree import Tree, chain_trees, path, visibility
from kdtree_nb.reference.tree_accept import tree_accept
from kdtree_nb.reference.tree_brute import all_prefixes, tree_brute
from kdtree_nb.reference.tree_build import tree_build
from kdtree_nb.reference.tree_rows import Rows, tree_rows, tree_rows_padded
from kdtree_nb.reference.verify_attn import verify_attn, visible_slots
from kdtree_nb.reference.weights import Weights
from kdtree_nb.reference.words import draft_topk_merge, sample_among, segment_words, words_of

__all__ = [
    "DecodeState",
    "Dense",
    "Experts",
    "MlaWeights",
    "Moe",
    "Precision",
    "ReferenceModel",
    "Rows",
    "Streams",
    "Tree",
    "Weights",
    "absorb_query",
    "accepted_features",
    "add_partials",
    "all_prefixes",
    "argmax",
    "block_attn",
    "block_sees",
    "cache_append",
    "cache_compact",
    "chain_trees",
    "context_append",
    "dequantize_int4",
    "draft_topk",
    "draft_topk_merge",
    "embed",
    "exact",
    "feed_forward",
    "feed_forward_weights",
    "gumbel_noise",
    "kept_tokens",
    "latent_append",
    "linear",
    "linear_heads",
    "mla_absorbed",
    "mla_naive",
    "mla_weights",
    "moe_experts",
    "moe_route",
    "pack_int4",
    "path",
    "philox",
    "residual_add",
    "rms_norm",
    "rope",
    "rope_table",
    "round_bf16",
    "sample",
    "sample_among",
    "segment_words",
    "step_commit",
    "swiglu",
    "tree_accept",
    "tree_brute",
    "tree_build",
    "tree_rows",
    "tree_rows_padded",
    "verify_attn",
    "visibility",
    "visible_slots",
    "words_of",
]
