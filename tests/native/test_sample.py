"""sample: tokens of the float64 oracle wherever it is sure, and draws from the distribution that was asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kdtree_nb import ops, reference

pytestmark = pytest.mark.usefixtures("on_device")
BY_VALUE = pytest.mark.cpu_only("a GPU does not look at values: tests/cuda/test_bad_values.py")

INF, NAN = float("inf"), float("nan")
MARGIN = 5e-5
"""Scores and probabilities that lie closer may fall either way in FP32."""


def parameters(*streams: tuple[float, int, float, int]) -> list[torch.Tensor]:
    """(temperature, top_k, top_p, seed) of every stream as the tensors that sample takes."""
    columns = zip(*streams, strict=True)
    types = (torch.float32, torch.int32, torch.float32, torch.int64)
    return [torch.tensor(column, dtype=dtype) for column, dtype in zip(columns, types, strict=True)]


def draw(logits: torch.Tensor, *streams: tuple, stream=None, position=None) -> torch.Tensor:
    """Tokens of rows that lie one behind the other, of stream 0 unless told otherwise."""
    num_rows = len(logits)
    stream = [0] * num_rows if stream is None else stream
    position = range(num_rows) if position is None else position
    stream, position = (torch.tensor(list(values), dtype=torch.int32) for values in (stream, position))
    return ops.sample(logits, stream, position, *parameters(*streams))


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of Pearson's chi-square test: how likely draws are that differ as much from the probabilities, or more."""
    expected = probabilities * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    shape = torch.tensor((counts.size - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(shape, torch.tensor(statistic / 2, dtype=torch.float64)).item()


def is_sure(logits: np.ndarray, temperature: float, top_k: int, top_p: float, seed: int, position: int) -> bool:
    """Whether rounding cannot change the oracle's choice: neither a score, nor a probability where top_p ends."""
    if temperature == 0:
        return True
    scores = (logits - logits.max()) / temperature + reference.gumbel_noise(seed, position + 1, len(logits))
    chosen = set()
    for near in (top_p, top_p * (1 - MARGIN), top_p * (1 + MARGIN)) if top_p < 1 else (1.0,):
        ids = reference.kept_tokens(logits, temperature, top_k, near)
        chosen.update(ids[scores[ids] > scores[ids].max() - MARGIN])
    return len(chosen) == 1


STREAMS = [
    (1.0, 0, 1.0, 1), (0.7, 50, 0.913, 2**40 + 7), (2.0, 0, 0.537, -5), (0.0, 5, 1.0, 3), (1.3, 7, 1.0, 2**63 - 1),
    (0.2, 1024, 0.9987, 0), (1.0, 1, 1.0, 1), (30.0, 0, 1.0, 9), (5.0, 1000, 0.617, 9),
]  # fmt: skip
VOCAB_SIZES = [1, 2, 3, 5, 31, 64, 65, 256, 331, 1024, 1025, 4100, 5003, 20_000]


def check(logits: torch.Tensor, streams=STREAMS) -> None:
    stream = [t % len(streams) for t in range(len(logits))]
    position = [3 * t for t in range(len(logits))]
    got = draw(logits, *streams, stream=stream, position=position)
    exact = logits.double().numpy()
    rounded = [np.array(values.numpy()) for values in parameters(*streams)]
    want = reference.sample(exact, np.array(stream), np.array(position), *rounded)
    of_row = [[float(rounded[i][s]) if i in (0, 2) else int(rounded[i][s]) for i in range(4)] for s in stream]
    sure = np.array([is_sure(row, *of_row[t], position[t]) for t, row in enumerate(exact)])
    assert np.count_nonzero(~sure) <= 1
    assert got.dtype == torch.int64 and np.array_equal(got.numpy()[sure], want[sure])


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_equals_the_reference(vocab_size, rng):
    for scale in (0.0, 0.5, 4.0):
        check(torch.from_numpy(rng.standard_normal((36, vocab_size)) * scale).float())


@pytest.mark.parametrize("order", ["rising", "falling", "shuffled", "of few values", "equal"])
def test_true_vocabulary(order):
    vocab_size = 163_840
    logits = torch.linspace(-30, 5, vocab_size)
    logits = {
        "rising": logits, "falling": logits.flip(0), "equal": torch.zeros(vocab_size), "of few values": logits.round(),
        "shuffled": logits[torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))],
    }[order]  # fmt: skip
    check(logits.repeat(9, 1))


