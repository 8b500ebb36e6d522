"""Routes that change with the step: each step's are a function of (seed, step), and everything that trains on them
asks for its step's.
"""

import shutil
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import training_runs
from test_sharding import all_well, assert_same_losses, on_ranks
from test_study import run_of
from training_runs import assert_same_end, command

import train
from dit import multiply_adds
from edm import EDM
from guidance import Guidance
from objectives import build_objective
from routing_module import Route, RouteSchedule
from runtime import files
from scripts import plan, study
from training import speed
from training.run import check_kept
from weights import checkpoint as checkpoints
from weights.loading import load_trained
from weights.records import build_network, build_schedule

ROUTE = Route(2, 2, 0.5)  # of model=tread at a depth of 6
NETWORK = dict(input_size=8, in_channels=3, hidden_size=32, depth=6, num_heads=2, num_classes=5)
RAMPS = ("route_schedule.dense_before=1", "route_schedule.dense_after=4",
         "route_schedule.selection_ratios=[0.25,0.5,0.75]")
TWO = ("route_schedule.changes=[[3,[{start_layer_idx: 1, end_layer_idx: 1, selection_ratio: 0.5},"
       "{start_layer_idx: 4, end_layer_idx: 4, selection_ratio: 0.25}]]]")
SPRINT = ("model=sprint", "model.routes.0.path_drop=0.5", "diffusion=rf")
V1 = ("objective=version1", "model.routes=[{start_layer_idx: 2, end_layer_idx: 3, selection_ratio: 0.5}]")


def small_net(**keywords):
    torch.manual_seed(0)
    return build_network({**NETWORK, "routes": [vars(ROUTE)], **keywords})


def ratios(schedule, steps):
    return [[route.selection_ratio for route in schedule.at(step)] for step in range(steps)]


def ratios_of(schedule, steps):
    """The ratio of each step's only route."""
    return [ratio for ratio, in ratios(schedule, steps)]


def trained(folder, data, *settings):
    return training_runs.trained(folder, data, "log.every=1", "checkpoint.every=1", "checkpoint.keep_last=9", "steps=6",
                                 *settings)


def killed(run, step, folder):
    """Copies a run to another folder as it was when it was killed after `step`."""
    shutil.copytree(run, folder)
    for later in checkpoints.all_steps(folder):
        if int(later.name.removeprefix("step-")) > step:
            shutil.rmtree(later)
    return folder


# ---- what a step takes ----------------------------------------------------------------------------------------------


def test_a_schedule_gives_each_step_its_routes_and_says_when_they_change():
    other = Route(1, 1, 0.75)
    schedule = RouteSchedule((ROUTE,), dense_before=2, dense_after=7, changes=((4, (other,)), (6, ())))
    dense, other_dense = replace(ROUTE, selection_ratio=0.0), replace(other, selection_ratio=0.0)
    taken = [route for step in range(9) for route in schedule.at(step)]
    assert taken == [dense, dense, ROUTE, ROUTE, other, other, other_dense, other_dense, other_dense]
    assert str(schedule) == ("none; from step 2 on 2→2 at selection ratio 0.5; from step 4 on 1→1 at selection "
                             "ratio 0.75; from step 6 on none; from step 7 on none")
    assert (str(RouteSchedule(())), str(RouteSchedule((ROUTE,)))) == ("none", "2→2 at selection ratio 0.5")
    assert RouteSchedule((ROUTE,)).at(10**6) == (ROUTE,)
    sampling = RouteSchedule((ROUTE,), selection_ratios=(0.3, 0.7), changes=((4, ()),))
    assert {*ratios_of(sampling, 4)} == {0.3, 0.7} and ratios_of(sampling, 20)[4:] == 16 * [0]


def test_a_sampled_ratio_is_a_function_of_seed_and_step_equally_often_each_and_dense_phases_stay_dense():
    schedules = [RouteSchedule((ROUTE, Route(4, 4, 0.1)), dense_after=3000, selection_ratios=(0.3, 0.5, 0.7),
                               seed=seed) for seed in (0, 0, 1)]
    first, again, other = (ratios(schedule, 3100) for schedule in schedules)
    assert first == again != other and first[3000:] == 100 * [[0, 0]]
    counted = Counter(map(tuple, first[:3000]))
    assert counted.keys() == {(0.3, 0.3), (0.5, 0.5), (0.7, 0.7)}
    assert all(abs(count - 1000) < 120 for count in counted.values())
    assert "at random each step; from step 3000 on none" in str(schedules[0])
    state = torch.get_rng_state()
    schedules[0].at(5)
    assert torch.equal(torch.get_rng_state(), state)


def test_path_drop_continues_where_a_network_is_dense():
    sprint = Route(2, 3, 0.75, path_drop=0.1)
    assert RouteSchedule((sprint,), dense_after=1).at(1) == (Route(2, 3, 0.0, path_drop=0.1),)
    assert str(RouteSchedule((sprint,), dense_after=1)).endswith(
        "from step 1 on 2→3 at selection ratio 0.0, path drop 0.1 of the samples")


