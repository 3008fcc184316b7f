"""Trees as arrays of links and bits, for whole batches and without a loop over nodes. Torch, on any device.

B streams, n nodes each. A node's parent has a smaller index than the node; -1 stands for none: no parent (a root or a
filler), no child, no further sibling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_nb.tree import DraftTree


def to_width(field: Tensor, n: int) -> Tensor:
    """A field [B, N] as [B, n]: cut, or filled with 0. What is cut or filled must not be in use."""
    missing = n - field.shape[1]
    return torch.nn.functional.pad(field, (0, missing)) if missing > 0 else field[:, :n]


def links(parent: Tensor) -> tuple[Tensor, Tensor]:
    """Parents i64 [B, n] -> first children and next siblings, i64 [B, n]; children in the order of their indices."""
    B, n = parent.shape
    owner, node = parent.sort(dim=1, stable=True)  # brings the children of a parent together
    is_child = owner >= 0
    is_younger = torch.zeros_like(is_child)
    is_younger[:, 1:] = (owner[:, 1:] == owner[:, :-1]) & is_child[:, 1:]
    first_child, next_sibling = torch.full((2, B, n + 1), -1, dtype=torch.int64, device=parent.device)
    # Column n takes what belongs nowhere and is cut off.
    first_child.scatter_(1, owner.masked_fill(is_younger | ~is_child, n), node)
    next_sibling.scatter_(1, node.roll(1, 1).masked_fill(~is_younger, n), node)
    return first_child[:, :n].contiguous(), next_sibling[:, :n].contiguous()


def parents(operation: str, first_child: Tensor, next_sibling: Tensor) -> Tensor:
    """First children and next siblings i64 [B, n] -> parents i64 [B, n]. Raises ValueError where they are no tree.

    Looks at values: on a GPU the host waits.
    """
    _check_links(operation, first_child, next_sibling)
    owner, elder = _pointed_from(first_child), _pointed_from(next_sibling)
    n = owner.shape[1]
    eldest = torch.where(elder >= 0, elder, torch.arange(n, device=owner.device))
    for _ in range(n.bit_length()):  # every step doubles how far back among its siblings a node looks
        eldest = eldest.gather(1, eldest)
    return owner.gather(1, eldest)


def ancestor_bits(parent: Tensor) -> Tensor:
    """Parents i64 [B, n] -> i64 [B, n, ceil(n/64)]: bit j%64 of word j//64 of node i: j is i or an ancestor of i."""
    B, n = parent.shape
    node = torch.arange(n, device=parent.device)
    bits = torch.zeros(B, n + 1, -(-n // 64), dtype=torch.int64, device=parent.device)
    bits[:, node, node // 64] = 1 << (node % 64)
    above = torch.cat([parent.masked_fill(parent < 0, n), torch.full_like(parent[:, :1], n)], 1)  # n: above the root
    for _ in range(n.bit_length()):  # every step doubles how far up a node looks
        bits = bits | bits.gather(1, above.unsqueeze(2).expand_as(bits))
        above = above.gather(1, above)
    return bits[:, :n].contiguous()


def row_bytes(tree: DraftTree, in_use: Tensor) -> Tensor:
    """Which nodes every row sees, u8 [B, n, bytes], bit j%8 of byte j//8; fillers see themselves. in_use: bool [B, n].

    As many bytes as SGLang's packed rows have: 1 for n up to 8, 2 up to 16, then a multiple of 4.
    """
    n = in_use.shape[1]
    num_bytes = 1 if n <= 8 else 2 if n <= 16 else 4 * -(-n // 32)
    ancestors = tree.ancestor_bits.contiguous().view(torch.uint8)  # little-endian words: bit j lies in byte j//8
    missing_rows, missing_bytes = n - ancestors.shape[1], num_bytes - ancestors.shape[2]
    ancestors = torch.nn.functional.pad(ancestors, (0, max(0, missing_bytes), 0, max(0, missing_rows)))
    node = torch.arange(n, device=in_use.device)
    itself = torch.zeros(n, num_bytes, dtype=torch.uint8, device=in_use.device)
    itself[node, node // 8] = (1 << (node % 8)).to(torch.uint8)
    return torch.where(in_use.unsqueeze(2), ancestors[:, :n, :num_bytes], itself)


def unpacked(row_bytes: Tensor, n: int) -> Tensor:
    """Bits u8 [B, n, bytes] -> bool [B, n, n]."""
    place = torch.arange(8, dtype=torch.uint8, device=row_bytes.device)
    return ((row_bytes.unsqueeze(3) >> place) & 1).bool().flatten(2)[:, :, :n]


def check_prefix_len(operation: str, prefix_len: Tensor, num_streams: int) -> None:
    """Raises ValueError unless prefix_len is i32 or i64 [num_streams] and, on a CPU, nowhere negative."""
    if prefix_len.shape != (num_streams,) or prefix_len.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{operation}: prefix_len: expected int32 or int64 [{num_streams}], got {prefix_len.dtype} "
            f"{[*prefix_len.shape]}"
        )
    if prefix_len.device.type == "cpu" and bool((prefix_len < 0).any()):
        raise ValueError(f"{operation}: prefix_len: expected lengths of at least 0, got {prefix_len.tolist()}")


def check_tree(operation: str, tree: DraftTree, n: int) -> None:
    """Raises ValueError unless every stream has a root, at most n nodes, valid parents, and siblings that differ in
    their tokens."""
    num_nodes = tree.num_nodes
    if bool(((num_nodes < 1) | (num_nodes > n)).any()):
        raise ValueError(
            f"{operation}: num_nodes: expected 1 … {n} per stream, got {num_nodes.tolist()}; leave out streams "
            "without a tree, and give larger trees a larger draft_token_num"
        )
    node = torch.arange(tree.token.shape[1], device=num_nodes.device)
    child = (node > 0) & (node < num_nodes.unsqueeze(1))
    parent = tree.parent.long()
    bad = (child & ((parent < 0) | (parent >= node))).nonzero()
    if len(bad):
        b, i = bad[0].tolist()
        raise ValueError(
            f"{operation}: stream {b}, node {i}: expected a parent of 0 … {i - 1}, got {int(parent[b, i])}"
        )
    # Equal (parent, token) pairs lie side by side when sorted; nodes that are no child get a key of their own.
    key = torch.where(child, (parent << 40) + tree.token, -1 - node)
    key, order = key.sort(dim=1)
    twins = (key[:, 1:] == key[:, :-1]).nonzero()
    if len(twins):
        b, k = twins[0].tolist()
        i = int(order[b, k])
        raise ValueError(
            f"{operation}: stream {b}: expected different tokens among the children of node {int(parent[b, i])}, "
            f"got token {int(tree.token[b, i])} twice"
        )


def _pointed_from(link: Tensor) -> Tensor:
    """Which node's link leads to each node, i64 [B, n]; -1 where none does."""
    B, n = link.shape
    source = torch.full((B, n + 1), -1, dtype=torch.int64, device=link.device)
    source.scatter_(1, link.masked_fill(link < 0, n), torch.arange(n, device=link.device).expand(B, n))
    return source[:, :n]


def _check_links(operation: str, first_child: Tensor, next_sibling: Tensor) -> None:
    """That links lead forwards, to different nodes, from nodes in use, and that these are the first ones."""
    n = first_child.shape[1]
    node = torch.arange(n, device=first_child.device)
    for name, link in (("retrieve_next_token", first_child), ("retrieve_next_sibling", next_sibling)):
        if link.dtype != torch.int64 or link.shape != first_child.shape:
            raise ValueError(
                f"{operation}: {name}: expected int64 {[*first_child.shape]}, got {link.dtype} {[*link.shape]}"
            )
        bad = ((link != -1) & ((link <= node) | (link >= n))).nonzero()
        if len(bad):
            b, i = bad[0].tolist()
            raise ValueError(
                f"{operation}: {name}: stream {b}, node {i}: expected -1 or {i + 1} … {n - 1}, got {link[b, i]}"
            )
    both = torch.cat([first_child, next_sibling], 1)
    arrivals = torch.zeros(len(both), n + 1, dtype=torch.int64, device=both.device)
    arrivals.scatter_add_(1, both.masked_fill(both < 0, n), torch.ones_like(both))
    arrivals[:, 0] += 1  # the root needs no link
    in_use = arrivals[:, :n] > 0
    outgoing = (first_child >= 0) | (next_sibling >= 0)
    for problem, what in (
        (arrivals[:, :n] > 1, "one link to the node, got several"),
        (outgoing & ~in_use, "no link from a node that none leads to, got one"),
        ((next_sibling >= 0) & (node == 0), "no sibling of the root, got one"),
        (in_use[:, 1:] & ~in_use[:, :-1], "the nodes in use in front of the fillers, got a filler in front of a node"),
    ):
        if bool(problem.any()):
            b, i = problem.nonzero()[0].tolist()
            raise ValueError(f"{operation}: links: stream {b}, node {i}: expected {what}")
