"""From a drafter's answer to the trees of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kdtree_nb.drafters import DraftCandidates
from kdtree_nb.errors import NonFiniteError
from kdtree_nb.native import ops
from kdtree_nb.tree import DraftTree

if TYPE_CHECKING:
    from kdtree_nb.speculate.batch import Batch
    from kdtree_nb.speculate.stream import Stream


def chain_trees(chains: list[list[int]], device: torch.device) -> DraftTree:
    """Trees without branches over the given tokens; an empty chain gives num_nodes 0. At least one is not empty."""
    longest = max(map(len, chains))
    padded = torch.tensor([chain + [0] * (longest - len(chain)) for chain in chains], device=device)
    num_nodes = torch.tensor([len(chain) for chain in chains], dtype=torch.int32, device=device)
    certain = torch.zeros(len(chains), longest - 1, 1, device=device)
    drafted = padded[:, 1:, None].contiguous()
    tree = ops.tree_build(certain, drafted, padded[:, 0].contiguous(), (num_nodes - 1).clamp_(min=0), longest - 1)
    tree.num_nodes.copy_(num_nodes)
    return tree


def root_trees(bonus: torch.Tensor) -> DraftTree:
    """Trees of nothing but a root, which are the trees of AR decoding: bonus i64 [S]."""
    candidates = torch.empty(len(bonus), 0, 0, device=bonus.device)
    return ops.tree_build(candidates, candidates.long(), bonus, 0)


def check_draft(batch: Batch, draft: object, ends: list[tuple[int, int]]) -> None:
    """Raises ValueError unless a drafter's answer has its type and device and the running streams' tokens still end so.

    ends: per running stream, how many tokens it had before the drafter was asked, and the last of them
    """
    if not isinstance(draft, DraftCandidates | DraftTree):
        raise ValueError(f"draft: {_name(batch)}: expected DraftCandidates or a DraftTree, got {type(draft).__name__}")
    first = draft.token if isinstance(draft, DraftTree) else draft.log_probs
    device = getattr(first, "device", "no tensor")
    if device != batch.device:
        raise ValueError(f"draft: {_name(batch)}: expected tensors on {batch.device}, got {device}")
    if [(len(s.tokens), *s.tokens[-1:]) for s in batch.running] != ends:
        raise ValueError(f"draft: {_name(batch)}: expected context.tokens to be left as they are, got them changed")


def tree_from_candidates(batch: Batch, draft: DraftCandidates) -> DraftTree:
    """The heaviest trees of the running streams' candidates. Raises ValueError on bad ones, NonFiniteError on NaN."""
    _check_candidates(batch, *draft)
    log_probs, token_ids = (values[..., : batch.mode.width] for values in draft)
    if not batch.all_running:
        place = _places(batch)
        log_probs, token_ids = log_probs[place], token_ids[place]
    log_probs, token_ids = log_probs.contiguous(), token_ids.contiguous()
    limited = [s for s in batch.running if s.num_remaining <= log_probs.shape[1]]
    if limited:
        log_probs = log_probs.clone()
        for stream in limited:
            log_probs[stream.seat, stream.num_remaining - 1 :] = -torch.inf
    try:
        return _build(log_probs, token_ids, batch.bonus, batch.budget, batch.max_budget)
    except ValueError as error:
        raise candidates_error(batch, batch.running, draft, error) from error


def _build(*inputs: torch.Tensor | int) -> DraftTree:
    """ops.tree_build. What it refuses on a GPU, where it gives an empty tree, is built on the CPU for the error."""
    tree = ops.tree_build(*inputs)
    if tree.num_nodes.is_cuda and 0 in tree.num_nodes.tolist():
        ops.tree_build(*(value.cpu() if isinstance(value, torch.Tensor) else value for value in inputs))
        raise ValueError("tree_build: expected candidates that the GPU builds a tree of, got others")
    return tree


