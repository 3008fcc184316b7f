"""kernels/capi/kdtr.h against the Python reader: the same content, the same refusals, and never a crash.

The reader is compiled with the address and undefined-behaviour sanitizers where the compiler has them.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_nb.errors import KdtrError
from kdtree_nb.kdtr import open_kdtr, write_kdtr
from kdtree_nb.native.toolchain import find_compiler
from tests.kdtr_corpus import DATA, HOSTILE, entry, sample_tensors, with_tensors, write_raw

ROOT = Path(__file__).parents[2]
NUM_FUZZ = 1200
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]

OTHER_WORDS = {
    "huge integer": "integers of at most 4300 digits, got 10000 digits",
    "deep metadata": "nesting: expected at most 64 levels",
    "tensors is a list": r"tensors: expected a JSON object, got \[\]",
    "metadata is null": "metadata: expected a JSON object, got null",
}
"""Where the two readers say the same in other words."""


class Reader:
    """The compiled reader, one process for many files: `reader(path)` -> ("ok", content) or ("refused", message)."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, path: Path) -> tuple[str, object]:
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline().split()
        assert line, f"the reader crashed on {path}: exit status {self._process.wait()}"
        text = bytes.fromhex(line[-1]).decode(errors="surrogatepass")
        if line[0] == "refused":
            return "refused", text
        tensors = {}
        for item in line[1:-1]:
            name, dtype, shape, crc32 = item.split(":")
            sizes = tuple(int(size) for size in shape.split(",") if size)
            tensors[bytes.fromhex(name).decode(errors="surrogatepass")] = (dtype, sizes, int(crc32))
        return "ok", (json.loads(text), tensors)

    def close(self) -> None:
        """End the process; leaks and late errors show in its status."""
        self._process.stdin.close()
        assert self._process.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    program = tmp_path_factory.mktemp("reader") / "kdtr_read"
    command = [*shlex.split(find_compiler()), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pedantic",
               f"-I{ROOT / 'kernels'}", str(ROOT / "tests/capi/kdtr_read.cpp"), "-o", str(program)]  # fmt: skip
    if subprocess.run([*command, *SANITIZERS], capture_output=True, timeout=300).returncode != 0:
        warnings.warn("kdtr.h is tested without sanitizers: they do not compile here", stacklevel=1)
        subprocess.run(command, check=True, timeout=300)
    made = Reader(program)
    yield made
    made.close()


def python_reads(path):
    """What the Python reader finds, in the form of `Reader`."""
    try:
        file = open_kdtr(path)
        tensors = {n: (file.dtype(n), file.shape(n), zlib.crc32(file.array(n).tobytes())) for n in file.names}
        return "ok", (file.metadata, tensors)
    except KdtrError as error:
        return "refused", str(error)


def assert_same(reader, path):
    """Both accept a file with the same content in the same order, or both refuse it. Returns which."""
    ours, theirs = reader(path), python_reads(path)
    assert ours[0] == theirs[0], f"{path}: kdtr.h: {ours}, Python: {theirs}"
    if ours[0] == "ok":
        assert ours[1] == theirs[1] and list(ours[1][1]) == list(theirs[1][1])
    return ours[0]


@pytest.mark.parametrize("path", sorted((ROOT / "data").rglob("*.kdtr")), ids=lambda path: path.name)
def test_reads_the_files_of_the_repository(reader, path):
    assert assert_same(reader, path) == "ok"


def test_reads_every_dtype_and_shape(reader, tmp_path):
    metadata = {"note": "ä ✓ \U0001f600 \ud800", "list": [1, 2.5, None, {"deep": [True, '\\"/\b\f\n\r\t\x01']}]}
    write_kdtr(tmp_path / "a.kdtr", {**sample_tensors(), "ä\n\x00\ud83d": np.arange(3)}, metadata)
    write_kdtr(tmp_path / "b.kdtr", {}, {})
    assert assert_same(reader, tmp_path / "a.kdtr") == assert_same(reader, tmp_path / "b.kdtr") == "ok"
    tensors = with_tensors(x=entry(DATA), y=entry(b"a", offset=128), z=entry(shape=[0, 2**40]))
    assert assert_same(reader, write_raw(tmp_path / "c.kdtr", tensors, DATA + bytes(60) + b"a")) == "ok"


