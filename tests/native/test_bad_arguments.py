"""Every operator refuses a damaged argument by name, or takes it as what it is; none crashes, and none writes first.

`bad_calls.py` makes the calls, in processes of their own; this judges what they tell.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.valid_calls import CALLS, IN_PLACE, PER_ROW, operator_of

ROOT = Path(__file__).parents[2]
NAMES = set(re.findall(r'm\.def\("(\w+)\(', (ROOT / "kernels" / "bind" / "schema.cpp").read_text()))

TAKEN = {
    "embed": "token: 0:+-0 empty; weight: 0:+- 1:+-0 type",
    "rms_norm": "eps: number; settled: None; x: 0:+-0 expanded wider",
    "pack_linear": "weight: 0:+-0 1:+-0 2:+-0 type",
    "dequantize_int4": "bf16: None; group_id: 0:+-0 1:+-0; scale: 2:- type",
    "pack_int4": "scale: 2:-",
    "linear": "out_f32: None; settled: None; x: expanded wider",
    "linear (a share)": "first_segment: number; num_out: -1 +1; out_f32: None; "
    "settled: None; whole_in: -1 +1; x: 0:+-0 expanded wider",
    "linear (INT4)": "out_f32: None; settled: None; x: expanded wider",
    "linear_heads": "num_out: number -1 +1; settled: None; x: 0:+-0 expanded wider",
    "rope": "cos_sin: 0:+-; x: 1:+-0 type expanded wider",
    "swiglu": "gate_up: 0:+-0 1:0 type",
    "residual_add": "",
    "add_partials": "bf16: None",
    "argmax": "logits: 0:+-0 1:+-",
    "sample": "logits: 1:+-",
    "sample_among": "vocab_size: number -1 +1; words: 1:+-0",
    "moe_route": "logits: 0:+-0; num_groups: number; renormalize: None; "
    "scaling_factor: number; scoring: number -1; top_k: number -1 +1; topk_groups: +1",
    "moe_experts": "",
    "cache_append": "cache: 0:+ 1:+",
    "latent_append": "cache: 0:+ 1:+; cos_sin: 0:+-; eps: number; q_kv: expanded wider; settled: None",
    "absorb_query": "cos_sin: 0:+-; latent_dim: number -1 +1; q: expanded wider; settled: None",
    "cache_compact": "accepted_path: 1:+-; cache: 0:+-0 2:+- 3:+-0 type",
    "verify_attn": "cache: 1:+-; scale: number",
    "context_append": "cos_sin: 0:+; eps: number",
    "block_attn": "causal: None; cos_sin: 0:+; eps: number; layer: number -1 +1; qkv: 1:-; scale: number; "
    "window: number -1 +1",
    "accepted_features": "accepted_path: 1:+-",
    "draft_topk": "logits: 0:+-0 1:+-0 2:+- type; num_candidates: number -1 +1",
    "draft_topk_share": "first_segment: number; logits: 0:+-0 1:+-0 type; num_candidates: number -1 +1",
    "draft_topk_merge": "words: 1:+-0 2:+-0",
    "tree_build": "max_budget: +1",
    "tree_rows": "",
    "tree_rows_padded": "",
    "tree_accept": "max_depth: number -1 +1",
    "tree_accept (by rows)": "max_depth: number -1 +1; target_token: 0:+",
    "step_commit": "is_stop: 0:+-; ring: 0:+-; target_token: 0:+; text: 1:+-",
}
"""What else is a valid argument: another size of a dimension that no other argument has (+ one more, - one less, 0
none), another float type where no other argument has it, None for a bool, views of rows, numbers in range."""

WORDS = {
    "type": "of another type", "number": "another number", "None": "missing", "expanded": "one row for all",
    "wider": "rows inside wider ones", "empty": "empty", "+1": "one more", "-1": "one less",
}  # fmt: skip
SIZES = {"+": "one more", "-": "one less", "0": "none"}
OF_VALUES = ("another value", "other values")
"""Whether values are taken depends on them."""


def taken(name: str) -> set[str]:
    """TAKEN[name] in the words of `damage.py`."""
    found = set()
    for entry in filter(None, TAKEN[name].split("; ")):
        argument, words = entry.split(": ", 1)
        for word in words.split():
            dim, _, signs = word.partition(":")
            found |= {f"{argument}: {SIZES[s]} in dimension {dim}" for s in signs} or {f"{argument}: {WORDS[word]}"}
    return found


@pytest.fixture(scope="module")
def told() -> dict:
    """What `bad_calls.py` tells of every call."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.native.bad_calls"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_operator_has_a_call():
    assert {operator_of(name) for name in CALLS} == NAMES
    assert set(CALLS) == set(TAKEN) and set(PER_ROW) | set(IN_PLACE) <= NAMES


@pytest.mark.parametrize("name", CALLS)
def test_nothing_goes_wrong(name, told):
    assert told[name]["wrong"] == []
    assert told[name]["num_calls"] >= 100


@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_valid_is_refused(name, told):
    assert {kind for kind in told[name]["accepted"] if not kind.endswith(OF_VALUES)} == taken(name)


def test_a_crash_an_endless_loop_and_a_write_are_told(tmp_path):
    """Of operators that do so, beside one that does not."""
    script = """
import json, os, time, torch
from tests.native import bad_calls
bad_calls.SECONDS = 1
def crash(self, damage, at_end): os.kill(os.getpid(), 11)
def write(self, arguments):
    if getattr(self, "clean", None) is not None:
        arguments["cache"].zero_()
        raise ValueError("cache_append: got others")
    return ()
bad_calls.torch.set_num_threads(1)
check, run = bad_calls.Calls.check, bad_calls.Calls.run
bad_calls.Calls.check = crash
told = [bad_calls.run_call("argmax")]
bad_calls.Calls.check = lambda *args, at_end: time.sleep(9)
told.append(bad_calls.run_call("argmax"))
bad_calls.Calls.check, bad_calls.Calls.run = check, write
told.append(bad_calls.run_call("cache_append"))
bad_calls.Calls.run = run
told.append(bad_calls.run_call("argmax"))
print(json.dumps([one["wrong"] for one in told]))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    crash, loop, write, good = json.loads(done.stdout)
    assert crash == ["SIGSEGV in torch.float32, logits: of another kind"] and loop[0].startswith("SIGALRM in torch")
    assert any(text.endswith("refused after it had written cache") for text in write) and good == []


def test_reading_past_an_input_is_a_crash():
    script = """
import ctypes, torch
from tests.native.bad_calls import guarded
for at_end, step in ((True, 12), (False, -1)):
    t = guarded(torch.arange(3, dtype=torch.int32), at_end)
    assert t.tolist() == [0, 1, 2]
print(flush=True)
ctypes.string_at(t.data_ptr() + step, 1)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, timeout=60)
    assert done.stdout == b"\n" and done.returncode == -11
