"""Cost models: what was measured comes back, between points it is linear, and what does not fit is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from kdtree_nb import Engine, drafters
from kdtree_nb.drafters.dflash.config import DFlashConfig
from kdtree_nb.errors import CalibrationError
from kdtree_nb.model import build_model
from kdtree_nb.native import ops
from kdtree_nb.speculate import calibrate, load_cost, save_cost
from kdtree_nb.speculate import engine as engine_module
from kdtree_nb.speculate.cost import NEVER_S, CostKey, CostModel, Overhead, Surface
from kdtree_nb.speculate.cost_store import cost_key, cost_path, data_dir, drafter_key
from kdtree_nb.speculate.cut import Cutter
from kdtree_nb.speculate.measure_cost import Effort
from kdtree_nb.tiny2 import tiny2_config, tiny2_weights

KEY = CostKey("a cpu, 2 threads", "float32", "host", "shape", "weights", "build")
SMALL = Effort(max_budget=5, num_streams=(1, 3), prefix_len=(4, 20), num_rounds=1)


def plane(num_streams: int, rows: tuple[int, ...], prefixes=(10, 110), num_slots: int = 0) -> Surface:
    """1 ms, 0.1 ms a row, 0.01 ms a token of the prefix and 2 ms a stream."""
    seconds = tuple(tuple(1e-3 + 1e-4 * r + 1e-5 * p + 2e-3 * num_streams for r in rows) for p in prefixes)
    return Surface(num_slots, num_streams, rows, seconds)


OVERHEAD = tuple(Overhead(0, n, (n * 1e-4, n * 2e-4), n * 1e-5) for n in (1, 4))
COST = CostModel(
    KEY, 16, (10, 110), (plane(1, (1, 2, 5, 17)), plane(4, (4, 8, 20, 68))), {"NGram of depth 16": OVERHEAD},
    {"NGram of depth 16": (1.0, 0.5, 0.25)},
)  # fmt: skip


@pytest.mark.parametrize("num_streams", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("prefix_len", [10, 47.5, 110, 300])
@pytest.mark.parametrize("extra", [0, 1, 3, 40, 100])
def test_a_plane_comes_back_between_and_beyond_the_points(num_streams, prefix_len, extra):
    rows = num_streams + extra
    want = 1e-3 + 1e-4 * rows + 1e-5 * prefix_len + 2e-3 * num_streams
    assert COST.seconds(num_streams, prefix_len, rows) == pytest.approx(want, rel=1e-12)


def test_before_the_first_prefix_it_is_flat():
    assert COST.seconds(1, 0, 3) == COST.seconds(1, 10, 3)


def test_measured_points_come_back_exactly():
    for surface in COST.surfaces:
        table = COST.table(surface.num_streams, 68)
        for at, row in zip(table, surface.seconds, strict=True):
            assert [at[r] for r in surface.num_rows] == list(row)
            assert (at[: surface.num_streams] == NEVER_S).all()


def test_a_step_of_several_sizes_of_captures_costs_that_of_the_smallest_that_holds_it():
    surfaces = tuple(plane(1, (1, size) if size > 1 else (1,), num_slots=size) for size in (1, 3, 9))
    surfaces = (*surfaces[:2], dataclasses.replace(surfaces[2], seconds=((9.0, 9.0), (9.0, 9.0))))
    cost = CostModel(KEY, 8, (10, 110), surfaces)
    assert cost.slot_sizes == [1, 3, 9]
    assert cost.seconds(1, 10, 3, num_slots=2) == cost.seconds(1, 10, 3, num_slots=3) < 1
    assert cost.seconds(1, 10, 3, num_slots=4) == cost.seconds(1, 10, 3, num_slots=99) == 9.0


def test_noise_makes_no_step_free():
    """Fewer seconds for more streams or a longer prefix, as a busy machine may measure them: no less beyond."""
    surfaces = tuple(Surface(0, n, (n,), ((3.0 / n,), (2.0 / n,))) for n in (1, 2))
    noisy = CostModel(KEY, 64, (10, 20), surfaces)
    assert (noisy.table(10, 40)[:, 10:] >= 1.0).all() and (noisy.table(10, 40)[:, :10] == NEVER_S).all()
    assert noisy.seconds(10, 4000, 20) == 1.0
    cutter = Cutter(noisy, 10, 3, [0.0] * 10, torch.device("cpu"))
    tree = ops.tree_build(torch.full((10, 2, 2), -5.0), torch.arange(2).repeat(10, 2, 1), torch.zeros(10).long(), 3)
    assert min(cutter.on_host(tree, 10, 4000.0)) >= 1  # no root is left out
    assert cutter.on_device(tree, torch.ones(10).int(), torch.full((10,), 4000).int()).min() >= 1


def test_overhead_is_that_of_the_drafter():
    assert COST.overhead_s("NGram of depth 16", 1).tolist() == [1e-4, 2e-4]
    assert COST.overhead_s("NGram of depth 16", 3) == pytest.approx([3e-4, 6e-4])
    assert COST.cut_s("NGram of depth 16", 3) == pytest.approx(3e-5)
    whole = COST.seconds(1, 60, 4, drafter="NGram of depth 16")
    assert whole == pytest.approx(COST.seconds(1, 60, 4) + 1.5e-4)
    with pytest.raises(
        CalibrationError, match=r"measured with this model \(NGram of depth 16\), got Random of depth 7"
    ):
        COST.overhead_s(drafter_key(drafters.Random()), 1)


def test_overhead_is_that_of_the_smallest_captured_step_that_holds_the_tree():
    measured = tuple(Overhead(slots, 1, (slots * 1e-3, slots * 2e-3)) for slots in (1, 3, 9))
    cost = dataclasses.replace(COST, overhead={"x": measured})
    for slots, at in ((0, 1), (1, 1), (2, 3), (3, 3), (4, 9), (9, 9), (50, 9)):
        assert cost.overhead_s("x", 1, slots).tolist() == [at * 1e-3, at * 2e-3]


@pytest.mark.parametrize(("depth", "want"), [(1, 16), (0, 0)])
def test_no_budget_beyond_what_the_best_drafter_could_pay_for(depth, want):
    assert COST.useful_budget(1, depth, 0.0) == want


def test_a_budget_that_takes_longer_than_the_steps_it_saves():
    steep = CostModel(KEY, 64, (1,), (Surface(0, 1, (1, 65), ((1.0, 65.0),)),))
    assert [steep.useful_budget(1, depth, 0.0) for depth in (1, 3, 16)] == [1, 3, 16]
    assert steep.useful_budget(1, 3, 1.0) == 6  # 1 + n + 1 <= 4 (1 + 1)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prefix_len": (5, 5)}, "expected ascending prefix lengths"),
        ({"surfaces": ()}, "expected at least one surface"),
        ({"max_budget": 0}, "expected a max_budget of 1"),
        ({"surfaces": (plane(2, (1, 2)),)}, "expected a root for every stream"),
        ({"surfaces": (plane(1, (1, 2), prefixes=(1,)),)}, "expected seconds of sizes"),
        ({"surfaces": (Surface(0, 1, (1,), ((float("nan"),), (1.0,))),)}, "expected positive finite seconds"),
        ({"surfaces": (plane(1, (1, 2)), plane(1, (1, 3)))}, "expected one surface for each"),
        ({"overhead": {"x": (Overhead(0, 1, (1.0, float("inf"))),)}}, "expected seconds for x"),
        ({"overhead": {"x": (Overhead(0, 0, (1.0, 1.0)),)}}, "expected seconds for x"),
        ({"overhead": {"x": (Overhead(-1, 1, (1.0, 1.0)),)}}, "expected seconds for x"),
        ({"overhead": {"x": (Overhead(0, 1, (1.0,)),)}}, "expected seconds for x"),
        ({"overhead": {"x": (Overhead(0, 1, (1.0, 1.0), float("nan")),)}}, "expected seconds for x"),
        ({"overhead": {"x": ()}}, "expected seconds for x"),
        ({"typical": {"x": (1.0, float("nan"))}}, "expected probabilities for x"),
        ({"typical": {"x": (1.0, 1.5)}}, "expected probabilities for x"),
        ({"typical": {"x": ()}}, "expected probabilities for x"),
        ({"max_budget": 1.5}, "expected a max_budget of 1"),
        ({"prefix_len": (float("nan"), 2)}, "expected ascending prefix lengths"),
        ({"prefix_len": ("1", "2")}, "expected ascending prefix lengths"),
        ({"prefix_len": (-3, 2)}, "expected ascending prefix lengths"),
        (
            {"surfaces": (dataclasses.replace(plane(1, (1, 2)), num_slots="q"),)},
            "expected integers as numbers of slots",
        ),
        ({"surfaces": (dataclasses.replace(plane(1, (1, 2)), num_slots=-5),)}, "expected integers as numbers of slots"),
        (
            {"surfaces": (dataclasses.replace(plane(1, (1, 2)), num_streams=0),)},
            "expected integers as numbers of slots",
        ),
        (
            {"surfaces": (dataclasses.replace(plane(1, (1, 2)), num_rows=("x", "y")),)},
            "expected integers as numbers of",
        ),
    ],
)
def test_a_bad_cost_model_is_refused(change, error):
    with pytest.raises(CalibrationError, match=error):
        dataclasses.replace(COST, **change)


def test_json_and_back():
    assert CostModel.from_dict(json.loads(json.dumps(COST.to_dict()))) == COST
    for fields in ({}, [], None, {**COST.to_dict(), "key": {"device": "x"}}, {**COST.to_dict(), "surfaces": [1]}):
        with pytest.raises(CalibrationError, match="cost model: expected its fields"):
            CostModel.from_dict(fields)


def test_the_folder_is_the_users(monkeypatch, tmp_path):
    for name in ("KDTREE_DATA_DIR", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_dir() == tmp_path / ".local" / "share" / "kdtree_nb"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert data_dir() == tmp_path / "xdg" / "kdtree_nb"
    monkeypatch.setenv("KDTREE_DATA_DIR", str(tmp_path / "own"))
    assert cost_path(KEY).parent == tmp_path / "own" / "calibration"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The user's data folder, empty."""
    monkeypatch.setenv("KDTREE_DATA_DIR", str(tmp_path))
    return tmp_path / "calibration"