def tree_from_drafter(batch: Batch, draft: DraftTree) -> DraftTree:
    """Cut the running streams' ready trees to budget and depth limit; what is left of a best-first tree is a tree.
    Raises ValueError for trees of other roots, none, or a wrong number, and in mode "chain"."""
    if batch.mode.is_chain:
        raise ValueError(f"draft: {_name(batch)}: expected DraftCandidates for mode 'chain', got a DraftTree")
    place = None if batch.all_running else _places(batch)
    fields = (draft.token, draft.parent, draft.depth, draft.log_prob, draft.ancestor_bits, draft.num_nodes)
    if draft.num_streams != len(batch.running):
        raise ValueError(
            f"draft: {_name(batch)}: expected a tree for each of {len(batch.running)} streams, got {draft.num_streams}"
        )
    token, parent, depth, log_prob, bits, num_nodes = (f if place is None else f[place] for f in fields)
    if not draft.num_nodes.gt(0).all():
        raise ValueError(f"draft: {_name(batch)}: expected trees of at least 1 node, got {draft.num_nodes.tolist()}")
    if not torch.equal(token[:, 0] * batch.active, batch.bonus * batch.active):
        raise ValueError(f"draft: {_name(batch)}: expected trees whose roots are the bonus tokens, got others")
    limit = torch.tensor([s.num_remaining - 1 for s in batch.streams], dtype=torch.int32, device=depth.device)
    fits = (depth <= limit[:, None]).int().cumprod(1).sum(1, dtype=torch.int32)
    num_nodes = torch.minimum(torch.minimum(num_nodes, fits.clamp_(min=1)), batch.budget + 1)
    return DraftTree(token, parent, depth, log_prob, bits, num_nodes)


def _places(batch: Batch) -> torch.Tensor:
    """i64 [S]: the row of each stream among the running ones; a finished stream borrows row 0 (its budget is 0)."""
    place = {s.seat: row for row, s in enumerate(batch.running)}
    return torch.tensor([place.get(s.seat, 0) for s in batch.streams], device=batch.device)


def _name(batch: Batch) -> str:
    return type(batch.drafter).__name__


def _check_candidates(batch: Batch, log_probs: torch.Tensor, token_ids: torch.Tensor) -> None:
    if log_probs.dim() != 3 or log_probs.shape != token_ids.shape or log_probs.shape[0] != len(batch.running):
        raise ValueError(
            f"draft: {_name(batch)}: expected log_probs and token_ids of one shape [{len(batch.running)}, L, K], got "
            f"{list(log_probs.shape)} and {list(token_ids.shape)}"
        )


def candidates_error(batch: Batch, streams: Sequence[Stream], draft: DraftCandidates, error: ValueError) -> Exception:
    """What to raise where the candidates of `streams` were refused: NonFiniteError that names the first NaN and is its
    stream's own, or `error` with the drafter's name."""
    where = draft.log_probs.isnan().any(dim=2).nonzero().tolist()
    if not where:
        return ValueError(f"draft: {_name(batch)}: {error}")
    row, level = where[0]
    stream = streams[row]
    message = (
        f"draft: {_name(batch)}: stream {stream.index}: the log-probs for position {len(stream.tokens) + level} hold a "
        "NaN; check the drafter's weights and inputs"
    )
    return stream.fail(NonFiniteError(message))


def check_tokens(batch: Batch, tree: DraftTree, error: ValueError | None = None) -> None:
    """Raises ValueError that names the drafter if a drafted id outside the vocabulary is why the target failed."""
    vocab_size = batch.model.config.vocab_size
    for stream in batch.running:
        token = tree.token[stream.seat, : int(tree.num_nodes[stream.seat])]
        outside = token[(token < 0) | (token >= vocab_size)].tolist()
        if outside:
            message = (
                f"draft: {_name(batch)}: stream {stream.index}: expected token ids of 0 … {vocab_size - 1}, got "
                f"{outside[0]}"
            )
            raise stream.fail(ValueError(message)) from error
