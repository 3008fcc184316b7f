"""KDTR: round trips, every refusal, and fuzzing (truncation, bit flips, hostile headers)."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_nb.errors import KdtrError
from kdtree_nb.kdtr import Bf16, from_safetensors, open_kdtr, to_safetensors, write_kdtr
from kdtree_nb.kdtr_header import DTYPES
from tests.kdtr_corpus import DATA, HOSTILE, bits, entry, sample_tensors, with_tensors, write_raw

NUM_FUZZ = 2000


# ------------------------------------------------------------------------------------------------- what must work
def test_round_trip_keeps_every_bit(tmp_path):
    tensors, metadata = sample_tensors(), {"note": "ä ✓ \U0001f600", "list": [1, 2.5, None, {"deep": [True]}]}
    write_kdtr(tmp_path / "a.kdtr", tensors, metadata)
    file = open_kdtr(tmp_path / "a.kdtr")
    file.verify()
    assert file.metadata == metadata
    assert file.names == list(tensors)
    for name, tensor in tensors.items():
        array = file.array(name)
        assert bits(array) == bits(tensor)
        assert (file.dtype(name), file.shape(name)) == (name.split(".")[0], array.shape)
        assert not array.flags.writeable or array.size == 0
        assert array.ctypes.data % 64 == 0 or array.size == 0


def test_bytes_follow_the_documented_layout(tmp_path):
    write_kdtr(tmp_path / "a.kdtr", {"x": np.arange(3, dtype=">i4"), "y": np.ones((2, 2), np.float32)}, {"k": 1})
    raw = (tmp_path / "a.kdtr").read_bytes()
    magic, version, crc32, header_bytes = struct.unpack_from("<8sIIQ", raw)
    header = json.loads(raw[24 : 24 + header_bytes])
    assert (magic, version, crc32) == (b"KDTR\r\n\x1a\n", 1, zlib.crc32(raw[16 : 24 + header_bytes]))
    start = -(-(24 + header_bytes) // 64) * 64
    assert raw[start : start + 12] == struct.pack("<3i", 0, 1, 2)
    assert header["tensors"]["y"]["offset"] == 64
    assert raw[start + 64 :] == struct.pack("<4f", 1, 1, 1, 1)
    assert raw[start + 12 : start + 64] == bytes(52)


def test_empty_file_scalars_and_strided_input(tmp_path):
    write_kdtr(tmp_path / "empty.kdtr", {}, {})
    assert open_kdtr(tmp_path / "empty.kdtr").names == []
    grid = np.arange(24, dtype=np.int64).reshape(4, 6)
    write_kdtr(tmp_path / "a.kdtr", {"t": grid.T[::2], "s": np.float64(2.5)}, {})
    file = open_kdtr(tmp_path / "a.kdtr")
    assert np.array_equal(file.array("t"), grid.T[::2])
    assert file.array("s").shape == () and file.array("s") == 2.5
    assert "t" in file and "absent" not in file and list(file) == ["t", "s"]


def test_same_input_gives_the_same_bytes(tmp_path):
    for name in "ab":
        write_kdtr(tmp_path / name, sample_tensors(), {"n": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_arrays_outlive_the_file_object_and_its_replacement(tmp_path):
    path = tmp_path / "a.kdtr"
    write_kdtr(path, {"x": np.arange(1000)}, {})
    array = open_kdtr(path).array("x")
    write_kdtr(path, {"x": np.zeros(5)}, {})
    assert array.sum() == 499500


def test_bf16_widening_is_exact_and_rounding_is_to_nearest_even(tmp_path):
    every = np.arange(1 << 16, dtype=np.uint16)
    wide = Bf16(every).float32()
    finite = ~np.isnan(wide)
    assert np.array_equal(Bf16.round(wide[finite]).bits, every[finite])
    assert np.isnan(Bf16.round(wide[~finite]).float32()).all()
    rng = np.random.default_rng(1)
    values = (rng.standard_normal(20000) * 10.0 ** rng.integers(-30, 30, 20000)).astype(np.float32)
    below = (values.view(np.uint32) >> 16).astype(np.uint16)
    low, high = (Bf16(below + np.uint16(up)).float32().astype(np.float64) for up in (0, 1))
    nearest = np.where(abs(values - low) < abs(high - values), low, high)
    assert np.array_equal(Bf16.round(values).float32(), nearest.astype(np.float32))
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)], np.float32)
    assert Bf16.round(ties).float32().tolist() == [1.0, 1 + 2**-6, -1.0]
    assert Bf16.round(np.array([3.4e38], np.float32)).float32().tolist() == [np.inf]
    with pytest.raises(ValueError, match="expected float32"):
        Bf16.round(np.ones(1))
    write_kdtr(tmp_path / "a.kdtr", {"b": Bf16(every), "h": np.ones(2, np.float16), "i": np.ones(2, np.int8)}, {})
    file = open_kdtr(tmp_path / "a.kdtr")
    assert file.float32("b").tobytes() == wide.tobytes()
    assert file.float32("h").dtype == np.float32
    with pytest.raises(KdtrError, match="tensor 'i': dtype: expected f32, f16 or bf16, got i8"):
        file.float32("i")


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "a.kdtr"
    write_kdtr(path, {"x": np.arange(4)}, {})
    before = path.read_bytes()

    def full_disk(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_kdtr(path, {"x": np.arange(5)}, {})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.kdtr"]


# -------------------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("tensors", "metadata", "expected"),
    [
        ({"": np.ones(1)}, {}, "non-empty string"),
        ({3: np.ones(1)}, {}, "non-empty string"),
        ({"x": np.ones(1, np.complex64)}, {}, "tensor 'x': dtype: expected one of f64 .* got complex64"),
        ({"x": np.ones(1, np.uint16)}, {}, "got uint16"),
        ({"x": Bf16(np.ones(1, np.int16))}, {}, "got int16"),
        ({"x": np.array(["text"])}, {}, "tensor 'x': dtype"),
        ({"x": np.ones((1,) * 9)}, {}, "at most 8 dimensions, got 9"),
        ({}, {"x": float("nan")}, "finite JSON values"),
        ({}, {"x": {1, 2}}, "finite JSON values"),
        ({}, {"x": (1, 2)}, "no tuples"),
        ({}, {1: "x"}, "string keys"),
    ],
)
def test_writer_refuses(tmp_path, tensors, metadata, expected):
    with pytest.raises(KdtrError, match=expected):
        write_kdtr(tmp_path / "a.kdtr", tensors, metadata)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("case", HOSTILE)
def test_reader_refuses_hostile_header(tmp_path, case):
    header, data, expected = HOSTILE[case]
    path = write_raw(tmp_path / "bad.kdtr", header, data)
    tracemalloc.start()
    try:
        with pytest.raises(KdtrError, match=expected) as caught:
            open_kdtr(path)
        assert tracemalloc.get_traced_memory()[1] < 40 * path.stat().st_size + 500_000
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value) and len(str(caught.value)) < 2000


def test_reader_accepts_what_the_hostile_cases_start_from(tmp_path):
    tensors = with_tensors(x=entry(DATA), y=entry(b"a", offset=128), z=entry(shape=[0, 2**40]))
    file = open_kdtr(write_raw(tmp_path / "a.kdtr", tensors, DATA + bytes(60) + b"a"))
    file.verify()
    assert (file.array("x").tobytes(), file.array("y").tobytes(), file.shape("z")) == (DATA, b"a", (0, 2**40))
    assert file.array("z").size == 0
    nested = b'{"metadata":{"a":' + b"[" * 62 + b"]" * 62 + b'},"tensors":{}}'
    assert open_kdtr(write_raw(tmp_path / "b.kdtr", nested)).names == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"magic": b"PK\3\4....."[:8]}, "magic: expected"),
        ({"magic": b"KDTR\n\x1a\n\0"}, "magic: expected"),
        ({"version": 0}, "version: expected 1, got 0"),
        ({"version": 2}, "version: expected 1, got 2 .*newer kdtree_nb"),
        ({"header_bytes": 2**63}, "header: length: expected at most"),
        ({"header_bytes": 10}, "header: CRC-32"),
    ],
)
def test_reader_refuses_preamble(tmp_path, changes, expected):
    with pytest.raises(KdtrError, match=expected):
        open_kdtr(write_raw(tmp_path / "bad.kdtr", with_tensors(), **changes))


def test_reader_refuses_what_is_no_file(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"KDTR\r\n\x1a\n")
    os.mkfifo(tmp_path / "pipe")
    for name in ["absent", "empty", "short", "pipe", ".", "nul\0"]:
        with pytest.raises(KdtrError, match="expected"):
            open_kdtr(tmp_path / name)
    with pytest.raises(KdtrError, match="tensor 'w': name: expected a tensor of this file"):
        open_kdtr(write_raw(tmp_path / "a", with_tensors())).array("w")


def test_damage_in_a_tensor_is_found_on_first_use_and_by_verify(tmp_path):
    path = tmp_path / "a.kdtr"
    write_kdtr(path, {"x": np.zeros(100), "y": np.ones(100)}, {})
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    file = open_kdtr(path)
    assert np.array_equal(file.array("x"), np.zeros(100))
    for read in (lambda: file.array("y"), file.verify):
        with pytest.raises(KdtrError, match="tensor 'y': CRC-32: expected 0x"):
            read()
    bad_bool = with_tensors(b=entry(b"\2", dtype="bool"))
    with pytest.raises(KdtrError, match="bool bytes: expected 0 or 1"):
        open_kdtr(write_raw(tmp_path / "b.kdtr", bad_bool, b"\2")).array("b")


# ------------------------------------------------------------------------------------------------------------ fuzz
def read_all(path):
    """Everything a file holds, or None when it is refused."""
    try:
        file = open_kdtr(path)
        return file.metadata, {name: bits(file.array(name)) for name in file.names}
    except KdtrError:
        return None


def test_fuzz_truncation_and_bit_flips(tmp_path):
    """Each damaged copy is refused, or (damage in padding alone) gives exactly the original content."""
    path, rng = tmp_path / "a.kdtr", np.random.default_rng(7)
    small = {name: t for name, t in sample_tensors().items() if name.endswith(("x4", ".3"))}
    write_kdtr(path, small, {"a": [1, "b"]})
    raw, whole = path.read_bytes(), read_all(path)
    outcomes = {"refused": 0, "intact": 0}
    for case in range(NUM_FUZZ):
        damaged = bytearray(raw)
        if case % 4 == 0:
            del damaged[rng.integers(len(raw)) :]
        for _ in range(rng.integers(1, 4) if case % 4 else 0):
            damaged[rng.integers(len(raw))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        found = read_all(path)
        outcomes["refused" if found is None else "intact"] += 1
        assert found is None or (case % 4 and found == whole), f"case {case} gave other data"
    assert outcomes["refused"] > NUM_FUZZ // 2 and outcomes["intact"] > 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(list(DTYPES)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
FIELD = st.sampled_from(["dtype", "shape", "offset", "bytes", "crc32"])
NUMBER = st.sampled_from([-1, 0, 1, 4, 64, 128, 2**31, 2**32, 2**62, 2**63, 2**64, 0.5, True, None])
VALUE = JSON | NUMBER | st.lists(NUMBER, max_size=9)


@settings(max_examples=400, deadline=None)
@given(changes=st.lists(st.tuples(st.sampled_from("xyz"), FIELD, VALUE), max_size=3))
def test_fuzz_hostile_fields(tmp_path_factory, changes):
    """A correct table with some fields replaced, and a correct header CRC: refused, or read within the file's bytes."""
    path = tmp_path_factory.getbasetemp() / "fields.kdtr"
    table = {"x": entry(DATA), "y": entry(b"a", offset=128), "z": entry()}
    for name, field, value in changes:
        table[name][field] = value
    data = DATA + bytes(60) + b"a"
    found = read_all(write_raw(path, with_tensors(**table), data))
    assert found is None or sum(len(raw) for _, _, raw in found[1].values()) <= len(data)