def test_auto_without_calibration_says_how_to_calibrate(tiny2, folder):
    with pytest.raises(CalibrationError, match=r"found none at .*calibration.*measure it once: kdtree-nb calibrate"):
        Engine(tiny2, drafters.NGram(), budget="auto")
    with pytest.raises(CalibrationError, match="measure it once"):
        Engine(tiny2, drafters.NGram()).generate_ddtree([1, 2], 4, budget="auto")


def test_what_was_calibrated_is_found_again(tiny2, folder):
    cost = calibrate(tiny2, drafters.NGram(), SMALL)
    assert cost.max_budget == 5 and cost.prefix_len == (4, 20)
    assert [(s.num_streams, s.num_rows) for s in cost.surfaces if s.num_slots in (0, 6)] == [
        (1, tuple(n for n in (1, 2, 3, 5, 6))),
        (3, tuple(3 * n for n in (1, 2, 3, 5, 6))),
    ]
    path = save_cost(cost)
    assert path.parent == folder and load_cost(tiny2, cost.key.kind) == cost
    got = Engine(tiny2, drafters.NGram(), budget="auto").generate_ddtree([1, 2, 3], 5)
    assert got.tokens == Engine(tiny2).generate_ar([1, 2, 3], 5).tokens
    with pytest.raises(CalibrationError, match="got Random of depth 7; run kdtree-nb calibrate"):
        Engine(tiny2, drafters.Random(), budget="auto").generate_ddtree([1, 2, 3], 5)


