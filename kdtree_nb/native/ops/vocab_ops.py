"""Operations on a vocabulary that ranks share: what each tells the others about its part, and what all make of it.

Words are i64 as kernels/vocabulary.h makes them: of a logit and its id, larger for a larger logit and of equal ones for
the lower id; and of a vocabulary segment's largest logit and sum of exponentials. B streams, L depths, K candidates,
V vocabulary, of which V' are this rank's, P ranks, T rows, S streams.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_nb.native.ops.namespace import native
from kdtree_nb.native.ops.share_ops import Segments


def draft_topk_share(logits: Tensor, num_candidates: int, whole_vocab: int, segments: Segments) -> Tensor:
    """A rank's part of `draft_topk`: logits float [B, L, V'] of its vocabulary segments -> words i64 [B, L, K + count].

    Its K best candidates, best first, and its segments' sums. Raises ValueError where the segments of the whole
    vocabulary do not have V' tokens.
    """
    return native.draft_topk_share(logits, num_candidates, whole_vocab, *segments)


def draft_topk_merge(words: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """What `draft_topk` gives for all logits, from every rank's words [P, B, L, K + 8/P]: log_probs f32 and token_ids
    i64 [B, L, K]. Errors as `draft_topk`."""
    return native.draft_topk_merge(words, num_candidates)


def sample_among(
    words: Tensor, largest: Tensor, stream: Tensor, position: Tensor, temperature: Tensor, top_k: Tensor,
    top_p: Tensor, seed: Tensor, vocab_size: int, num_rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`sample` among the tokens of words [T, M] -> the chosen word i64 [T]. largest f32 [T]: of all logits of the row.

    The smallest i64 among the words stands for no token, the largest for a NaN, which is then the result, as it is
    where `largest` is NaN. vocab_size: V of all ranks. Other arguments and errors as `sample`.
    """
    return native.sample_among(
        words, largest, stream, position, temperature, top_k, top_p, seed, vocab_size, num_rows
    )  # fmt: skip


@native.fake
def draft_topk_share_fake(
    logits: Tensor, num_candidates: int, whole_vocab: int, first_segment: int, num_segments: int
) -> Tensor:  # fmt: skip
    return logits.new_empty((*logits.shape[:-1], num_candidates + num_segments), dtype=torch.int64)


@native.fake
def draft_topk_merge_fake(words: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    shape = (*words.shape[1:-1], num_candidates)
    return words.new_empty(shape, dtype=torch.float32), words.new_empty(shape)


@native.fake
def sample_among_fake(
    words: Tensor, largest: Tensor, stream: Tensor, position: Tensor, temperature: Tensor, top_k: Tensor,
    top_p: Tensor, seed: Tensor, vocab_size: int, num_rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return words.new_empty((words.shape[0],))