def test_impossible_tokens_and_ties(rng):
    logits = torch.from_numpy(rng.integers(-2, 3, (90, 700)) * 0.5).float()
    logits[torch.from_numpy(rng.random(logits.shape) < 0.4)] = -INF
    check(logits)


PROBABILITIES = np.array([0.3, 0.05, 0.2, 0.01, 0.24, 0.15, 0.05])
NUM_DRAWS = 40_000
WRONG_BELOW = 1e-12
"""p-value of draws from another distribution. Those of the right one get above 1e-3 with the seeds below."""


def counts_of(tokens: torch.Tensor | np.ndarray, vocab_size: int) -> np.ndarray:
    return np.bincount(np.asarray(tokens), minlength=vocab_size)


def rows_of(probabilities: np.ndarray, num_rows: int = NUM_DRAWS) -> torch.Tensor:
    return torch.from_numpy(np.log(probabilities)).float().repeat(num_rows, 1)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "kept"),
    [
        (1.0, 0, 1.0, list(range(7))), (0.5, 0, 1.0, list(range(7))), (3.0, 7, 1.0, list(range(7))),
        (1.0, 3, 1.0, [0, 2, 4]), (1.0, 5, 1.0, [0, 1, 2, 4, 5]), (1.0, 0, 0.7, [0, 2, 4]), (2.0, 4, 0.9, [0, 2, 4, 5]),
        (2.0, 4, 0.75, [0, 2, 4]),
    ],
)  # fmt: skip
def test_draws_follow_the_distribution(temperature, top_k, top_p, kept):
    weights = np.zeros(7)
    weights[kept] = PROBABILITIES[kept] ** (1 / temperature)
    counts = counts_of(draw(rows_of(PROBABILITIES), (temperature, top_k, top_p, 11)), 7)
    assert counts[weights == 0].sum() == 0
    assert p_value(counts[kept], weights[kept] / weights.sum()) > 1e-3


WRONG = {
    "uniform noise": lambda logits, noise: logits + np.exp(-np.exp(-noise)),
    "noise of the wrong sign": lambda logits, noise: logits - noise,
    "a tenth too much noise": lambda logits, noise: logits + 1.1 * noise,
    "noise of few positions": lambda logits, noise: logits + noise[np.arange(len(noise)) % 99],
    "noise that tokens share": lambda logits, noise: logits + noise[:, [0, 0, 2, 3, 4, 5, 6]],
    "no noise": lambda logits, noise: logits + 0 * noise,
}  # fmt: skip


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    return np.stack([reference.gumbel_noise(11, position, 7) for position in range(NUM_DRAWS // 2)])


@pytest.mark.parametrize("name", WRONG)
def test_wrong_noise_would_be_seen(name, noise):
    right = (np.log(PROBABILITIES) + noise).argmax(axis=1)
    assert p_value(counts_of(right, 7), PROBABILITIES) > 1e-3
    wrong = WRONG[name](np.log(PROBABILITIES), noise).argmax(axis=1)
    assert p_value(counts_of(wrong, 7), PROBABILITIES) < WRONG_BELOW


def test_draws_of_neighbouring_positions_and_seeds_are_independent():
    probabilities = np.array([0.5, 0.2, 0.2, 0.1])
    rows = rows_of(probabilities)
    first, second = (draw(rows, (1.0, 0, 1.0, seed)).numpy() for seed in (20, 21))
    product = np.outer(probabilities, probabilities).ravel()
    for a, b in ((first[:-1], first[1:]), (first, second), (first[:-4], first[4:])):
        assert p_value(counts_of(4 * a + b, 16), product) > 1e-3
    assert p_value(counts_of(4 * first + first, 16), product + 1e-9) < WRONG_BELOW


def test_draws_of_tokens_that_share_a_block_of_the_generator_are_independent():
    """The four words of a block: whether word 0 beats word 1 says nothing about words 2 and 3."""
    rows = torch.zeros(NUM_DRAWS, 4)
    rows[:, 2:] = -INF
    low = draw(rows, (1.0, 0, 1.0, 5)).numpy()
    high = draw(rows.flip(1), (1.0, 0, 1.0, 5)).numpy() - 2
    assert p_value(counts_of(2 * low + high, 4), np.full(4, 0.25)) > 1e-3


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 8, 33])
@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.61, 0.9, 0.999, 1.0])
def test_the_tokens_drawn_are_those_kept(top_k, top_p, rng):
    """Against brute force: the smallest number of tokens, of all there are, that is enough."""
    vocab_size, temperature = 33, 20.0
    row = rng.permutation(vocab_size).astype(np.float32)
    order = sorted(range(vocab_size), key=lambda v: -row[v])[:top_k]
    mass = [math.exp(float(row[v]) / temperature) for v in order]
    enough = [n for n in range(1, top_k + 1) if sum(mass[:n]) >= top_p * sum(mass) - 1e-9]
    tokens = draw(torch.from_numpy(row).repeat(3000, 1), (temperature, top_k, top_p, 8))
    assert set(tokens.tolist()) == set(order[: enough[0]])


