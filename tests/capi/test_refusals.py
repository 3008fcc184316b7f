"""What the C ABI refuses, with which status and message; and the C functions themselves."""

from __future__ import annotations

import ctypes
import re
import threading

import numpy as np
import pytest

from kdtree_nb.errors import KernelUnavailableError
from kdtree_nb.kdtr import Bf16
from kdtree_nb.native import capi
from tests.capi.cases import Cases
from tests.capi.oracles import OPS

BAD_VALUES = {
    "embed": ({"token": np.array([3, 50])}, "embed: token: expected 0 to 49, got 50 at index 1"),
    "sample": ({"top_k": np.array([0, 1025, 0], np.int32)}, "sample: top_k: expected 0 to 1024, got 1025 at index 1"),
    "rope": ({"position": np.array([0, 1, 2, -1, 4, 5, 6], np.int32)}, "position: expected 0 to 99, got -1 at index 3"),
    "moe_experts": ({"expert_id": np.full((7, 2), 8, np.int32)}, "expert_id: expected 0 to 7, got 8 at index 0"),
    "cache_append": ({"slot": np.full(7, 90, np.int32)}, "cache_append: slot: expected 0 to 89, got 90 at index 0"),
    "latent_append": ({"position": np.full(7, -2, np.int32)}, "position: expected 0 to 99, got -2 at index 0"),
    "context_append": ({"position": np.full(7, 90, np.int32)}, "position: expected -1 to 89, got 90 at index 0"),
    "block_attn": ({"prefix_len": np.array([0, 86, 0], np.int32)}, "prefix_len: expected 0 to 85, got 86 at index 1"),
    "absorb_query": ({"position": np.full(7, 100, np.int32)}, "position: expected 0 to 99, got 100 at index 0"),
    "cache_compact": ({"num_accepted": np.array([6, 0, 0], np.int32)}, "num_accepted: expected 0 to 5, got 6"),
    "tree_build": ({"budget": np.array([1, 34, 0], np.int32)}, "budget: expected 0 to 33, got 34 at index 1"),
    "tree_rows": ({"prefix_len": np.array([1, -5, 0], np.int32)}, "prefix_len: expected 0 to .*, got -5 at index 1"),
    "tree_accept": ({"max_depth": 1}, "tree_accept: max_depth: expected at least the length of the accepted path"),
    "verify_attn": ({"prefix_len": np.array([0, 91, 0], np.int32)}, "prefix_len: expected 0 to 90, got 91 at index 1"),
    "step_commit": ({"num_accepted": np.array([5, 0, 0], np.int32)}, "step_commit: expected accepted nodes below"),
    "accepted_features": ({"first_row": np.array([0, 9, 0], np.int32)}, "expected at most max_depth accepted nodes"),
}


@pytest.mark.parametrize("op", BAD_VALUES)
def test_values_outside_are_named(op, cases):
    changes, message = BAD_VALUES[op]
    arguments = cases[op] | changes
    with pytest.raises(ValueError, match=rf"{message}.*KDTREE_OUT_OF_RANGE"):
        getattr(cases.library, op)(**arguments)


