"""The parts of a step that the device takes: sizes of trees, the buffer of trees, the ring of records."""

from __future__ import annotations

import torch

from kdtree_nb import ops
from kdtree_nb.speculate.device_step import Step, TreeBuffer
from kdtree_nb.speculate.mode import num_tree_slots
from kdtree_nb.speculate.step_runner import RING_SIZE, StepRunner


def test_sizes_of_trees():
    assert [num_tree_slots(n) for n in (1, 2, 3, 4, 5, 6, 9, 10, 17, 18, 65, 66, 1023, 1024)] == [
        1, 2, 3, 5, 5, 9, 9, 17, 17, 33, 65, 129, 1024, 1024,
    ]  # fmt: skip


def test_a_buffer_holds_the_last_trees(device):
    generator = torch.Generator().manual_seed(0)
    buffer = TreeBuffer(3, 9, device)
    address = buffer.tree.token.data_ptr()
    for budget in (8, 3, 0, 8):
        log_probs = torch.rand(3, 3, 4, generator=generator).sort(2).values.flip(2).log()
        ids = torch.stack([torch.randperm(9, generator=generator)[:4] for _ in range(9)]).view(3, 3, 4)
        tree = ops.tree_build(log_probs, ids, torch.tensor([1, 2, 3]), torch.tensor([budget, 0, 2]).int(), 8)
        buffer.put(tree)
        assert buffer.tree.num_nodes.tolist() == [budget + 1, 1, 3] and buffer.tree.token.data_ptr() == address
        for stream, count in enumerate((budget + 1, 1, 3)):
            for name in ("token", "parent", "depth"):
                got, want = getattr(buffer.tree, name), getattr(tree, name)
                assert torch.equal(got[stream, :count].cpu(), want[stream, :count])


def test_a_ring_keeps_the_last_records(device):
    """A runner hands out each record as long as no RING_SIZE later ones were begun."""
    counter = torch.zeros(1, dtype=torch.int64, device=device)

    def step(ring):
        ring.records.index_fill_(0, ring.step % RING_SIZE, 0)
        ring.records.index_add_(0, ring.step % RING_SIZE, counter.expand(1, 5, 2).contiguous())
        ring.step.add_(1)
        counter.add_(1)
        return Step(*[counter] * 4)

    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    runner = StepRunner(step, 2, 0, device, pool)
    counter.zero_()
    places = [runner.launch() for _ in range(RING_SIZE)]
    assert [runner.wait(place)[0, 0] for place in places] == list(range(RING_SIZE))
    places = [runner.launch() for _ in range(3)]
    assert [runner.wait(place).tolist() for place in places] == [[[RING_SIZE + i] * 2] * 5 for i in range(3)]
