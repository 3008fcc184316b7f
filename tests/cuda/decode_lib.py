"""Calls decode_layers on the tensors of a rank of Kimi K2.6 without the bindings: ctypes, op_args.h."""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from op_lib import fill
from op_structs import ROOT
from torch import Tensor

PARTS = ("q_kv", "q", "q_latent", "q_rope", "value", "hidden", "shared_hidden", "sums", "attention")


class Phase(enum.IntEnum):
    """The phases of decode_layer.h."""

    JOINT, QUERIES, ABSORB, LEAVES, VALUES, OUTPUT, ROUTER, UP, DOWN, ALL = range(10)


def build(out: Path, arch: str) -> None:
    """Compiles decode_layers and verify_attn into one library."""
    flags = ["-O3", "-std=c++17", "-fmad=false", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xcompiler", "-fPIC"]
    flags += [f"-I{ROOT / 'kernels'}", f"-I{Path(__file__).parent}"]
    sources = [ROOT / "tests/cuda/shim_decode.cu", ROOT / "kernels/verify_attn.cu"]
    subprocess.run(["nvcc", *flags, "-shared", "--cudart", "static", "-o", str(out), *map(str, sources)], check=True)


@functools.cache
def library() -> ctypes.CDLL:
    """The library named by KDTREE_DECODE_SO, else one compiled now."""
    path = os.environ.get("KDTREE_DECODE_SO", "")
    if not path:
        path = str(Path(tempfile.mkdtemp()) / "decode.so")
        build(Path(path), "90a")
    found = ctypes.CDLL(path)
    found.bytes_decode_layers.restype = found.bytes_verify_attn.restype = ctypes.c_int64
    return found


class Decode:
    """decode_layers over layers of `rank`, which have experts; x is copied."""

    def __init__(self, rank: Any, layers: Sequence[int], rows: Any, tree: Any, x: Tensor) -> None:
        self.rank, self.x, self.rows, self.tree = rank, x.clone(), rows, tree
        first = rank.alone.layers[layers[0]]
        at, moe, cache = first.attention, first.feed_forward, rank.cache
        table = [address for i in layers for address in self._pointers(i)]
        self.pointers = (ctypes.c_int64 * len(table))(*table)
        H = at.num_heads
        self.fields = {
            "pointers": ctypes.addressof(self.pointers), "x": self.x, "cos_sin": at.cos_sin, "stream": rows.stream,
            "node": rows.node, "position": rows.position, "slot": rows.slot, "parent": tree.parent, "depth": tree.depth,
            "prefix_len": rank.prefix_len, "num_layers": len(layers), "num_rows": x.shape[0],
            "dim": x.shape[1], "query_dim": at.q_dim, "latent_dim": at.latent_dim, "nope_dim": at.nope_dim,
            "rope_dim": at.rope_dim, "value_dim": at.value_dim // H, "num_heads": H,
            "num_experts": rank.config.model.n_routed_experts, "top_k": moe.top_k, "width": moe.experts.width,
            "shared_width": moe.experts.shared_width, "num_positions": at.cos_sin.shape[0],
            "num_slots": cache.num_slots, "num_tree_slots": tree.parent.shape[1], "eps": at.eps,
            "latent_eps": at.latent_eps, "scale": at.scale, "scaling_factor": moe.scaling_factor,
            "renormalize": moe.renormalize, "first_phase": 0, "end_phase": int(Phase.ALL),
        }  # fmt: skip
        if rows.num_rows is not None:
            self.fields["num_rows_device"] = rows.num_rows
        args = fill("decode_layers", self.fields)
        if not library().serves_decode_layers(ctypes.byref(args)):
            raise RuntimeError(f"decode_layers: expected arguments that it serves, got {self.fields}")
        self.workspace = torch.zeros(library().bytes_decode_layers(ctypes.byref(args)), dtype=torch.uint8, device=x.device)
        self.fields["workspace"] = self.workspace
        places = (ctypes.c_int64 * len(PARTS))()
        library().scratch_decode_layers(ctypes.byref(args), places)
        self.places = dict(zip(PARTS, places, strict=True))

    def _pointers(self, index: int) -> list[int]:
        at, moe = self.rank.alone.layers[index].attention, self.rank.alone.layers[index].feed_forward
        e = moe.experts
        tensors = [at.norm, at.q_kv_a, at.q_norm, at.kv_norm, at.q_b, at.w_kc, at.w_vc, at.o_proj,
                   self.rank.cache.layers[at.layer], moe.norm, moe.router, moe.bias, e.gate_up, e.down,
                   e.shared_gate_up, e.shared_down]  # fmt: skip
        return [0 if t is None else t.data.data_ptr() for t in tensors]

    def run(self, first: int = 0, end: int = Phase.ALL) -> None:
        """The phases first … end - 1 of every layer."""
        args = fill("decode_layers", self.fields | {"first_phase": int(first), "end_phase": int(end)})
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if status := library().run_decode_layers(ctypes.byref(args), stream):
            raise RuntimeError(f"decode_layers: expected status 0, got {status}")

    def part(self, name: str, shape: Sequence[int]) -> Tensor:
        """What lies in the scratch memory."""
        num_bytes = 2 * torch.Size(shape).numel()
        return self.workspace[self.places[name] :][:num_bytes].view(torch.bfloat16).view(shape)

    def attend_by_operation(self) -> None:
        """Leaves of attention by verify_attn, where phase VALUES looks for them."""
        f, T, H = self.fields, self.x.shape[0], self.fields["num_heads"]
        out = torch.empty(T, H, f["latent_dim"], dtype=torch.bfloat16, device=self.x.device)
        fields = {name: f[name] for name in ("stream", "node", "parent", "depth", "prefix_len", "num_rows", "num_heads",
                                             "latent_dim", "rope_dim", "num_slots", "num_tree_slots", "scale")}  # fmt: skip
        fields |= {"q_latent": self.part("q_latent", (T, H, f["latent_dim"])), "out": out, "num_streams": 1, "dtype": torch.bfloat16,
                   "q_rope": self.part("q_rope", (T, H, f["rope_dim"])), "cache": self.rank.cache.layers[1]}  # fmt: skip
        if "num_rows_device" in f:
            fields["num_rows_device"] = f["num_rows_device"]
        need = library().bytes_verify_attn(ctypes.byref(fill("verify_attn", fields)))
        fields |= {"workspace": self.workspace.data_ptr() + self.places["attention"], "workspace_bytes": need}
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        args = fill("verify_attn", fields)
        if status := library().run_verify_attn(ctypes.byref(args), stream):
            raise RuntimeError(f"verify_attn: expected status 0, got {status}")
        self.attended = out
