"""DraftTree: a batch of draft trees, one per stream, in best-first order; torch tensors on one device."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, init=False)
class DraftTree:
    """B trees of at most N = 1 + max_budget nodes. Node 0 is the root (the bonus token); slots past num_nodes: fillers.

    token:         i64 [B, N]  token id; filler -1
    parent:        i32 [B, N]  node index of the parent, smaller than the node's own; root and filler -1
    depth:         i32 [B, N]  0 at the root; filler -1
    log_prob:      f64 [B, N]  score: sum of log-probs from the root, 0 at the root; filler -inf
    ancestor_bits: i64 [B, N, ceil(N/64)]  bit j%64 of word j//64 of node i: j is i or an ancestor of i; filler 0
    num_nodes:     i32 [B]     nodes in use, root included: 1 … N
    """

    token: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    log_prob: torch.Tensor
    ancestor_bits: torch.Tensor
    num_nodes: torch.Tensor

    def __init__(
        self, token: torch.Tensor, parent: torch.Tensor, depth: torch.Tensor, log_prob: torch.Tensor,
        ancestor_bits: torch.Tensor, num_nodes: torch.Tensor,
    ) -> None:  # fmt: skip
        fields = self.__dict__  # the generated __init__ of a frozen class takes a tenth as long as building the tree
        fields["token"], fields["parent"], fields["depth"] = token, parent, depth
        fields["log_prob"], fields["ancestor_bits"], fields["num_nodes"] = log_prob, ancestor_bits, num_nodes

    @property
    def num_streams(self) -> int:
        """B, the number of trees."""
        return self.token.shape[0]

    @property
    def max_budget(self) -> int:
        """Largest number of nodes besides the root that the arrays can hold."""
        return self.token.shape[1] - 1

    def path(self, stream: int, node: int) -> list[int]:
        """Node indices from the root (included) down to `node`. Raises ValueError for a node that is not in the
        tree."""
        if not 0 <= node < int(self.num_nodes[stream]):
            raise ValueError(f"DraftTree.path: expected a node below {int(self.num_nodes[stream])}, got {node}")
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = int(self.parent[stream, node])
        return nodes[::-1]

    def children(self, stream: int, node: int) -> list[int]:
        """Node indices of the children of `node`, best first."""
        count = int(self.num_nodes[stream])
        return [i for i in range(1, count) if int(self.parent[stream, i]) == node]

    def visibility(self, stream: int) -> torch.Tensor:
        """bool [n, n] with n = num_nodes: row i, column j is True where node i attends to node j."""
        count = int(self.num_nodes[stream])
        columns = torch.arange(count)
        words = self.ancestor_bits[stream, :count].cpu()[:, columns // 64]
        return ((words >> (columns % 64)) & 1).bool()
