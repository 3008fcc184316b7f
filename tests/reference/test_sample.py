"""sample: known answers of the generator, the noise's distribution, and which tokens are kept."""

from __future__ import annotations

import numpy as np
import pytest

from kdtree_nb.reference import gumbel_noise, kept_tokens, philox, sample


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, (2**32 - 1,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers_of_the_generator(counter, key, want):
    assert philox(np.array([counter], np.uint32), key).tolist() == [want]


def test_noise_is_gumbels():
    noise = np.sort(gumbel_noise(5, 9, 100_001))
    assert np.isfinite(noise).all() and -3.2 < noise[0] and noise[-1] < 22.9
    distance = np.abs(np.exp(-np.exp(-noise)) - (np.arange(len(noise)) + 0.5) / len(noise)).max()
    assert distance < 1.95 / np.sqrt(len(noise))  # Kolmogorov: true noise exceeds this once in a thousand


def test_noise_of_a_token_depends_on_seed_position_and_token_alone():
    noise = gumbel_noise(3, 8, 1000)
    assert np.array_equal(noise[:7], gumbel_noise(3, 8, 7))
    assert len(np.unique(noise)) == 1000
    for seed, position in ((4, 8), (3 + 2**32, 8), (-3, 8), (3, 9), (8, 3)):
        other = gumbel_noise(seed, position, 1000)
        assert not np.isin(noise, other).any()
        assert abs(np.corrcoef(noise, other)[0, 1]) < 0.1


def test_kept_tokens():
    logits = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15]))
    assert kept_tokens(logits, 1.0, 0, 1.0).tolist() == [1, 3, 4, 0, 2]
    assert kept_tokens(logits, 1.0, 2, 1.0).tolist() == [1, 3]
    assert kept_tokens(logits, 1.0, 99, 1.0).tolist() == [1, 3, 4, 0, 2]
    for top_p, num_kept in ((0.01, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.84, 3), (0.86, 4), (0.96, 5)):
        assert len(kept_tokens(logits, 1.0, 0, top_p)) == num_kept
    assert len(kept_tokens(logits, 1.0, 2, 0.56)) == 1  # 0.4 / 0.7
    assert len(kept_tokens(logits, 1.0, 2, 0.58)) == 2
    assert len(kept_tokens(logits, 1e-3, 0, 0.999)) == 1 and len(kept_tokens(logits, 1e3, 0, 0.999)) == 5
    assert kept_tokens(np.zeros(9), 1.0, 3, 1.0).tolist() == [0, 1, 2]
    assert len(kept_tokens(np.zeros(3000), 1.0, 0, 0.999999)) == 1024


def test_rows_without_a_choice():
    inf, nan = np.inf, np.nan
    rows = np.array([[1, 3, 3, 2], [-inf] * 4, [nan, 9, 1, 1], [-inf, -inf, -9e9, -inf], [0, inf, 2, 3]])
    stream, position = np.zeros(5, np.int32), np.arange(5, dtype=np.int32)
    for temperature, top_k, top_p in ((0.0, 0, 1.0), (1.0, 1, 1.0), (1.0, 0, 1e-9)):
        parameters = ([temperature], [top_k], [top_p], [7])
        assert sample(rows, stream, position, *parameters).tolist() == [1, 0, -1, 2, 1]
    assert sample(rows[1:], stream[1:], position, [1.0], [0], [1.0], [7]).tolist() == [0, -1, 2, 1]


def test_the_noise_is_that_of_the_next_position():
    logits = np.zeros((1, 50))
    (token,) = sample(logits, [1], [11], [0.0, 1.0], [0, 0], [1.0, 1.0], [0, 6])
    assert token == gumbel_noise(6, 12, 50).argmax()
