"""A decoder of the DeepSeek-V3 family in plain PyTorch, for training, and its tensors by the names of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from kdtree_nb.config import ModelConfig
from kdtree_nb.train.plain_layers import Layer, Linear, RMSNorm, rope_table


class Hidden(NamedTuple):
    """What a forward pass gives before the head.

    last:      [batch, positions, hidden], normed
    loads:     per MoE layer, the share of choices of each expert [experts]
    balances:  per MoE layer, the balance loss []
    features:  [batch, positions, len(layers asked for) * hidden], the residual stream behind these layers; or None
    """

    last: torch.Tensor
    loads: list[torch.Tensor]
    balances: list[torch.Tensor]
    features: torch.Tensor | None


class PlainModel(nn.Module):
    """The whole decoder. Parameters are float32; `dtype` in `forward` is that of the activations."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.rope_scaling is not None:
            raise ValueError("PlainModel: expected plain rotary frequencies, got YaRN, which is switched on afterwards")
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.05)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens.weight.device

    @property
    def head_weight(self) -> torch.Tensor:
        """[vocab, hidden]: the head's, which may be the embedding's."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden], normed -> logits [..., vocab] in the same dtype."""
        return nn.functional.linear(hidden, self.head_weight.to(hidden.dtype))

    def hidden(
        self, tokens: torch.Tensor, dtype: torch.dtype = torch.float32, layers: Sequence[Callable] | None = None,
        features: Sequence[int] = (),
    ) -> Hidden:  # fmt: skip
        """tokens int64 [batch, positions] -> Hidden.

        `layers` are stand-ins for `self.layers`, such as their compiled forms; `features` counts layers from 0.
        """
        x = self.embed_tokens(tokens).to(dtype)
        cos, sin = rope_table(tokens.shape[1], self.config.qk_rope_head_dim, self.config.rope_theta, like=x)
        loads, balances, kept = [], [], {}
        for index, layer in enumerate(self.layers if layers is None else layers):
            x, load, balance = layer(x, cos, sin)
            if load is not None:
                loads.append(load)
                balances.append(balance)
            if index in features:
                kept[index] = x
        return Hidden(self.norm(x), loads, balances, torch.cat([kept[i] for i in features], -1) if kept else None)

    def forward(
        self, tokens: torch.Tensor, dtype: torch.dtype = torch.float32, layers: Sequence[Callable] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """tokens int64 [batch, positions] -> (logits [batch, positions, vocab], loads, balance losses)."""
        hidden = self.hidden(tokens, dtype, layers)
        return self.head(hidden.last), hidden.loads, hidden.balances

    @torch.no_grad()
    def greedy(self, tokens: list[int], num_tokens: int, dtype: torch.dtype = torch.float32) -> list[int]:
        """The `num_tokens` most likely next tokens, one after the other, by recomputing everything each time."""
        ids = torch.tensor([tokens], device=self.device)
        for _ in range(num_tokens):
            ids = torch.cat([ids, self(ids, dtype)[0][:, -1:].argmax(-1)], 1)
        return ids[0, len(tokens) :].tolist()


def export_tensors(model: PlainModel) -> dict[str, np.ndarray]:
    """Weights as float32 arrays by DeepSeek checkpoint names (one tensor per expert and matrix)."""
    tensors = {}
    for name, value in model.state_dict().items():
        array, full = value.detach().float().cpu().numpy(), name if name.startswith("lm_head") else f"model.{name}"
        stem, _, part = full.rpartition(".")
        if array.ndim == 3:
            tensors |= {f"{stem}.experts.{e}.{part}.weight": array[e] for e in range(len(array))}
        else:
            tensors[full] = array
    return tensors


def import_tensors(model: PlainModel, tensors: dict[str, np.ndarray]) -> None:
    """The inverse of `export_tensors`. KeyError when a tensor is missing."""
    state = {}
    for name, value in model.state_dict().items():
        full = name if name.startswith("lm_head") else f"model.{name}"
        stem, _, part = full.rpartition(".")
        experts = [f"{stem}.experts.{e}.{part}.weight" for e in range(len(value))] if value.ndim == 3 else []
        array = np.stack([tensors[expert] for expert in experts]) if experts else tensors[full]
        state[name] = torch.from_numpy(np.array(array, np.float32))
    model.load_state_dict(state)