@settings(max_examples=300, deadline=None)
@given(header=JSON | st.binary(max_size=60), data=st.binary(max_size=100))
def test_fuzz_hostile_json(tmp_path_factory, header, data):
    path = tmp_path_factory.getbasetemp() / "json.kdtr"
    assert read_all(write_raw(path, header, data)) is None


# ------------------------------------------------------------------------------------------------------ safetensors
def test_safetensors_round_trip_keeps_every_bit(tmp_path):
    tensors, metadata = sample_tensors(), {"config": {"a": [1, 2]}, "text": "ä"}
    write_kdtr(tmp_path / "a.kdtr", tensors, metadata)
    to_safetensors(tmp_path / "a.kdtr", tmp_path / "a.safetensors")
    from_safetensors(tmp_path / "a.safetensors", tmp_path / "b.kdtr")
    file = open_kdtr(tmp_path / "b.kdtr")
    assert file.metadata == metadata and sorted(file.names) == sorted(tensors)
    for name, tensor in tensors.items():
        assert (bits(file.array(name)), file.dtype(name)) == (bits(tensor), name.split(".")[0])


def test_safetensors_library_reads_ours_and_we_read_theirs(tmp_path):
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    library.save_file({"h": values.bfloat16(), "f": values}, tmp_path / "a.safetensors", metadata={"k": "v"})
    from_safetensors(tmp_path / "a.safetensors", tmp_path / "a.kdtr")
    file = open_kdtr(tmp_path / "a.kdtr")
    assert file.metadata == {"k": "v"} and file.dtype("h") == "bf16"
    assert np.array_equal(file.float32("h"), values.bfloat16().float().numpy())
    assert np.array_equal(file.array("f"), values.numpy())
    to_safetensors(tmp_path / "a.kdtr", tmp_path / "b.safetensors")
    back = library.load_file(tmp_path / "b.safetensors")
    assert torch.equal(back["h"], values.bfloat16()) and torch.equal(back["f"], values)