def test_the_lower_id_is_kept_among_equal_logits():
    rows = torch.zeros(2000, 300)
    rows[:, 100] = 1e-3
    assert set(draw(rows, (1.0, 4, 1.0, 2)).tolist()) == {100, 0, 1, 2}
    assert set(draw(rows[:, :100].contiguous(), (1.0, 0, 0.035, 2)).tolist()) == {0, 1, 2, 3}


def test_top_p_alone_looks_at_1024_tokens():
    logits = torch.zeros(20_000, 3000)
    tokens = draw(logits, (1.0, 0, 0.999, 4))
    assert tokens.max() == 1022 and len(tokens.unique()) == 1023  # the fewest of 1024 that are 0.999 of them
    assert draw(logits[:4000], (1.0, 0, 1.0, 4)).max() > 2900


def test_a_row_is_the_same_alone_in_a_batch_and_on_any_threads(rng, num_threads):
    logits = torch.from_numpy(rng.standard_normal((45, 5003)) * 4).float()
    stream, position = [t % 9 for t in range(45)], rng.integers(0, 2**31 - 1, 45).tolist()
    with num_threads(1):
        whole = draw(logits, *STREAMS, stream=stream, position=position)
    with num_threads(2):
        assert torch.equal(draw(logits, *STREAMS, stream=stream, position=position), whole)
    order = rng.permutation(45)
    shuffled = draw(
        logits[order].contiguous(), *STREAMS, stream=[stream[t] for t in order], position=[position[t] for t in order]
    )
    assert torch.equal(shuffled, whole[order])
    for t in (0, 1, 2, 4, 5, 8, 44):
        alone = draw(logits[t : t + 1].contiguous(), STREAMS[stream[t]], position=[position[t]])
        assert alone.tolist() == whole[t : t + 1].tolist()


def test_seed_and_position_change_the_draws_and_a_call_does_not():
    rows = torch.zeros(64, 1000)
    tokens = [draw(rows, (1.0, 0, 1.0, seed)).tolist() for seed in (1, 2, 1 + 2**32, 1)]
    assert tokens[0] == tokens[3] and tokens[0] != tokens[1] and tokens[0] != tokens[2]
    assert draw(rows, (1.0, 0, 1.0, 1), position=range(10, 74)).tolist()[:54] == tokens[0][10:]
    assert len(set(tokens[0])) > 50


def test_temperature_zero_is_argmax(rng):
    logits = torch.from_numpy(rng.integers(0, 4, (200, 70))).float()
    for top_k, top_p in ((0, 1.0), (5, 0.3)):
        assert torch.equal(draw(logits, (0.0, top_k, top_p, 1)), ops.argmax(logits))


@pytest.mark.parametrize("temperature", [2.0**-126, 1e-30, 1e-7])
def test_a_small_temperature_is_nearly_argmax(temperature, rng):
    logits = torch.from_numpy(rng.standard_normal((100, 700))).float()
    logits[:50] *= 1e30
    for top_k, top_p in ((0, 1.0), (50, 1.0), (50, 0.9)):
        assert torch.equal(draw(logits, (temperature, top_k, top_p, 1)), ops.argmax(logits))


