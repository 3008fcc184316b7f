"""Checks of the CUDA moe_experts: against float64, the same bits for every number of rows, and the same bits as linear,
swiglu, linear. `check_moe(lib, report, quick)` returns the number of checks."""

from __future__ import annotations

import torch
from linear_lib import DEVICE, Experts, Lib, Report, bits, error, poisoned

LIMIT = {torch.bfloat16: 6e-3, torch.float32: 6e-6}  # relative error; BF16: two roundings of the output


class Layer:
    """One expert layer with random weights."""

    def __init__(
        self, lib: Lib, dtype: torch.dtype, dim: int, width: int, experts: int, top_k: int, shared: int
    ) -> None:
        self.name = f"moe {str(dtype)[6:]} D{dim} I{width} E{experts} k{top_k} S{shared}"
        self.dtype, self.dim, self.top_k, self.num_experts = dtype, dim, top_k, experts

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, device=DEVICE) * shape[-1] ** -0.5).to(dtype)

        self.gate_up, self.down = random(experts, 2 * width, dim), random(experts, dim, width)
        self.shared = (random(1, 2 * shared, dim), random(1, dim, shared)) if shared else None
        pair = tuple(map(lib.pack, self.shared)) if self.shared else (None, None)
        self.packed = Experts(lib.pack(self.gate_up), lib.pack(self.down), *pair, width, shared)

    def inputs(self, rows: int) -> tuple[torch.Tensor, ...]:
        """x, expert_id, weight, residual. Expert 0 is popular, so that it has several tiles of rows."""
        x, residual = (torch.randn(rows, self.dim, device=DEVICE).to(self.dtype) for _ in range(2))
        score = torch.rand(rows, self.num_experts, device=DEVICE)
        score[:, 0] += 0.5
        expert_id = score.topk(self.top_k).indices.sort().values.int().contiguous()
        return x, expert_id, torch.rand(rows, self.top_k, device=DEVICE), residual

    def reference(self, x, expert_id, weight, residual) -> torch.Tensor:
        """In float64 with the rounding points of BF16 mode."""

        def expert(x, gate_up, down):
            gate, up = (x.double() @ gate_up.double().T).to(self.dtype).double().chunk(2, 1)
            return (torch.nn.functional.silu(gate) * up).to(self.dtype).double() @ down.double().T

        out = expert(x, *(w[0] for w in self.shared)) if self.shared else torch.zeros_like(x, dtype=torch.float64)
        for e in range(self.num_experts):
            row, k = torch.where(expert_id == e)
            if len(row):
                out.index_add_(0, row, weight[row, k, None].double() * expert(x[row], self.gate_up[e], self.down[e]))
        return out.to(self.dtype).double() + residual.double()

    def run(self, lib: Lib, x, expert_id, weight, residual, count=None) -> torch.Tensor:
        """moe_experts into a poisoned output."""
        out = poisoned(*x.shape, dtype=self.dtype)
        args = lib.moe_args(x, self.packed, expert_id, weight, out, residual, count)
        lib.moe(args)
        torch.cuda.synchronize()
        return out


def check_rows(lib: Lib, report: Report, layer: Layer, rows: int) -> int:
    """Close to float64; any part of the rows, in any order, has the same bits; a device-side count is obeyed."""
    inputs = layer.inputs(rows)
    out = layer.run(lib, *inputs)
    relative, largest = error(out, layer.reference(*inputs))
    report.record.setdefault("error", {})[f"{layer.name} T{rows}"] = (relative, largest)
    if not (relative < LIMIT[layer.dtype] and largest < 4 * LIMIT[layer.dtype]):
        report.fail(f"{layer.name} T{rows}: error {relative:.2e}, largest {largest:.2e}")
    parts = [part for part in (1, 2, 7, 9, 33, 64, 65, 72, 200) if part <= rows]
    for part in parts:
        index = torch.randperm(rows, device=DEVICE)[:part]
        got = layer.run(lib, *(t[index].contiguous() for t in inputs))
        if not torch.equal(bits(got), bits(out[index])):
            bad = (bits(got) != bits(out[index])).sum().item()
            report.fail(f"{layer.name}: {part} of {rows} rows: {bad} of {got.numel()} values differ")
    used = rows // 2 + 1
    partly = layer.run(lib, *inputs, count=torch.tensor([used], dtype=torch.int32, device=DEVICE))
    if not torch.equal(bits(partly[:used]), bits(out[:used])) or not partly[used:].isnan().all():
        report.fail(f"{layer.name} T{rows}: device-side count")
    return len(parts) + 1


def check_composition(lib: Lib, report: Report, layer: Layer) -> int:
    """With one expert a row, weight 1 and no shared expert, moe_experts is linear, swiglu, linear."""
    rows, packed = 40, layer.packed._replace(shared_gate_up=None, shared_down=None, shared_width=0)
    x, _, _, residual = layer.inputs(rows)
    expert_id = torch.full((rows, 1), 1, dtype=torch.int32, device=DEVICE)
    out, want = poisoned(rows, layer.dim, dtype=layer.dtype), poisoned(rows, 1, layer.dim, dtype=layer.dtype)
    args = lib.moe_args(x, packed, expert_id, torch.ones(rows, 1, device=DEVICE), out, residual)
    lib.moe(args)
    gate_up = poisoned(rows, 1, 2 * packed.width, dtype=layer.dtype)
    lib.linear(x[:, None], packed.gate_up[1:2], gate_up)
    gate, up = gate_up[:, 0].float().chunk(2, 1)
    hidden = (gate / (1 + torch.exp(-gate)) * up).to(layer.dtype)
    lib.linear(hidden[:, None], packed.down[1:2], want, residual=residual[:, None])
    relative, _ = error(out, want[:, 0].double())
    same = (bits(out) == bits(want[:, 0])).float().mean().item()
    report.record.setdefault("composition", {})[layer.name] = same
    if not (relative < 1e-3 and same > 0.9):  # torch's exp is not ours: a few of the rounded products differ
        report.fail(f"{layer.name}: composition: {relative:.2e}, {same:.4f} of the values have the same bits")
    return 1


BORDERS = (
    ((256, 96, 64, 4, 96), (64, 65, 71, 72, 73)),
    ((192, 72, 72, 1, 72), (71, 73, 287, 288, 289)),
    ((64, 20, 70, 3, 5), (72, 73, 95, 96, 97)),
    ((64, 32, 64, 8, 32), (36, 37)),
)
"""Layers, and rows at the borders of what the shared expert's product may stand beside (72 rows), of pairs that no
kernel groups (288), and of small tiles (4.5 rows of an expert)."""


def check_moe(lib: Lib, report: Report, quick: bool) -> int:
    """All layers; `quick`: two small ones."""
    total = 0
    tiny = ((256, 96, 8, 2, 96), (192, 72, 6, 2, 72), (34, 20, 3, 3, 5))  # D, width, experts, top_k, shared width
    for dtype in (torch.bfloat16, torch.float32):
        for numbers in tiny[1:] if quick else (*tiny, (2048, 1408, 16, 6, 2816), (1024, 512, 64, 8, 0)):
            layer = Layer(lib, dtype, *numbers)
            report.say(layer.name)
            total += sum(check_rows(lib, report, layer, rows) for rows in ((1, 64) if quick else (1, 8, 64, 300)))
            total += check_composition(lib, report, layer)
        for numbers, rows_list in () if quick else BORDERS:
            layer = Layer(lib, dtype, *numbers)
            report.say(layer.name)
            total += sum(check_rows(lib, report, layer, rows) for rows in rows_list)
    return total