@pytest.mark.parametrize("case", HOSTILE)
def test_refuses_a_hostile_header_in_the_words_of_the_python_reader(reader, tmp_path, case):
    header, data, expected = HOSTILE[case]
    path = write_raw(tmp_path / "bad.kdtr", header, data)
    status, message = reader(path)
    assert status == "refused" and message.startswith(f"{path}: ") and len(message) < 2000
    with pytest.raises(KdtrError, match=OTHER_WORDS.get(case, expected)):
        raise KdtrError(message)
    assert assert_same(reader, path) == "refused"


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        (b'{"metadata":{"a":1e308,"b":1E+308,"c":-1.7976931348623157e308},"tensors":{}}', True),
        (b'{"metadata":{"a":1e309},"tensors":{}}', False),
        (b'{"metadata":{"a":1.7976931348623159e308},"tensors":{}}', False),
        (b'{"metadata":{"a":-100000000e301},"tensors":{}}', False),
        (b'{"metadata":{"a":1e-999,"b":0e999999999999,"c":0.00001e-400},"tensors":{}}', True),
        (b'{"metadata":{"a":0.0000000001e318},"tensors":{}}', True),
        (b'{"metadata":{"a":' + b"9" * 4300 + b'},"tensors":{}}', True),
        (b'{"metadata":{"a":-' + b"9" * 4301 + b'},"tensors":{}}', False),
        (b'{"metadata":{"a":01},"tensors":{}}', False),
        (b'{"metadata":{"a":1.},"tensors":{}}', False),
        (b'{"metadata":{"a":.5},"tensors":{}}', False),
        (b'{"metadata":{"a":+1},"tensors":{}}', False),
        (b'{"metadata":{"a":-},"tensors":{}}', False),
        (b'{"metadata":{"a":-Infinity},"tensors":{}}', False),
        (b'{"metadata":{"a":nan},"tensors":{}}', False),
        (b'{"metadata":{"a":tru},"tensors":{}}', False),
        (b'{"metadata":{"a":"\\x"},"tensors":{}}', False),
        (b'{"metadata":{"a":"\\u12g4"},"tensors":{}}', False),
        (b'{"metadata":{"a":"\x1f"},"tensors":{}}', False),
        (b'{"metadata":{"a":"\x7f\\u0000\\ud800\\udc00\\udc00"},"tensors":{}}', True),
        (b'{"metadata":{"a":1,"\\u0061":2},"tensors":{}}', False),
        (b'{"metadata":{"\\ud800":1,"\\uD800":2},"tensors":{}}', False),
        (b'{"metadata":{"a":"\xed\xa0\x80"},"tensors":{}}', False),
        (b'{"metadata":{"a":"\xc0\x80"},"tensors":{}}', False),
        (b'{"metadata":{"a":"\xf4\x90\x80\x80"},"tensors":{}}', False),
        (b'{"metadata":{"a":"\xf4\x8f\xbf\xbf\xe0\xa0\x80"},"tensors":{}}', True),
        (b'\xef\xbb\xbf{"metadata":{},"tensors":{}}', False),
        (b' \t\r\n{ "metadata" : { } , "tensors" : { } } \n', True),
        (b'\x0c{"metadata":{},"tensors":{}}', False),
        (b'{"metadata":{},"tensors":{}}x', False),
        (b'{"metadata":{},"tensors":{},}', False),
        (b'{"metadata":{"a":[1,]},"tensors":{}}', False),
        (b'{"metadata":{},"metadata":{}}', False),
        (b'{"metadata":{"a":' + b"[" * 62 + b"]" * 62 + b'},"tensors":{}}', True),
        (b'{"metadata":{"a":"' + b"[" * 1000 + b'"},"tensors":{}}', True),
        (b'{"tensors":{"x":{"dtype":"u8","shape":[-0],"offset":-0,"bytes":0,"crc32":0}},"metadata":{}}', True),
        (b'{"tensors":{"x":{"dtype":"\\u00758","shape":[ 0 ],"offset":0,"bytes":0,"crc32":0}},"metadata":{}}', True),
        (b'{"tensors":{"x":{"dtype":"u8","shape":[1e0],"offset":0,"bytes":1,"crc32":0}},"metadata":{}}', False),
        (b'{"tensors":{"x":{"dtype":"u8","shape":[0],"offset":0,"bytes":0,"crc32":"0"}},"metadata":{}}', False),
        (b'{"tensors":{"x":{"dtype":"u8","shape":[0],"offset":' + b"9" * 30 + b',"bytes":0,"crc32":0}},"metadata":{}}',
         False),
        (b"", False),
        (b'"metadata tensors"', False),
        (b"3", False),
    ],
)  # fmt: skip
def test_json_in_the_corners(reader, tmp_path, text, accepted):
    path = write_raw(tmp_path / "a.kdtr", text)
    assert assert_same(reader, path) == ("ok" if accepted else "refused")