def test_a_large_temperature_is_nearly_uniform():
    rows = torch.tensor([0.0, 9.0, -5.0, 3e4, 1.0]).repeat(NUM_DRAWS, 1)
    for top_k in (0, 4):
        kept = [0, 1, 2, 3, 4] if top_k == 0 else [0, 1, 3, 4]
        counts = counts_of(draw(rows, (3.4e38, top_k, 1.0, 6)), 5)
        assert counts.sum() == counts[kept].sum()
        assert p_value(counts[kept], np.full(len(kept), 1 / len(kept))) > 1e-3


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (3, 0.9)])
def test_rows_with_nan_and_infinities(top_k, top_p):
    rows = torch.tensor([[1, NAN, 2, 3], [-INF] * 4, [-INF, -INF, -7, -INF], [0, INF, 2, -INF]])
    assert draw(rows, (1.0, top_k, top_p, 1)).tolist() == [-1, 0, 2, 1]
    two = torch.tensor([[0, INF, 5, INF, -INF]]).repeat(400, 1)
    assert set(draw(two, (1.0, top_k, top_p, 1)).tolist()) == {1, 3}
    last = torch.zeros(5, 5003)
    last[range(5), [0, 1, 2500, 5001, 5002]] = NAN
    assert draw(last, (1.0, top_k, top_p, 1)).tolist() == [-1] * 5


def test_no_rows():
    assert draw(torch.zeros(0, 5), (1.0, 0, 1.0, 1)).tolist() == []


def test_opcheck(opcheck):
    logits, stream = torch.randn(3, 20), torch.tensor([0, 1, 1], dtype=torch.int32)
    opcheck("sample", logits, stream, stream, *parameters((1.0, 0, 1.0, 1), (0.5, 4, 0.9, 2)))


@BY_VALUE
@pytest.mark.parametrize(
    ("streams", "message"),
    [
        (
            [(-1.0, 0, 1.0, 1)],
            "sample: stream 0: temperature: expected 0 or a finite number of at least 2^-126, got -1",
        ),
        ([(1.0, 0, 1.0, 1), (NAN, 0, 1.0, 1)], "sample: stream 1: temperature: expected 0 or .*, got nan"),
        ([(INF, 0, 1.0, 1)], "sample: stream 0: temperature: expected .*, got inf"),
        ([(1e-39, 0, 1.0, 1)], "sample: stream 0: temperature: expected .*, got 1e-39"),
        ([(1.0, -1, 1.0, 1)], "sample: stream 0: top_k: expected 0 .all. … 1024, got -1"),
        ([(1.0, 1025, 1.0, 1)], "sample: stream 0: top_k: expected .*, got 1025"),
        ([(1.0, 0, 0.0, 1)], "sample: stream 0: top_p: expected above 0 and at most 1, got 0"),
        ([(1.0, 0, 1.5, 1)], "sample: stream 0: top_p: expected .*, got 1.5"),
        ([(1.0, 0, NAN, 1)], "sample: stream 0: top_p: expected .*, got nan"),
    ],
)
def test_bad_parameters_are_named(streams, message):
    with pytest.raises(ValueError, match=message.replace("^", r"\^")):
        draw(torch.zeros(4, 9), *streams, stream=[0, 0, 0, len(streams) - 1])


@BY_VALUE
def test_bad_rows_are_named():
    with pytest.raises(ValueError, match="sample: stream: expected 0 … 0, got 1 at index 2"):
        draw(torch.zeros(3, 9), (1.0, 0, 1.0, 1), stream=[0, 0, 1])
    with pytest.raises(ValueError, match="sample: position: expected 0 … 2147483647, got -1 at index 1"):
        draw(torch.zeros(3, 9), (1.0, 0, 1.0, 1), position=[0, -1, 1])


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(3), r"sample: logits: expected shape \[T, V\]"),
        (0, torch.zeros(3, 0), "sample: vocabulary size V: expected at least 1, got 0"),
        (0, torch.zeros(3, 4).bfloat16(), "sample: logits: expected dtype Float, got BFloat16"),
        (1, torch.zeros(2, dtype=torch.int32), r"sample: stream: expected shape \[T\] = \[3\]"),
        (2, torch.zeros(3), "sample: position: expected dtype Int, got Float"),
        (3, torch.zeros(1, 1), r"sample: temperature: expected shape \[S\]"),
        (4, torch.zeros(2, dtype=torch.int32), r"sample: top_k: expected shape \[S\] = \[1\]"),
        (5, torch.ones(1).double(), "sample: top_p: expected dtype Float, got Double"),
        (6, torch.zeros(1, dtype=torch.int32), "sample: seed: expected dtype Long, got Int"),
    ],
)
def test_bad_tensors_are_named(index, value, message):
    arguments = [torch.zeros(3, 4), *[torch.zeros(3, dtype=torch.int32)] * 2, *parameters((1.0, 0, 1.0, 1))]
    arguments[index] = value
    with pytest.raises(ValueError, match=message):
        ops.sample(*arguments)