def test_safetensors_refusals(tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 30)
    with pytest.raises(KdtrError, match="expected a safetensors file"):
        from_safetensors(tmp_path / "a.safetensors", tmp_path / "x.kdtr")
    with pytest.raises(KdtrError, match="expected a safetensors file"):
        from_safetensors(tmp_path / "absent", tmp_path / "x.kdtr")
    save_file({"u": np.ones(2, np.uint64)}, tmp_path / "b.safetensors")
    with pytest.raises(KdtrError, match="tensor 'u': dtype: expected one of F64 .* got U64"):
        from_safetensors(tmp_path / "b.safetensors", tmp_path / "x.kdtr")
    save_file({"u": np.ones(2)}, tmp_path / "l.safetensors", metadata={"kdtr_metadata": "[1]"})
    with pytest.raises(KdtrError, match="metadata: kdtr_metadata: expected a JSON object, got list"):
        from_safetensors(tmp_path / "l.safetensors", tmp_path / "x.kdtr")
    write_kdtr(tmp_path / "c.kdtr", {"__metadata__": np.ones(1)}, {})
    with pytest.raises(KdtrError, match="safetensors reserves"):
        to_safetensors(tmp_path / "c.kdtr", tmp_path / "y.safetensors")
    assert not (tmp_path / "x.kdtr").exists() and not (tmp_path / "y.safetensors").exists()