# ---- training on it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [
    (*RAMPS, *SPRINT), (TWO, *V1), (*RAMPS, "objective=[internal,alignment]", "objective.alignment.blocks=[2]"),
], ids=["sprint", "other routes by version 1", "internal, alignment"])
def test_a_run_that_is_killed_before_or_after_a_change_resumes_bit_for_bit(taught, tmp_path, settings):
    trained(tmp_path / "whole", taught, *settings)
    for step in (2, 5):
        assert "resuming" in trained(killed(tmp_path / "whole", step, tmp_path / f"killed-{step}"), taught, *settings)
        assert_same_end(tmp_path / f"killed-{step}", tmp_path / "whole")


def test_a_schedule_without_changes_is_the_plain_run_bit_for_bit_and_an_off_ramp_the_dense_command_after_it(
        taught, tmp_path):
    trained(tmp_path / "plain", taught)
    trained(tmp_path / "own ratio", taught, "route_schedule.selection_ratios=[0.5]")
    assert_same_end(tmp_path / "own ratio", tmp_path / "plain")
    by_hand = killed(tmp_path / "plain", 4, tmp_path / "by hand")
    trained(by_hand, taught, "model.routes=[]")
    printed = trained(tmp_path / "off-ramp", taught, "route_schedule.dense_after=0.7")
    assert_same_end(tmp_path / "off-ramp", by_hand)
    assert "routes 2→2 at selection ratio 0.5; from step 4 on none; " in printed
    assert printed.count("step 4/6  routes none") == 1
    with pytest.raises(AssertionError):
        assert_same_end(tmp_path / "off-ramp", tmp_path / "plain")


def test_what_was_trained_is_recorded_and_guidance_uses_the_initial_route(taught, tmp_path):
    trained(tmp_path / "run", taught, "route_schedule=off_ramp", "route_schedule.selection_ratios=[0.25,0.75]")
    meta = checkpoints.read_meta(checkpoints.latest(tmp_path / "run"))
    assert meta["route_schedule"] == {"dense_after": 5, "selection_ratios": [0.25, 0.75]}
    net = load_trained(tmp_path / "run").net
    assert net.routes == (ROUTE,) and Guidance(1.5, 0.25, 0.75).routes_at(net, 0.75, 0.0) == (Route(2, 2, 0.75),)
    schedule = build_schedule(net, meta["route_schedule"], meta["seed"])
    assert len({*ratios_of(schedule, 5)}) == 2 and ratios_of(schedule, 6)[5] == 0
    printed = trained(tmp_path / "run", taught, "route_schedule=off_ramp", "steps=12",
                      "route_schedule.selection_ratios=[0.25,0.75]")
    assert "route_schedule was {'dense_after': 5, " in printed and "and is now {'dense_after': 10, " in printed


def test_each_number_of_tokens_is_one_graph_and_nothing_is_compiled_again(graphs):
    net = small_net(depth=3, routes=[vars(Route(1, 1, 0.5))])
    speed.compile_blocks(net, True)
    schedule = RouteSchedule(net.routes, dense_after=45, selection_ratios=tuple(n / 10 for n in range(1, 10)))
    objective = build_objective(net, EDM(), schedule=schedule)
    for objective.step in range(50):
        objective(torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))
    assert graphs.frame_count == len({*ratios_of(schedule, 50)}) == 10  # more than torch's own limit


@pytest.mark.parametrize("parts", [[], ["version1"], ["internal", "alignment", "layer_sync"]])
def test_every_objective_takes_the_routes_of_its_step(parts):
    """All that a network is called with is the step's: none asks for those that the network was built with."""
    net = small_net(**({"head_block": 1} if "internal" in parts else {}))
    schedule = RouteSchedule(net.routes, changes=((1, (Route(1, 1, 0.25), Route(4, 4, 0.75))), (2, ())))
    objective = build_objective(net, EDM(), {name: {} for name in parts}, not parts, {"teacher": (16, 5)}, schedule)
    seen, forward = [], net.forward
    net.forward = lambda *args, **kwargs: (seen.append((args, kwargs)), forward(*args, **kwargs))[1]
    arrays = {"weight": torch.zeros(2, 1, 8, 8)} | ({"teacher": torch.randn(2, 16, 5)} if "alignment" in parts else {})
    for objective.step in range(3):
        objective(torch.randn(2, 3, 8, 8), torch.tensor([0, 1]), **arrays)
    assert [given(*call) for call in seen] == [schedule.at(step) for step in range(3)]


