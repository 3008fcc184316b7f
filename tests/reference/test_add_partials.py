from __future__ import annotations

import numpy as np

from kdtree_nb import reference


def test_it_is_the_sum_with_one_rounding_and_the_residual_with_another():
    rng = np.random.default_rng(2)
    partials, residual = rng.standard_normal((8, 3, 5)), rng.standard_normal((3, 5))
    assert np.allclose(reference.add_partials(partials), partials.sum(0), rtol=1e-14, atol=1e-14)
    rounded = reference.round_bf16(partials.sum(0))
    want = reference.round_bf16(rounded + residual.astype(np.float32))
    got = reference.add_partials(partials, residual.astype(np.float32), reference.round_bf16)
    assert np.array_equal(got, want)
    assert np.array_equal(reference.add_partials(partials[:1]), partials[0])