def test_other_statuses_of_the_kernels(library):
    cases = Cases(library, capi.CPU, "f32")
    logits = cases["draft_topk"]["logits"]
    logits[3, 7] = np.nan
    with pytest.raises(ValueError, match="draft_topk: expected logits below .inf and free of NaN .KDTREE_NON_FINITE"):
        library.draft_topk(logits=logits, num_candidates=4)
    arguments = cases["tree_build"]
    arguments["log_probs"][0, 0, 0] = np.nan
    with pytest.raises(ValueError, match="tree_build: expected log-probs .*KDTREE_INVALID_CANDIDATES"):
        library.tree_build(**arguments)
    arguments = cases["tree_accept"]
    arguments["parent"][0, 3] = 3
    with pytest.raises(ValueError, match="KDTREE_INVALID_TREE"):
        library.tree_accept(**arguments)


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        ("argmax", {"logits": np.zeros((2, 0), np.float32)}, "vocab_size: expected 1 to .*, got 0"),
        ("moe_route", {"top_k": 9}, "top_k: expected 1 to 8, got 9"),
        ("moe_route", {"scoring": "relu"}, "scoring: expected softmax or sigmoid, got 'relu'"),
        ("moe_route", {"scaling_factor": None}, "scaling_factor: expected a number, got None"),
        ("draft_topk", {"num_candidates": 301}, "num_candidates: expected 1 to 300, got 301"),
        ("draft_topk", {"num_candidates": 2.5}, "num_candidates: expected an integer from 0 to 2.40, got 2.5"),
        ("tree_build", {"max_budget": 1024}, "max_budget: expected 0 to 1023, got 1024"),
        ("linear", {"out_dtype": "bf16"}, "out_dtype: expected that of the input or F32, got BF16 of F32"),
        ("linear", {"num_out": 36}, "num_out: expected 35, the size of an array, got 36"),
        ("linear", {"packed": np.zeros((2, 3, 70, 15), np.float32)}, r"packed: expected shape \[G, N, K\] = "),
        ("rope", {"x": np.zeros((7, 3, 15), np.float32)}, "cos_sin: expected shape"),
        ("swiglu", {"gate_up": np.zeros((7, 5), np.float32)}, r"gate_up: expected shape \[T, 2\*I\] = \(7, 4\)"),
        ("embed", {"token": np.zeros(3, np.int32)}, "token: expected an array of i64, got i32"),
        ("embed", {"token": [1, 2]}, "token: expected an array of i64, got list"),
        ("embed", {"token": None}, "token: expected an array, got none"),
        ("embed", {"out": 1}, r"expected no further arguments, got \['out'\]"),
        ("residual_add", {"y": Bf16(np.zeros((7, 40), np.uint16))}, "y: expected an array of f32, got bf16"),
        ("cache_append", {"cache": np.zeros((64, 90, 3), np.float32).T}, "expected a contiguous and writable array"),
        ("argmax", {"num_threads": -1}, "num_threads: expected 0 to 4096, got -1"),
        ("moe_experts", {"shared_down": None}, "shared_gate_up and shared_down together or neither, got one"),
        ("argmax", {"device": capi.Device("tpu")}, "expected the kind cpu or cuda, got 'tpu'"),
        ("argmax", {"device": capi.Device("cpu", 1)}, "expected index 0 and no stream for a CPU"),
        ("argmax", {"device": capi.Device("cpu", 2**40)}, "device: expected an index of 0 to below 2.31, got 10995"),
        ("argmax", {"device": "cpu"}, "argmax: device: expected a capi.Device, got 'cpu'"),
        ("argmax", {"num_threads": 2**32 + 1}, "argmax: num_threads: expected a number that its C type holds"),
        ("moe_route", {"scaling_factor": "x"}, "scaling_factor: expected a number that its C type holds, got 'x'"),
        ("moe_route", {"scaling_factor": 10**400}, "scaling_factor: expected a number that its C type holds"),
    ],
)
def test_arguments_are_refused(op, changes, message, library):
    arguments = Cases(library, capi.CPU, "f32")[op] | changes
    with pytest.raises(ValueError, match=message):
        getattr(library, op)(**arguments)


def test_a_library_without_cuda_says_so(library):
    if not library.build.no_cuda:
        pytest.skip("this library has CUDA kernels")
    gpu = capi.Device("cuda")
    for call in (lambda: library.num_devices("cuda"), lambda: library.device_info(gpu),
                 lambda: library.argmax(logits=np.zeros((1, 4), np.float32), device=gpu)):  # fmt: skip
        with pytest.raises(KernelUnavailableError, match="built without CUDA kernels.*KDTREE_UNAVAILABLE"):
            call()


def test_unknown_operations_are_attribute_errors(library):
    with pytest.raises(AttributeError, match="no operation 'nothing'; it has .*'argmax'"):
        library.nothing  # noqa: B018


def raw_error(library, op, args, device=capi.CPU):
    """(status name, message) of a call with pointers."""
    struct = device.struct()
    status = getattr(library.raw, f"kdtree_{op}")(args and ctypes.byref(args), ctypes.byref(struct))
    return library.raw.kdtree_status_string(status).decode(), library.raw.kdtree_last_error().decode()


OF_A_SHARE = ("whole_in", "whole_width", "whole_shared_width", "whole_vocab", "first_segment", "num_segments")
"""Fields that only one of several ranks sets."""


@pytest.mark.parametrize("op", OPS)
def test_null_pointers_are_errors(op, library):
    """A zeroed struct has no rows and so needs no memory; with sizes of 1 every array is asked for."""
    known = library.ops[op]
    assert raw_error(library, op, None) == ("KDTREE_INVALID_ARGUMENT", f"{op}: args: expected an address, got NULL")
    assert getattr(library.raw, f"kdtree_{op}")(ctypes.byref(known.struct()), None) == 100
    args = known.struct()
    for field in known.numbers:
        if field not in ("dtype", "out_dtype", "scoring", "scale", "weights_settled", "int4", *OF_A_SHARE):
            setattr(args, field, {"q_kv_stride": 2 + 2 + 2, "q_stride": 2 * (2 + 2)}.get(field, 2))
    wanted = []
    memory = np.zeros(1 << 16)
    while True:
        status, message = raw_error(library, op, args)
        if ": expected the address of" not in message or status != "KDTREE_INVALID_ARGUMENT":
            break
        name = message.split(": ")[1]
        assert message.startswith(f"{op}: {name}: expected the address of [") and name not in wanted
        wanted.append(name)
        setattr(args, name, memory.ctypes.data + 1 if known.pointers[name].kind != "u8" else memory.ctypes.data)
        if known.pointers[name].kind != "u8":
            assert f"{op}: {name}: expected an address aligned to" in raw_error(library, op, args)[1]
            setattr(args, name, memory.ctypes.data)
        if op == "step_commit" and name == "step":
            break  # every pointer is there; what follows reads the arrays
    optional = {"num_rows_device", "row_begin", "group_id", "bias", "residual", "shared_gate_up", "shared_down"}
    optional |= {"workspace"}
    optional |= {"words"} if op == "draft_topk" else set()  # of a share, instead of the others
    optional |= {f"hidden_{layer}" for layer in range(2, 8)}  # of further layers
    assert set(wanted) >= set(known.pointers) - optional


