"""Names and sums of what a profiler sees; on a GPU, the kernels of a captured graph one by one."""

from __future__ import annotations

import pytest
import torch

from kdtree_nb.bench.kernel_times import by_kernel, kernel_times, short_name
from kdtree_nb.native.cuda_graph import CudaGraph


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void kdtree::(anonymous namespace)::run_tile<kdtree::Shape<float, 8, (kdtree::Kind)1, false> >(kdtree::Args)",
         "run_tile<Shape<float, 8, 1, false>>"),
        ("kdtree::argmax_kernel(kdtree::ArgmaxArgs, long)", "argmax_kernel"),
        ("void at::native::fill_kernel<4, at::native::Fill<int>, std::array<char*, 1ul> >(int, at::native::Fill<int>)",
         "fill_kernel<4, Fill<int>, array<char*, 1ul>>"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("Memset", "Memset"),
    ],
)  # fmt: skip
def test_short_names(name, short):
    assert short_name(name) == short


def test_sums_of_one_run():
    events = [("a::f<1>(int)", 4, 8e-6), ("a::g(int)", 2, 6e-5), ("a::f<1>(long)", 2, 4e-6)]
    (g, *of_g), (f, *of_f) = by_kernel(events, 2)
    assert (g, f) == ("g", "f<1>") and of_g == [1, pytest.approx(3e-5)] and of_f == [3, pytest.approx(6e-6)]


def test_kernels_of_a_graph_are_seen_one_by_one(device):
    if device.type != "cuda":
        pytest.skip("a CPU has no kernels to profile")
    x = torch.ones(1000, 1000, device=device)
    graph = CudaGraph(lambda: (x + 1).cos().sum(), device, torch.cuda.graph_pool_handle())
    found = kernel_times(graph.replay, device)
    assert sum(kernel.launches for kernel in found) >= 3 and all(0 < kernel.seconds < 1 for kernel in found)
