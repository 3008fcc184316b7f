"""The peers compute what the engine computes: otherwise their times would mean nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import Engine, drafters, ops, reference
from kdtree_nb.bench import setting
from kdtree_nb.bench.eager_torch import EagerModel
from kdtree_nb.bench.peers import FirstCandidateOnly, accept_python, compact_python
from kdtree_nb.bench.tree_heapq import build_tree_heapq
from kdtree_nb.config import ModelConfig
from kdtree_nb.goldens import load_goldens
from kdtree_nb.kdtr import open_kdtr
from kdtree_nb.model.checkpoint import DATA_DIR
from kdtree_nb.tiny2 import tiny2_config, tiny2_weights


def eager(name: str) -> EagerModel:
    if name == "tiny2":
        return EagerModel(tiny2_config(), tiny2_weights(), 512)
    file = open_kdtr(DATA_DIR / "tiny.kdtr")
    config = ModelConfig.from_dict(file.metadata["config"])
    return EagerModel(config, {name: file.float32(name) for name in file.names}, 512)


@pytest.mark.parametrize("name", ["tiny", "tiny2"])
def test_eager_torch_writes_the_golden_text(name):
    model, golden = eager(name), load_goldens(name)[1]
    model.prefill(golden.prompt)
    assert model.decode(golden.prompt[-1], 64) == golden.tokens[:64]
    model.prefill(golden.prompt)
    first = model.step(golden.prompt[-1])
    assert np.abs(first[0].double().numpy() - golden.logits[0]).max() < 1e-4


@pytest.mark.parametrize("budget", [1, 7, 64, 200])
def test_published_tree_equals_the_reference(budget):
    log_probs, ids = setting.random_candidates(5, 16, vocab_size=50, seed=budget)
    tree = build_tree_heapq(torch.from_numpy(log_probs), torch.from_numpy(ids), budget)
    want = reference.tree_build(log_probs[None], ids[None], [3], budget)
    assert tree.token.tolist() == want.token[0, 1:].tolist() and tree.depth.tolist() == want.depth[0, 1:].tolist()
    assert tree.parent == want.parent[0].tolist()
    assert np.array_equal(tree.visibility.numpy(), reference.visibility(want, 0))
    assert all(tree.token[node - 1] == token for below in tree.children for token, node in below.items())
    assert sum(map(len, tree.children)) == budget


def test_a_small_published_tree():
    log_probs, ids = torch.log(torch.tensor([[0.9, 0.1]])), torch.tensor([[4, 5]])
    tree = build_tree_heapq(log_probs, ids, 10)
    assert tree.token.tolist() == [4, 5] and tree.parent == [-1, 0, 0] and tree.children == [{4: 1, 5: 2}, {}, {}]


def test_accept_and_compact_in_python():
    tree = setting.random_tree(40, torch.tensor([7]), 30)
    rng = np.random.default_rng(0)
    lengths = set()
    for _ in range(50):
        target = torch.full_like(tree.token, 30)
        for node in range(40):
            below = tree.children(0, node)
            if below and rng.random() < 0.8:
                target[0, node] = tree.token[0, rng.choice(below)]
        path, count, next_token = ops.tree_accept(tree, target, 39)
        assert accept_python(tree, 0, target) == (path[0, : int(count)].tolist(), int(next_token))
        a = torch.from_numpy(rng.standard_normal((2, 1, 60, 3), dtype=np.float32))
        b = a.clone()
        ops.cache_compact(a, torch.tensor([11], dtype=torch.int32), path, count)
        compact_python(b, 0, 11, path[0, : int(count)].tolist())
        assert torch.equal(a, b)
        lengths.add(int(count))
    assert len(lengths) > 2


def test_the_chain_is_the_tree_without_siblings(models):
    model = models("tiny")
    prompt = setting.prompts("repetitive")["properties"]
    trees = []
    engine = Engine(model, drafter=FirstCandidateOnly(drafters.NGram()), budget=16)
    run = engine.generate_ddtree(prompt, 48, on_step=lambda step: trees.append(step.tree))
    assert run.tokens == Engine(model).generate_ar(prompt, 48).tokens
    assert max(run.stats.accepted_per_step) > 0
    for tree in trees:
        count = int(tree.num_nodes[0])
        assert tree.parent[0, :count].tolist() == list(range(-1, count - 1))
