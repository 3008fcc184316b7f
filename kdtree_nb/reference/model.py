"""ReferenceModel: the whole transformer in numpy, with latent cache and greedy decoding. The project's golden."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kdtree_nb.config import ModelConfig
from kdtree_nb.reference.argmax import argmax
from kdtree_nb.reference.embed import embed
from kdtree_nb.reference.feed_forward import Dense, Moe, feed_forward, feed_forward_weights
from kdtree_nb.reference.linear import linear
from kdtree_nb.reference.mla import MlaWeights, mla_absorbed, mla_naive, mla_weights
from kdtree_nb.reference.precision import Precision, exact
from kdtree_nb.reference.rms_norm import rms_norm
from kdtree_nb.reference.rope import rope_table
from kdtree_nb.reference.tree import Tree, chain_trees
from kdtree_nb.reference.tree_rows import Rows, tree_rows
from kdtree_nb.reference.weights import Weights


class Layer(NamedTuple):
    """Weights of one transformer layer."""

    input_norm: np.ndarray  # [D]
    attention: MlaWeights
    post_attention_norm: np.ndarray  # [D]
    feed_forward: Dense | Moe


@dataclasses.dataclass
class DecodeState:
    """What one-token decoding carries from step to step."""

    cache: np.ndarray  # [layers, S, P, C+R]
    prefix_len: np.ndarray  # i32 [S], tokens in the cache


class ReferenceModel:
    """An MLA + MoE decoder over numpy arrays in 'float64' (the golden), 'float32' or 'bf16' precision."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, np.ndarray], precision: str = "float64") -> None:
        """weights: checkpoint name -> array. Raises CheckpointError for a missing or misshapen tensor."""
        self.config = config
        self.precision = Precision.named(precision)
        source = Weights(weights, self.precision)
        vocab, dim = config.vocab_size, config.hidden_size
        self.embed_tokens = source.take("model.embed_tokens", vocab, dim)
        self.norm = source.take("model.norm", dim)
        self.lm_head = self.embed_tokens if config.tie_word_embeddings else source.take("lm_head", vocab, dim)
        self.layers = [
            Layer(
                input_norm=below.take("input_layernorm", dim),
                attention=mla_weights(below.at("self_attn."), config),
                post_attention_norm=below.take("post_attention_layernorm", dim),
                feed_forward=feed_forward_weights(below.at("mlp."), config, i),
            )
            for i in range(config.num_hidden_layers)
            for below in [source.at(f"model.layers.{i}.")]
        ]
        source.check_all_taken()
        rope_dim, num_positions = config.qk_rope_head_dim, config.max_position_embeddings
        table = rope_table(num_positions, rope_dim, config.rope_theta, config.rope_scaling)
        self.cos_sin = table.astype(self.precision.dtype)

    def new_cache(self, num_streams: int, num_slots: int) -> np.ndarray:
        """A latent cache [layers, S, P, C+R], filled with NaN so that reading an unwritten slot shows."""
        shape = (self.config.num_hidden_layers, num_streams, num_slots, self.config.latent_dim)
        return np.full(shape, np.nan, self.precision.dtype)

    def forward(self, rows: Rows, tree: Tree, cache: np.ndarray, prefix_len: np.ndarray) -> np.ndarray:
        """Logits [T, V] of the rows of a step, each seeing its prefix and ancestors. Writes the rows into the cache."""
        config, rounding = self.config, self.precision.rounding
        x = embed(self.embed_tokens, rows.token)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            h = rms_norm(x, layer.input_norm, config.rms_norm_eps, rounding)
            x = mla_absorbed(h, layer.attention, config, self.cos_sin, layer_cache, rows, tree, prefix_len, x, rounding)
            h = rms_norm(x, layer.post_attention_norm, config.rms_norm_eps, rounding)
            x = feed_forward(h, layer.feed_forward, config, x, rounding)
        return linear(rms_norm(x, self.norm, config.rms_norm_eps, rounding), self.lm_head)

    def prefill(self, prompts: Sequence[Sequence[int]], num_slots: int) -> DecodeState:
        """Put prompt[:-1] of every stream into a new cache of num_slots slots; the last token is left to `step`.

        Raises ValueError for an empty prompt, an id outside the vocabulary or a prompt longer than the cache.
        """
        if not prompts or not all(prompts):
            raise ValueError("prefill: expected one or more prompts of at least one token, got an empty one")
        state = DecodeState(self.new_cache(len(prompts), num_slots), np.zeros(len(prompts), np.int32))
        tree = chain_trees([prompt[:-1] for prompt in prompts])
        self.forward(tree_rows(tree, state.prefix_len), tree, state.cache, state.prefix_len)
        state.prefix_len += tree.num_nodes
        return state

    def step(self, state: DecodeState, token: Sequence[int]) -> np.ndarray:
        """Append one token to every stream: token int [S] -> logits [S, V] of the next."""
        tree = chain_trees([[t] for t in token])
        logits = self.forward(tree_rows(tree, state.prefix_len), tree, state.cache, state.prefix_len)
        state.prefix_len += 1
        return logits

    def generate(
        self, prompt: Sequence[int], num_tokens: int, stop_token_ids: Sequence[int] | None = None
    ) -> tuple[list[int], np.ndarray]:
        """Greedy decoding of one prompt: (tokens, logits [n, V] they were chosen from). See `generate_batch`."""
        return self.generate_batch([prompt], num_tokens, stop_token_ids)[0]

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, stop_token_ids: Sequence[int] | None = None
    ) -> list[tuple[list[int], np.ndarray]]:
        """Greedy decoding of S prompts together: per stream (tokens, logits [n, V]).

        n = num_tokens, or fewer if a stop token comes: it is emitted and the last one. The default stop tokens are the
        configuration's end-of-text tokens. Raises ValueError for a bad prompt or more positions than the model has.
        """
        stop_token_ids = self.config.eos_token_ids if stop_token_ids is None else stop_token_ids
        num_slots = max(map(len, prompts), default=0) + num_tokens - 1  # the last token is never an input
        if num_slots > len(self.cos_sin):
            raise ValueError(f"generate: expected at most {len(self.cos_sin)} input positions, got {num_slots}")
        state = self.prefill(prompts, num_slots)
        bonus = np.array([prompt[-1] for prompt in prompts])
        tokens = np.empty((len(prompts), num_tokens), np.int64)
        logits = np.empty((len(prompts), num_tokens, self.config.vocab_size), self.precision.dtype)
        for i in range(num_tokens):
            logits[:, i] = self.step(state, bonus)
            tokens[:, i] = bonus = argmax(logits[:, i])
        length = [_text_length(stream, stop_token_ids) for stream in tokens]
        return [(tokens[s, :n].tolist(), logits[s, :n]) for s, n in enumerate(length)]

    def logits(self, tokens: Sequence[int], form: str = "absorbed") -> np.ndarray:
        """Logits [T, V] after every token of one text, in one pass in the 'absorbed' or the 'naive' form of MLA. Raises
        ValueError for another form."""
        if form == "naive":
            return self._logits_naive(np.asarray(tokens))
        if form != "absorbed":
            raise ValueError(f"logits: expected form 'absorbed' or 'naive', got {form!r}")
        tree, prefix_len = chain_trees([tokens]), np.zeros(1, np.int32)
        return self.forward(tree_rows(tree, prefix_len), tree, self.new_cache(1, len(tokens)), prefix_len)

    def _logits_naive(self, tokens: np.ndarray) -> np.ndarray:
        """The same without cache, tree or absorption: the oracle of `forward`."""
        if self.precision.rounding is not exact:
            raise ValueError(f"logits: naive form: expected float64 or float32, got {self.precision.name}")
        config, eps = self.config, self.config.rms_norm_eps
        position = np.arange(len(tokens))
        causal = position[:, None] >= position
        x = embed(self.embed_tokens, tokens)
        for layer in self.layers:
            h = rms_norm(x, layer.input_norm, eps)
            x = mla_naive(h, layer.attention, config, self.cos_sin, position, causal, x)
            x = feed_forward(rms_norm(x, layer.post_attention_norm, eps), layer.feed_forward, config, x, exact)
        return linear(rms_norm(x, self.norm, eps), self.lm_head)


def _text_length(tokens: np.ndarray, stop_token_ids: Sequence[int]) -> int:
    """Number of tokens up to the first stop token, itself included; all of them without one."""
    stops = np.flatnonzero(np.isin(tokens, stop_token_ids))
    return int(stops[0]) + 1 if stops.size else len(tokens)
