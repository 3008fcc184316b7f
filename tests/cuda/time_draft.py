"""Times of a DFlash drafter alone on CUDA: `python tests/cuda/time_draft.py [--dtype float32] [--streams N …]`.

Per number of streams and length of the context, in a CUDA graph: a whole draft up to the logits, its attention in one
layer, and remembering 16 committed tokens of each stream; then the kernels of a draft, counted by the profiler, with
their times outside of a graph. Random contexts; the trained drafter of nano-k2.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from timing import graph_time
from torch.profiler import ProfilerActivity, profile

from kdtree_nb import drafters, load_model, ops

COPIES = 8
"""Calls in a graph."""


class Case:
    """A drafter at `num_streams` streams whose contexts are `prefix` tokens long."""

    def __init__(self, model, drafter, num_streams: int, prefix: int) -> None:
        device, draw = model.device, torch.Generator().manual_seed(prefix)
        self.streams = drafter.attach(model, num_streams, prefix + 32)
        contexts, config = self.streams.contexts, drafter.config
        for kept in (contexts.keys, contexts.values):
            kept.copy_(torch.randn(kept.shape, generator=draw))
        self.stream = torch.arange(num_streams, dtype=torch.int32, device=device)
        self.prefix_len = torch.full_like(self.stream, prefix)
        self.bonus = torch.full((num_streams,), 5, device=device)
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        qkv = torch.randn(num_streams, config.block_size, heads * config.head_dim, generator=draw)
        self.qkv, self.layer = qkv.to(device, model.dtype), self.streams._packed.layers[0]
        shape = (16 * num_streams, len(config.target_layer_ids) * config.hidden_size)
        self.features = torch.randn(shape, generator=draw).to(device, model.dtype)
        self.row_stream = self.stream.repeat_interleave(16)
        self.row_position = torch.arange(16, dtype=torch.int32, device=device).repeat(num_streams)

    def draft(self) -> torch.Tensor:
        return self.streams.logits(self.bonus, self.prefix_len, self.stream)

    def attention(self) -> torch.Tensor:
        keys, values, cos_sin = self.streams.contexts
        layer = self.layer
        return ops.block_attn(
            self.qkv, layer.q_norm, layer.k_norm, layer.eps, cos_sin, keys, values, 0, self.stream, self.prefix_len,
            layer.scale, layer.window, layer.causal,
        )  # fmt: skip

    def remember(self) -> None:
        self.streams.remember(self.features, self.row_stream, self.row_position)

    def kernels(self) -> list[tuple[str, float]]:
        """Names and microseconds of the kernels of one draft, outside a graph."""
        self.draft()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
            self.draft()
            torch.cuda.synchronize()
        found = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        return [(e.name, e.device_time) for e in found]


def main() -> None:
    """Prints a line for each number of streams and length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 10])
    parser.add_argument("--prefixes", type=int, nargs="+", default=[16, 128, 512, 2048, 8192])
    parser.add_argument("--kernels", action="store_true", help="list those of the first case in order")
    options = parser.parse_args()
    model = load_model("nano-k2", "cuda", getattr(torch, options.dtype))
    drafter = drafters.DFlash.load("nano-k2")
    print(f"nano-k2, {options.dtype}, {torch.cuda.get_device_name()}; microseconds")
    with torch.inference_mode():
        for num_streams in options.streams:
            for prefix in options.prefixes:
                case = Case(model, drafter, num_streams, prefix)
                us = [1e6 * graph_time([call] * COPIES) for call in (case.draft, case.attention, case.remember)]
                place = f"{num_streams:2d} streams, {prefix:5d} tokens"
                print(f"{place}: draft {us[0]:7.1f}, attention {us[1]:6.1f}, remember {us[2]:6.1f}", flush=True)
        case = Case(model, drafter, options.streams[0], options.prefixes[0])
        kernels = case.kernels()
        print(f"{len(kernels)} kernels in a draft")
        for name, count in Counter(name for name, _ in kernels).most_common():
            time = sum(us for found, us in kernels if found == name)
            print(f"{count:4d} {time:7.1f} us {name[:110]}")
        if options.kernels:
            print("\n".join(f"{us:7.1f} us {name[:110]}" for name, us in kernels))


if __name__ == "__main__":
    main()
