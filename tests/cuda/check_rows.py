"""Checks of the row-wise CUDA kernels against the numpy reference: values, bits that do not depend on the other rows,
row counts on the device, and inputs at the edges."""

from __future__ import annotations

import numpy as np
import torch
from check_common import BF16, DEV, F32, NAN, count_of, expect, poisoned, same_bits
from op_lib import run

from kdtree_nb import reference


def close(out: torch.Tensor, ref: np.ndarray, dtype: torch.dtype, name: str, scale: float = 1.0) -> None:
    """Within half a BF16 step (F32: a few ulp) of the float64 reference, element by element."""
    got, limit = out.double().cpu().numpy(), (2.0**-8 if dtype == BF16 else 2.0**-21) * scale
    floor = np.abs(ref).max() * (1e-6 if dtype == F32 else 1e-4)
    worst = np.max(np.abs(got - ref) / (np.abs(ref) + floor)) if ref.size else 0.0
    expect(worst <= limit, f"{name}: worst relative error {worst:.2e}, limit {limit:.2e}")


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEV) * scale).to(dtype)


def check_unary(name: str, rows: int, compute, width: int, dtype: torch.dtype) -> torch.Tensor:
    """compute(row index, out, device count) for all rows, some rows, fewer rows than allocated: the same bits."""
    everything = torch.arange(rows, device=DEV)
    full = poisoned(rows, width, dtype=dtype)
    compute(everything, full, None)
    for subset in (torch.randperm(rows, device=DEV)[:1], torch.randperm(rows, device=DEV)[: max(1, rows // 2)]):
        some = poisoned(len(subset), width, dtype=dtype)
        compute(subset, some, None)
        expect(same_bits(some, full[subset]), f"{name}: bits depend on the other rows")
    for used in {0, rows // 2, rows}:
        partly = poisoned(rows, width, dtype=dtype)
        compute(everything, partly, count_of(used))
        expect(same_bits(partly[:used], full[:used]), f"{name}: row count {used}: bits")
        expect(partly[used:].isnan().all(), f"{name}: row count {used}: wrote a row out of use")
    return full


RMS_NORM_SIZES = (
    (1, 1, 0), (3, 7, 0), (5, 64, 0), (65, 192, 3), (17, 512, 64), (9, 1536, 0), (33, 7168, 8), (5, 8200, 0),
    (3, 30001, 4),
)  # fmt: skip
"""Rows, their length, and how much more lies between two of them."""


def check_rms_norm() -> None:
    for dtype in (F32, BF16):
        for rows, dim, pad in RMS_NORM_SIZES:
            x, weight = random(rows, dim + pad, dtype=dtype, scale=3.0), random(dim, dtype=dtype)

            def compute(index, out, count, x=x, weight=weight, dim=dim, pad=pad, dtype=dtype):
                xs = x[index].contiguous()
                run("rms_norm", x=xs, weight=weight, out=out, num_rows=len(index), dim=dim, x_stride=dim + pad,
                    eps=1e-6, dtype=dtype, num_rows_device=count)  # fmt: skip

            full = check_unary(f"rms_norm {dtype} {rows}x{dim}+{pad}", rows, compute, dim, dtype)
            ref = reference.rms_norm(x[:, :dim].double().cpu().numpy(), weight.double().cpu().numpy(), 1e-6)
            close(full, ref, dtype, f"rms_norm {dtype} {rows}x{dim}+{pad}", 2.0)


def check_elementwise() -> None:
    for dtype in (F32, BF16):
        for rows, dim in ((1, 1), (3, 7), (5, 72), (65, 96), (17, 2048), (2, 18432)):
            gate_up, y = random(rows, 2 * dim, dtype=dtype, scale=4.0), random(rows, dim, dtype=dtype)
            x = random(rows, dim, dtype=dtype)

            def swiglu(index, out, count, gate_up=gate_up, dim=dim, dtype=dtype):
                run("swiglu", gate_up=gate_up[index].contiguous(), out=out, num_rows=len(index), dim=dim, dtype=dtype,
                    num_rows_device=count)  # fmt: skip

            def add(index, out, count, x=x, y=y, dim=dim, dtype=dtype):
                run("residual_add", x=x[index].contiguous(), y=y[index].contiguous(), out=out, num_rows=len(index),
                    dim=dim, dtype=dtype, num_rows_device=count)  # fmt: skip

            name = f"{dtype} {rows}x{dim}"
            full = check_unary(f"swiglu {name}", rows, swiglu, dim, dtype)
            close(full, reference.swiglu(gate_up.double().cpu().numpy()), dtype, f"swiglu {name}", 2.0)
            expect(same_bits(check_unary(f"residual_add {name}", rows, add, dim, dtype), x + y), f"residual_add {name}")


def check_rope() -> None:
    for dtype in (F32, BF16):
        for rows, heads, dim in ((1, 1, 2), (5, 4, 16), (33, 6, 12), (65, 64, 64)):
            x = random(rows, heads, dim + 5, dtype=dtype)
            table = reference.rope_table(300, dim, 1e4)
            cos_sin = torch.tensor(table, dtype=F32, device=DEV)
            position = torch.randint(0, 300, (rows,), dtype=torch.int32, device=DEV)

            def compute(index, out, count, x=x, position=position, cos_sin=cos_sin, heads=heads, dim=dim, dtype=dtype):
                run("rope", x=x[index].contiguous(), cos_sin=cos_sin, position=position[index].contiguous(), out=out,
                    num_rows=len(index), num_heads=heads, dim=dim, num_positions=300, x_row_stride=heads * (dim + 5),
                    x_head_stride=dim + 5, dtype=dtype, num_rows_device=count)  # fmt: skip

            full = check_unary(f"rope {dtype} {rows}x{heads}x{dim}", rows, compute, heads * dim, dtype)
            ref = reference.rope(x[:, :, :dim].double().cpu().numpy(), table, position.cpu().numpy())
            error = np.abs(full.double().cpu().numpy() - ref.reshape(rows, -1)).max() / np.abs(ref).max()
            expect(error < (2.0**-8 if dtype == BF16 else 1e-6), f"rope {dtype}: error {error:.1e}")
    bad = poisoned(1, 2, dtype=F32).zero_()
    run("rope", x=torch.ones(1, 1, 2, device=DEV), cos_sin=cos_sin, position=count_of(300), out=bad, num_rows=1,
        num_heads=1, dim=2, num_positions=300, x_row_stride=2, x_head_stride=2, dtype=F32)  # fmt: skip
    expect(bad.isnan().all(), "rope: a position outside the table must give NaN")


def check_embed() -> None:
    for dtype in (F32, BF16):
        for dim in (1, 7, 192, 256, 7168):
            weight = random(331, dim, dtype=dtype)
            token = torch.randint(0, 331, (33,), device=DEV)

            def compute(index, out, count, weight=weight, token=token, dim=dim, dtype=dtype):
                run("embed", weight=weight, token=token[index].contiguous(), out=out, num_rows=len(index),
                    vocab_size=331, dim=dim, dtype=dtype, num_rows_device=count)  # fmt: skip

            expect(
                same_bits(check_unary(f"embed {dtype} {dim}", 33, compute, dim, dtype), weight[token]), "embed: values"
            )
            out = torch.zeros(2, dim, dtype=dtype, device=DEV)
            run("embed", weight=weight, token=torch.tensor([-1, 331], device=DEV), out=out, num_rows=2, vocab_size=331,
                dim=dim, dtype=dtype)  # fmt: skip
            expect(out.isnan().all(), f"embed {dtype} {dim}: a token outside the vocabulary must give NaN")


def check_argmax() -> None:
    for rows, vocab in ((1, 1), (3, 2), (7, 331), (5, 4097), (65, 163840)):
        for kind in ("random", "ties", "-inf"):
            logits = torch.randn(rows, vocab, device=DEV)
            if kind == "ties":
                logits = (logits * 2).round()
                logits[logits == 0] *= -1  # +0 and -0 are equal
            elif kind == "-inf":
                logits[:] = -float("inf")
                logits[rows // 2, vocab // 2] = -3.0
            token = poisoned(rows, dtype=torch.int64)
            run("argmax", logits=logits, token=token, num_rows=rows, vocab_size=vocab)
            expect(
                (token.cpu().numpy() == reference.argmax(logits.cpu().numpy())).all(), f"argmax {rows}x{vocab} {kind}"
            )
            logits[rows - 1, vocab // 3] = NAN
            token = poisoned(rows, dtype=torch.int64)
            run("argmax", logits=logits, token=token, num_rows=rows, vocab_size=vocab,
                num_rows_device=count_of(rows - 1))  # fmt: skip
            expect(token[rows - 1] == -7, "argmax: wrote a row out of use")
            run("argmax", logits=logits, token=token, num_rows=rows, vocab_size=vocab)
            expect((token.cpu().numpy() == reference.argmax(logits.cpu().numpy())).all(), f"argmax {rows}x{vocab} NaN")


def check_moe_route() -> None:
    for experts, top_k in ((1, 1), (6, 2), (8, 2), (64, 6), (256, 8), (384, 8), (1000, 32)):
        for scoring in (0, 1):
            for bias_scale in (None, 0.0, 0.3):
                rows = 65
                logits = random(rows, experts, dtype=F32, scale=2.0)
                logits[rows // 2 :] = (logits[rows // 2 :] * 2).round() / 2  # ties
                bias = None if bias_scale is None else random(experts, dtype=F32, scale=bias_scale)
                renormalize = bias_scale != 0.0
                expert_id, weight = poisoned(rows, top_k, dtype=torch.int32), poisoned(rows, top_k, dtype=F32)
                run("moe_route", logits=logits, bias=bias, expert_id=expert_id, weight=weight, num_rows=rows,
                    num_experts=experts, top_k=top_k, scoring=scoring, renormalize=renormalize,
                    scaling_factor=2.5)  # fmt: skip
                ids, weights = reference.moe_route(
                    logits.double().cpu().numpy(),
                    top_k,
                    ("softmax", "sigmoid")[scoring],
                    None if bias is None else bias.double().cpu().numpy(),
                    renormalize,
                    2.5,
                )
                name = f"moe_route {experts}/{top_k} scoring {scoring} bias {bias_scale}"
                expect((expert_id.cpu().numpy() == ids).all(), f"{name}: expert ids")
                ulp = np.abs(weight.cpu().numpy() - weights) / np.spacing(weights.astype(np.float32))
                expect(ulp.max() <= 4, f"{name}: weights off by {ulp.max():.1f} ulp")


def check_cache() -> None:
    rng = np.random.default_rng(3)
    for dtype in (F32, BF16):
        for latent, rope in ((512, 64), (64, 16), (48, 12), (5, 2)):
            layers, streams, slots, depth = 3, 4, 90, 9
            cache = random(layers, streams, slots, latent + rope, dtype=dtype)
            want = cache.float().cpu().numpy().copy()
            path = np.full((streams, depth), -1, np.int32)
            accepted = np.array([0, depth, 3, 1], np.int32)
            for s, n in enumerate(accepted):
                path[s, :n] = np.sort(rng.choice(np.arange(1, depth + 8), n, replace=False))
            prefix = np.array([5, 0, slots - depth - 8, 70], np.int32)
            reference.cache_compact(want, prefix, path, accepted)
            args = [torch.tensor(x, device=DEV) for x in (prefix, path, accepted)]
            run("cache_compact", cache=cache, prefix_len=args[0], accepted_path=args[1], num_accepted=args[2],
                num_layers=layers, num_streams=streams, num_slots=slots, width=latent + rope, max_depth=depth,
                dtype=dtype)  # fmt: skip
            expect((cache.float().cpu().numpy() == want).all(), f"cache_compact {dtype} {latent}+{rope}")
            rows = 13
            new, k_rope = random(rows, latent, dtype=dtype), random(rows, rope, dtype=dtype)
            stream, slot = (
                rng.integers(0, streams, rows).astype(np.int32),
                rng.permutation(slots)[:rows].astype(np.int32),
            )
            slot[-1] = slots  # outside: not written
            keep = slot < slots
            reference.cache_append(
                want[1], new.float().cpu().numpy()[keep], k_rope.float().cpu().numpy()[keep], stream[keep], slot[keep]
            )
            run("cache_append", cache=cache[1], latent=new, k_rope=k_rope, stream=torch.tensor(stream, device=DEV),
                slot=torch.tensor(slot, device=DEV), num_rows=rows, num_streams=streams, num_slots=slots,
                latent_dim=latent, rope_dim=rope, dtype=dtype)  # fmt: skip
            expect((cache.float().cpu().numpy() == want).all(), f"cache_append {dtype} {latent}+{rope}")


LATENT_APPEND_SIZES = ((0, 5, 2), (21, 37, 6), (0, 64, 16), (96, 48, 12), (1536, 512, 64), (8200, 512, 64))
"""Columns of query latents, latents and keys."""


def check_latent_append() -> None:
    """The bits of the operations that it stands for, whatever is settled, aligned or in use."""
    for dtype in (F32, BF16):
        for sizes in LATENT_APPEND_SIZES:
            for rows, pad in ((1, 0), (33, 0), (7, 3)):
                compare_latent_append(dtype, sizes, rows, pad)


def compare_latent_append(dtype: torch.dtype, sizes: tuple[int, int, int], rows: int, pad: int) -> None:
    query, latent, key = sizes
    width, streams, slots = sum(sizes) + pad, 3, 90
    joint, weights = random(rows, width, dtype=dtype, scale=3.0), [random(n, dtype=dtype) for n in sizes[:2]]
    cos_sin = torch.tensor(reference.rope_table(300, key, 1e4), dtype=F32, device=DEV)
    place = torch.randperm(streams * slots, device=DEV)[:rows].int()
    at = {"stream": place // slots, "slot": place % slots}
    position = torch.randint(0, 300, (rows,), dtype=torch.int32, device=DEV)
    at["slot"][rows // 2] = slots  # outside: not written
    position[rows // 3] = -1  # outside: a key of NaN
    common = {"num_rows": rows, "dtype": dtype}
    norm = {"x_stride": width, "eps": 1e-6, **common}
    want_q, normed, turned = (torch.empty(rows, n, dtype=dtype, device=DEV) for n in sizes)
    run("rms_norm", x=joint, weight=weights[0], out=want_q, dim=query, **norm)
    run("rms_norm", x=joint[:, query:], weight=weights[1], out=normed, dim=latent, **norm)
    run("rope", x=joint[:, query + latent :], cos_sin=cos_sin, position=position, out=turned, num_heads=1, dim=key,
        num_positions=300, x_row_stride=width, x_head_stride=key, **common)  # fmt: skip
    to = {"num_streams": streams, "num_slots": slots, "latent_dim": latent, "rope_dim": key, **at, **common}
    for used, settled in ((rows, False), (rows, True), (rows // 2, True)):
        q, got = poisoned(rows, query, dtype=dtype), poisoned(streams, slots, latent + key, dtype=dtype)
        want = got.clone()
        run("cache_append", cache=want, latent=normed, k_rope=turned, num_rows_device=count_of(used), **to)
        run("latent_append", q_kv=joint, q_norm=weights[0], kv_norm=weights[1], cos_sin=cos_sin, position=position, q=q,
            cache=got, query_dim=query, num_positions=300, q_kv_stride=width, eps=1e-6, weights_settled=settled,
            num_rows_device=count_of(used), **to)  # fmt: skip
        name = f"latent_append {dtype} {sizes} rows {used} of {rows} + {pad}"
        expect(same_bits(q[:used], want_q[:used]) and bool(q[used:].isnan().all()), f"{name}: queries")
        expect(same_bits(got, want), f"{name}: cache")


CHECKS = (
    check_rms_norm, check_elementwise, check_rope, check_embed, check_argmax, check_moe_route, check_cache,
    check_latent_append,
)  # fmt: skip


def check_rows() -> None:
    """All row-wise kernels."""
    for check in CHECKS:
        check()
        torch.cuda.synchronize()