def test_an_error_of_a_later_route_is_raised_before_the_first_step():
    net = small_net()
    later = RouteSchedule(net.routes, changes=((9, (Route(1, 1, 0.75),)),))
    with pytest.raises(ValueError, match="projector=conv needs the complete grid .* block 1 lies on route 1→1"):
        build_objective(net, EDM(), {"alignment": {"blocks": [1], "projector": "conv"}}, False, {"teacher": (16, 5)},
                        later)
    two = RouteSchedule(net.routes, changes=((9, (Route(1, 1, 0.5), Route(3, 3, 0.5))),))
    with pytest.raises(ValueError, match="block 1 lies on route 1→1 .* and block 3 on 3→3"):
        build_objective(net, EDM(), {"layer_sync": {"block": 1, "deeper": 3}}, schedule=two)
    with pytest.raises(ValueError, match="block 1 lies on route 1→1 at selection ratio 0.75"):
        build_objective(net, EDM(), {"dispersive": {"block": 1}}, schedule=later)
    masked = SimpleNamespace(arrays={"weight": None}, most_kept=lambda patch_size: (5, "a.png"))
    check_kept(masked, net, RouteSchedule(net.routes))
    with pytest.raises(ValueError, match="keeps 5 of 16 tokens, but route 1→1 at selection ratio 0.75 keeps only 4"):
        check_kept(masked, net, later)


def given(args, kwargs):
    return kwargs.get("routes", args[3] if len(args) > 3 else ())


# ---- over ranks -----------------------------------------------------------------------------------------------------


def write_routes(home, rank):
    """Makes each step of a rank write its routes to a file."""
    step = train.train_step

    def noted(accelerator, called, objective, *args, **kwargs):
        with (home / f"{accelerator.num_processes}-{rank}").open("a") as file:
            file.write(f"{objective.step} {objective.routes}\n")
        return step(accelerator, called, objective, *args, **kwargs)

    train.train_step = noted


def test_two_ranks_take_the_routes_of_one_and_fsdp_trains_as_ddp(taught, tmp_path, monkeypatch):
    settings = (*RAMPS, "steps=6", "log.every=1", "checkpoint.every=6")
    all_well(on_ranks(2, command(tmp_path / "ddp", taught, *settings)[1:],
                      command(tmp_path / "fsdp", taught, *settings, "sharding=fsdp")[1:],
                      before=partial(write_routes, tmp_path)))
    monkeypatch.setattr(train, "train_step", train.train_step)
    write_routes(tmp_path, 0)
    trained(tmp_path / "one", taught, *settings)
    assert_same_losses(tmp_path / "fsdp", tmp_path / "ddp", 6)
    one = (tmp_path / "1-0").read_text()
    assert len({line.split(" ", 1)[1] for line in one.splitlines()}) >= 3
    assert (tmp_path / "2-0").read_text() == (tmp_path / "2-1").read_text() == 2 * one


# ---- what it takes --------------------------------------------------------------------------------------------------


def test_flops_of_a_study_are_those_of_the_steps_that_were_taken(tmp_path):
    network = {**NETWORK, "routes": [vars(ROUTE)]}
    changes, state = {"dense_after": 2, "selection_ratios": [0.25, 0.75]}, build_network(network).state_dict()
    meta = {"step": 4, "network": network, "route_schedule": changes, "seed": 3, "batch_size": 8,
            "config": {"steps": 4}, "diffusion": {}}
    checkpoints.save(checkpoints.step_folder(tmp_path, 4), {"ema": state, "model": state}, meta)
    source = {"in_training": True, "guidance": None, "seeds": "0", "precision": "fp32", "multiply_adds": {}}
    for step in (0, 1, 4):
        files.append_row(tmp_path / "results.jsonl", {
            "source": {**source, "step": step}, "metrics": {"fid": 1.0}, "extractor": {"name": "x"}, "images": 2,
            "device": "cpu", "versions": {}, "reference": {"path": "x"}})
    run = run_of("route_schedule.dense_after=2", seed=3, folder=tmp_path)
    net = build_network(network)
    cost = [8 * 6 * sum(multiply_adds(net, routes)) for routes in map(build_schedule(net, changes, 3).at, range(4))]
    assert [score["flops"] for score in study.from_disk(run)["scores"]] == [0, cost[0], sum(cost)]
    assert cost[2] == cost[3] == 8 * 6 * sum(multiply_adds(net)) > cost[0]


@pytest.mark.parametrize(("settings", "midway"), [
    ((), False), (("route_schedule=random_ratio",), False), (("route_schedule.selection_ratios=[0.3,0.5]",), False),
    (("route_schedule=off_ramp",), True), (("route_schedule.dense_after=0.7",), True),
    (("route_schedule.dense_before=9",), True),
])
def test_a_study_times_no_variant_whose_steps_differ(settings, midway):
    assert study.changes_route(run_of("model=tread", *settings)) == midway


def test_a_plan_counts_each_phase(monkeypatch, capsys):
    monkeypatch.setattr(plan, "encoder_flops", lambda: 0)
    monkeypatch.setattr(plan, "SIZES", ("S",))
    net, costs = plan.network("S", True), {}
    for name, options in (("dense", []), ("off-ramp", ["--dense-after", "0.75"]),
                          ("ratios", ["--selection-ratios", "0", "0.5"])):
        monkeypatch.setattr(sys, "argv", ["plan.py", *options])
        plan.main()
        [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| S/2 TREAD")]
        costs[name] = float(row.split("|")[3])
    tread, dense = (6 * sum(multiply_adds(net, routes)) / 1e9 for routes in (net.routes, ()))
    assert list(costs.values()) == pytest.approx([tread, 0.75 * tread + 0.25 * dense, (tread + dense) / 2], abs=0.6)
