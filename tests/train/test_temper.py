"""Tempering: the logits of the weights that are written, the temperature that is found, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from kdtree_nb import drafters, load_model
from kdtree_nb.errors import CheckpointError
from kdtree_nb.model.checkpoint import DATA_DIR
from kdtree_nb.speculate.text_logits import text_logits
from kdtree_nb.train.drafter.recipe import Shape
from kdtree_nb.train.drafter.record import FILES, write_record
from kdtree_nb.train.drafter.temper import (
    ENTRY,
    MAX_TRIALS,
    NORM,
    RANGE,
    find_temperature,
    mean_excess,
    tempered,
    untempered_record,
    write_tempered,
)
from kdtree_nb.train.nano.export import file_hash, folder_fingerprint

SHAPE = Shape(num_layers=2, width=48, num_heads=4, num_kv_heads=2, head_dim=12, num_features=2, block_size=6)


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


def random_drafter(tiny, dtype=torch.float32):
    """Untrained, with norms that are not 1."""
    drafter = drafters.DFlash.random(SHAPE.config(tiny.config, 255))
    torch.manual_seed(3)
    noisy = {n: w + 0.2 * torch.randn_like(w) * (w.ndim == 1) for n, w in drafter.weights.items()}
    return drafters.DFlash(drafter.config, {n: w.to(dtype) for n, w in noisy.items()})


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("temperature", [0.9, 1.2])
def test_logits_are_those_of_before_over_the_temperature(tiny, dtype, rounding, temperature):
    drafter, text = random_drafter(tiny, dtype), [ord(c) for c in "def read(self):\n    return"]
    want = text_logits(drafter, tiny, text, [5, 20]) / temperature
    after = tempered(drafter, temperature)
    got = text_logits(after, tiny, text, [5, 20])
    assert (got - want).abs().max() < rounding * want.abs().max() < want.abs().max() * abs(temperature - 1)
    assert after.weights[NORM].dtype == dtype and torch.equal(
        drafter.weights[NORM], random_drafter(tiny, dtype).weights[NORM]
    )
    assert all(after.weights[name] is value for name, value in drafter.weights.items() if name != NORM)


def test_a_temperature_of_1_changes_nothing(tiny):
    drafter = random_drafter(tiny, torch.bfloat16)
    assert torch.equal(tempered(drafter, 1.0).weights[NORM], drafter.weights[NORM])


class Excess:
    """A function of the temperature that notes what it was asked."""

    def __init__(self, function):
        self.function, self.asked = function, []

    def __call__(self, temperature):
        self.asked.append(temperature)
        return self.function(temperature)


@pytest.mark.parametrize("steep", [0.3, 0.9, 4.0])
@pytest.mark.parametrize("root", [0.81, 0.94, 1.003, 1.2])
def test_the_temperature_is_where_the_excess_is_zero(steep, root):
    excess = Excess(lambda t: -steep * (math.log(t / root) + 0.5 * math.log(t / root) ** 2))
    found = find_temperature(excess)
    assert found in excess.asked and abs(excess.function(found)) <= 1e-3 and abs(found - root) < 0.005
    assert excess.asked[0] == 1.0 and len(excess.asked) <= MAX_TRIALS == len(excess.asked) + MAX_TRIALS - len(
        set(excess.asked)
    )
    assert all(RANGE[0] <= t <= RANGE[1] * (1 + 1e-12) for t in excess.asked)


def test_a_drafter_that_expects_what_it_gets_is_left_alone():
    excess = Excess(lambda t: 1e-4)
    assert find_temperature(excess) == 1.0 and excess.asked == [1.0]


@pytest.mark.parametrize("root", [0.91, 1.13])
def test_where_the_excess_jumps_over_zero_the_nearest_trial_is_taken(root):
    excess = Excess(lambda t: 0.02 if t < root else -0.03)
    found = find_temperature(excess)
    assert excess.function(found) == 0.02 and found < root and len(excess.asked) == MAX_TRIALS


@pytest.mark.parametrize("value", [0.4, -0.4])
def test_no_temperature_of_the_range(value):
    with pytest.raises(ValueError, match="expected a temperature of 0.8 … 1.25 .* got .40.0%"):
        find_temperature(lambda t: value)


def test_an_excess_that_is_no_number():
    with pytest.raises(ValueError, match="temperature 1.0000: expected a finite excess, got nan"):
        find_temperature(lambda t: math.nan)


def test_the_mean_counts_every_budget_alike():
    sums = [{"budget": "chain", "expected": 3.0, "accepted": 2.0}, {"budget": 8, "expected": 9.0, "accepted": 10.0}]
    assert mean_excess(sums) == pytest.approx((0.5 - 0.1) / 2)
    with pytest.raises(ValueError, match="budget 8: expected accepted tokens to agree with, got 0"):
        mean_excess([sums[0], {"budget": 8, "expected": 1.0, "accepted": 0}])


@pytest.fixture
def folders(tiny, tmp_path):
    """(target, drafter): any file of weights, and a drafter with its record."""
    target, folder = tmp_path / "target", tmp_path / "drafter"
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"weights")
    random_drafter(tiny).save(folder)
    write_record(folder, {"target": folder_fingerprint(target), "train_curve": [1, 2]})
    return target, folder


def test_weights_and_record_are_written(folders):
    target, folder = folders
    record, before = untempered_record(folder, target), load_file(folder / FILES[1])
    config = (folder / FILES[0]).read_bytes()
    drafter = drafters.DFlash.load(folder)
    write_tempered(folder, tempered(drafter, 0.9), record, {"temperature": 0.9})
    after, written = load_file(folder / FILES[1]), json.loads((folder / "training.json").read_text())
    assert after.keys() == before.keys() and (folder / FILES[0]).read_bytes() == config
    assert {name for name in before if not torch.equal(before[name], after[name])} == {NORM}
    assert after[NORM].dtype == torch.bfloat16
    assert torch.equal(after[NORM], (before[NORM].float() / 0.9).bfloat16())
    assert written["temper"] == {"temperature": 0.9} and written["train_curve"] == [1, 2]
    for name in FILES:
        expected = {"bytes": (folder / name).stat().st_size, "sha256": file_hash(folder / name)}
        assert written["files"][name] == expected
    assert written["files"][FILES[1]] != record["files"][FILES[1]]
    assert {path.name for path in folder.iterdir()} == {*FILES, "training.json"}
    with pytest.raises(CheckpointError, match="got one tempered with 0.9000; to begin anew, put back the folder"):
        untempered_record(folder, target)


def test_what_is_no_drafter_of_this_target_is_refused(folders, tmp_path):
    target, folder = folders
    with pytest.raises(CheckpointError, match="found no .*training.json"):
        untempered_record(tmp_path, target)
    weights = (folder / FILES[1]).read_bytes()
    (folder / FILES[1]).write_bytes(weights[:-1] + b"!")
    with pytest.raises(CheckpointError, match="model.safetensors: expected the file of training.json, got"):
        untempered_record(folder, target)
    (folder / FILES[1]).write_bytes(weights)
    assert untempered_record(folder, target)["train_curve"] == [1, 2]
    (target / "model.safetensors").write_bytes(b"others")
    with pytest.raises(CheckpointError, match="expected a drafter of the target .*, got that of another"):
        untempered_record(folder, target)


SHIPPED = DATA_DIR / "nano-k2-dflash"


@pytest.mark.skipif(not (SHIPPED / "training.json").is_file(), reason="the drafter of nano-k2 is not in data/")
def test_the_drafter_in_data_is_that_of_its_record():
    record = json.loads((SHIPPED / "training.json").read_text())
    assert record["files"].keys() == set(FILES)
    for name, entry in record["files"].items():
        assert entry == {"bytes": (SHIPPED / name).stat().st_size, "sha256": file_hash(SHIPPED / name)}, name
    assert record["target"] == folder_fingerprint(DATA_DIR / "nano-k2")
    if ENTRY in record:
        found = record[ENTRY]
        assert RANGE[0] <= found["temperature"] <= RANGE[1] and found["corpus"] == record["texts"]["corpus"]
        assert abs(mean_excess(found["after"])) < abs(mean_excess(found["before"]))