@pytest.mark.parametrize("op", OPS)
def test_absurd_sizes_are_errors(op, library):
    known = library.ops[op]
    sizes = [name for name in known.numbers if re.search(r"^num_|(dim|size|depth|width)$", name)]
    for name in sizes:
        for value in (-1, -(2**31), 2**31 - 1 if name in ("num_threads", "num_segments") else 2**62):
            args = known.struct()
            setattr(args, name, value)
            status, message = raw_error(library, op, args)
            assert status == "KDTREE_INVALID_ARGUMENT" and message.startswith(f"{op}: "), message


def test_products_of_sizes_do_not_overflow(library):
    args = library.ops["embed"].struct(num_rows=0, vocab_size=1 << 40, dim=1 << 40)
    status, message = raw_error(library, "embed", args)
    assert (status, message) == (
        "KDTREE_INVALID_ARGUMENT",
        "embed: weight: expected fewer than 2^63 bytes for [V, D], got more",
    )


def test_strides_may_not_be_forgotten(library):
    x, out = np.ones((2, 4), np.float32), np.zeros((2, 4), np.float32)
    args = library.ops["rms_norm"].struct(x=x.ctypes.data, weight=x.ctypes.data, out=out.ctypes.data, num_rows=2, dim=4)
    assert raw_error(library, "rms_norm", args)[1].startswith("rms_norm: x_stride: expected 4 to")
    args.x_stride = 4
    assert raw_error(library, "rms_norm", args)[0] == "KDTREE_OK"


def test_messages_belong_to_their_thread(library):
    raw_error(library, "embed", None)
    seen = []

    def other():
        seen.append(library.raw.kdtree_last_error())
        raw_error(library, "rope", None)
        seen.append(library.raw.kdtree_last_error())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen[0] == b"" and seen[1].startswith(b"rope: ")
    assert library.raw.kdtree_last_error().startswith(b"embed: ")


def test_rows_in_use_may_stand_in_memory(library):
    logits, token, count = np.eye(4, dtype=np.float32), np.full(4, -7), np.array([2], np.int32)
    args = library.ops["argmax"].struct(logits=logits.ctypes.data, token=token.ctypes.data, num_rows=4, vocab_size=4)
    args.num_rows_device = count.ctypes.data
    assert raw_error(library, "argmax", args)[0] == "KDTREE_OK" and token.tolist() == [0, 1, -7, -7]


def test_memory_of_the_cpu(library):
    device, raw = capi.CPU.struct(), library.raw
    address = ctypes.c_void_p()
    for num_bytes in (0, 1, 1000):
        library.check(raw.kdtree_malloc(ctypes.byref(device), num_bytes, ctypes.byref(address)))
        assert address.value % 256 == 0
        data = np.arange(num_bytes % 256, dtype=np.uint8)
        back = np.zeros_like(data)
        library.check(raw.kdtree_copy(ctypes.byref(device), address, data.ctypes.data, data.nbytes))
        library.check(raw.kdtree_copy(ctypes.byref(device), back.ctypes.data, address, data.nbytes))
        assert np.array_equal(back, data)
        library.check(raw.kdtree_free(ctypes.byref(device), address))
    assert raw.kdtree_free(ctypes.byref(device), None) == 0
    assert raw.kdtree_malloc(ctypes.byref(device), -1, ctypes.byref(address)) == 100 and address.value is None
    with pytest.raises(MemoryError, match="KDTREE_OUT_OF_MEMORY"):
        library.check(raw.kdtree_malloc(ctypes.byref(device), 1 << 50, ctypes.byref(address)))
    assert raw.kdtree_synchronize(ctypes.byref(device)) == raw.kdtree_create_stream(ctypes.byref(device)) == 0
    info = library.device_info(capi.CPU)
    assert (info.name, info.arch, info.has_kernels) == (b"CPU", 0, 1)
    assert info.num_multiprocessors >= 1 and info.memory_bytes > 1 << 28 and library.num_devices("cpu") == 1