@pytest.mark.parametrize("drafter", [drafters.NGram(), drafters.SkipGram([1, 2, 3] * 9, 331, depth=4), None])
def test_steps_of_the_device_are_measured_by_the_size_of_their_captures(tiny2, monkeypatch, drafter):
    """A drafter on the host, one in the captured step, and one that looks at hidden states."""
    monkeypatch.setattr(engine_module, "_kind", lambda use_graphs, device: engine_module.DEVICE)
    drafter = drafter or small_dflash(tiny2)
    cost = calibrate(tiny2, drafter, SMALL)
    assert cost.key.kind == "device" and cost.slot_sizes == [1, 2, 3, 5, 6]
    rows = {s.num_slots: s.num_rows for s in cost.surfaces if s.num_streams == 3}
    assert rows == {1: (3,), 2: (6,), 3: (9,), 5: (12, 15), 6: (3, 6, 9, 15, 18)}
    assert cost.overhead.keys() == {drafter_key(drafter), drafter_key(drafter, True)}
    is_on_host = isinstance(drafter, drafters.NGram)
    assert cost.typical.keys() == (set() if is_on_host else cost.overhead.keys())
    places = {is_chain: [(o.num_slots, o.num_streams) for o in cost.overhead[drafter_key(drafter, is_chain)]]
              for is_chain in (False, True)}  # fmt: skip
    slots = [0] if is_on_host else [1, 2, 3, 5, 6]
    assert places[False] == [(size, S) for S in (1, 3) for size in slots]
    assert places[True] == [(size, S) for S in (1, 3) for size in ([0] if is_on_host else [1, 2, 3, 5])]
    for name, values in cost.typical.items():
        assert len(values) == (5 if name.endswith("chain") else 6) and values[0] == 1
        assert all(0 <= b <= a for a, b in zip(values, values[1:], strict=False))
    engine = Engine(tiny2, drafter, budget="auto", cost=cost)
    runs = [run([[1, 2, 3], [4, 5]], 7, stop_token_ids=()) for run in (engine.generate_ddtree, engine.generate_ar)]
    assert [g.tokens for g in runs[0]] == [g.tokens for g in runs[1]]