@pytest.mark.parametrize(
    "changes",
    [{"magic": b"KDTR\n\x1a\n\0"}, {"version": 0}, {"version": 2}, {"header_bytes": 2**63}, {"header_bytes": 10},
     {"header_bytes": 2**64 - 24}, {"header_bytes": 2**26 + 1}],
)  # fmt: skip
def test_refuses_a_bad_preamble(reader, tmp_path, changes):
    assert assert_same(reader, write_raw(tmp_path / "bad.kdtr", with_tensors(), **changes)) == "refused"


def test_refuses_what_is_no_file(reader, tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"KDTR\r\n\x1a\n")
    os.mkfifo(tmp_path / "pipe")
    for name in ("absent", "empty", "short", "pipe", "."):
        assert assert_same(reader, tmp_path / name) == "refused"


def test_finds_damage_in_a_tensor(reader, tmp_path):
    write_kdtr(tmp_path / "a.kdtr", {"x": np.zeros(100), "y": np.ones(100)}, {})
    raw = bytearray((tmp_path / "a.kdtr").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "a.kdtr").write_bytes(raw)
    assert "tensor 'y': CRC-32: expected 0x" in reader(tmp_path / "a.kdtr")[1]
    path = write_raw(tmp_path / "b.kdtr", with_tensors(b=entry(b"\2", dtype="bool")), b"\2")
    assert "bool bytes: expected 0 or 1" in reader(path)[1] and python_reads(path)[0] == "refused"


def test_fuzz_truncation_and_bit_flips(reader, tmp_path):
    """Damage anywhere; and in the header with a CRC that was made to fit, so that what lies behind it is reached."""
    path, rng = tmp_path / "a.kdtr", np.random.default_rng(11)
    small = {name: tensor for name, tensor in sample_tensors().items() if name.endswith((".3", "x4"))}
    write_kdtr(path, small, {"a": [1, "b\n", {"c": -2.5e-3}], "d": "ä"})
    raw = path.read_bytes()
    header_end = 24 + int.from_bytes(raw[16:24], "little")
    outcomes = {"ok": 0, "refused": 0}
    for case in range(NUM_FUZZ):
        damaged = bytearray(raw)
        if case % 4 == 0:
            del damaged[rng.integers(len(raw)) :]
        last = header_end if case % 4 > 1 else len(damaged)
        for _ in range(rng.integers(1, 4) if case % 4 else 0):
            damaged[rng.integers(16 if case % 4 > 1 else 0, last)] ^= 1 << rng.integers(8)
        if case % 4 > 1:
            end = min(24 + int.from_bytes(damaged[16:24], "little"), len(damaged))
            damaged[12:16] = zlib.crc32(damaged[16:end]).to_bytes(4, "little")
        path.write_bytes(damaged)
        outcomes[assert_same(reader, path)] += 1
    assert outcomes["refused"] > NUM_FUZZ // 2 and outcomes["ok"] > 0


NUMBER = st.sampled_from(
    [-1, 0, 1, 4, 64, 128, 2**31, 2**32, 2**62, 2**63, 2**64, 0.5, True, None, "u8", "f32", [], {}]
)


@settings(max_examples=200, deadline=None)
@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from("xyz"),
            st.sampled_from(["dtype", "shape", "offset", "bytes", "crc32", "more"]),
            NUMBER | st.lists(NUMBER, max_size=9),
        ),
        max_size=3,
    )
)
def test_fuzz_hostile_fields(reader, tmp_path_factory, changes):
    table = {"x": entry(DATA), "y": entry(b"a", offset=128), "z": entry()}
    for name, field, value in changes:
        table[name][field] = value
    path = tmp_path_factory.getbasetemp() / "cpp_fields.kdtr"
    assert_same(reader, write_raw(path, with_tensors(**table), DATA + bytes(60) + b"a"))


@settings(max_examples=200, deadline=None)
@given(header=st.text(max_size=30).map(str.encode) | st.binary(max_size=30))
def test_fuzz_hostile_json(reader, tmp_path_factory, header):
    path = tmp_path_factory.getbasetemp() / "cpp_json.kdtr"
    for text in (header, b'{"metadata":{"a":' + header + b'},"tensors":{}}'):
        assert_same(reader, write_raw(path, text))