def small_dflash(model) -> drafters.DFlash:
    """One with random weights."""
    c = model.config
    config = DFlashConfig(
        hidden_size=c.hidden_size, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=c.vocab_size, target_layer_ids=(1, 3), mask_token_id=0,
        block_size=5,
    )  # fmt: skip
    return drafters.DFlash.random(config)


def test_drafters_that_were_measured_before_are_kept(tiny2, folder):
    key = cost_key(tiny2, "host")
    first = dataclasses.replace(COST, key=key)
    save_cost(first)
    other = {"Random of depth 7": (Overhead(0, 1, (0.5, 0.5)),)}
    save_cost(dataclasses.replace(first, overhead=other, typical={"Random of depth 7": (1.0,)}))
    kept = load_cost(tiny2, "host")
    assert kept.overhead == {**COST.overhead, **other} and kept.typical == {**COST.typical, "Random of depth 7": (1.0,)}
    save_cost(dataclasses.replace(first, key=dataclasses.replace(key, build="other"), overhead={}))
    with pytest.raises(CalibrationError, match="is stale: expected build"):
        load_cost(tiny2, "host")


@pytest.mark.parametrize("field", ["build", "model"])
def test_a_stale_calibration_says_what_differs(tiny2, folder, field):
    key = cost_key(tiny2, "host")
    save_cost(dataclasses.replace(COST, key=dataclasses.replace(key, **{field: "another"})))
    with pytest.raises(CalibrationError, match=f"is stale: expected {field} '{getattr(key, field)}', got 'another'"):
        load_cost(tiny2, "host")


def test_other_weights_are_another_model(tiny2):
    weights = {name: array + 0.25 if name == "model.norm.weight" else array for name, array in tiny2_weights().items()}
    assert cost_key(tiny2, "host") == cost_key(build_model(tiny2_config(), tiny2_weights(), tiny2.device), "host")
    assert cost_key(tiny2, "host") != cost_key(build_model(tiny2_config(), weights, tiny2.device), "host")


def test_a_cost_model_or_a_budget_that_is_none(tiny2):
    for cost in ({}, "x", 3):
        with pytest.raises(ValueError, match="Engine: cost: expected a CostModel, as calibrate gives, got"):
            Engine(tiny2, drafters.NGram(), cost=cost)
    with pytest.raises(ValueError, match="Engine: budget: expected an integer of 0 … 1023 or \"auto\", got 'all'"):
        Engine(tiny2, drafters.NGram(), budget="all")


def test_a_given_cost_model_of_another_model_is_refused(tiny2):
    with pytest.raises(CalibrationError, match="the cost model given is stale: expected device"):
        Engine(tiny2, drafters.NGram(), budget="auto", cost=COST)


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b"", b"[]", b'{"key": {}}'])
def test_a_damaged_file_is_named(tiny2, folder, data):
    path = save_cost(dataclasses.replace(COST, key=cost_key(tiny2, "host")))
    path.write_bytes(data)
    with pytest.raises(
        CalibrationError, match=f"{path}: .*expected .*, got .*; run kdtree-nb calibrate again"
    ) as caught:
        load_cost(tiny2, "host")
    assert str(caught.value).count("run kdtree-nb") == 1


@pytest.mark.parametrize("values", [{"num_rounds": 0}, {"max_budget": 0}, {"num_streams": ()}, {"prefix_len": (9, 3)}])
def test_bad_efforts(values):
    with pytest.raises(ValueError, match=f"calibrate: {next(iter(values))}: expected"):
        Effort(**values)


def test_a_short_model_is_measured_within_its_length(tiny2):
    longest = tiny2.config.max_position_embeddings
    assert Effort(max_budget=2).within(longest).prefix_len == (32, 512)
    assert Effort(max_budget=2).within(10**6).prefix_len == (32, 512, 2048)
    assert Effort(max_budget=2).within(48).prefix_len == (10,)  # two trees of 3 slots and 32 tokens behind it
    room = longest - 2 * 3 - 32
    cost = calibrate(tiny2, effort=Effort(max_budget=2, num_streams=(1,), prefix_len=(3, room), num_rounds=1))
    assert cost.prefix_len == (3, room) and np.isfinite(cost.surfaces[0].seconds).all() and cost.overhead == {}
    assert torch.is_inference_mode_enabled() is False


@pytest.mark.parametrize("more", [1, 10**9, 10**30])
def test_a_prefix_without_room_is_refused_before_anything_is_built(tiny2, monkeypatch, more):
    monkeypatch.setattr("kdtree_nb.speculate.measure_cost.Engine", None)
    room = tiny2.config.max_position_embeddings - 2 * 3 - 32
    with pytest.raises(ValueError, match=f"calibrate: prefix_len: expected at most {room}, .*, got {room + more}; "):
        calibrate(tiny2, effort=Effort(max_budget=2, num_streams=(1,), prefix_len=(3, room + more)))
