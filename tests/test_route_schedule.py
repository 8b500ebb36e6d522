"""Routes that change with the step: a function of (seed, step), and everything that trains asks for its step's."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import training_runs
from training_runs import assert_same_end, killed

from dit import multiply_adds
from edm import EDM
from guidance import Guidance
from objectives import build_objective
from routing_module import Route, RouteSchedule
from scripts import compare
from weights import checkpoints
from weights.loading import load_trained
from weights.records import build_network, build_schedule

ROUTE = Route(2, 2, 0.5)  # of model=tread at a depth of 6
NETWORK = dict(input_size=8, in_channels=3, hidden_size=32, depth=6, num_heads=2, num_classes=5, routes=[vars(ROUTE)])


def ratios(schedule, steps):
    return [[route.selection_ratio for route in schedule.at(step)] for step in range(steps)]


def ratios_of(schedule, steps):
    """The ratio of each step's only route."""
    return [ratio for ratio, in ratios(schedule, steps)]


def trained(folder, data, *settings):
    return training_runs.trained(folder, data, "log.every=1", "checkpoint.every=1", "checkpoint.keep_last=9", "steps=6",
                                 *settings)


# ---- what a step takes ----------------------------------------------------------------------------------------------


def test_a_schedule_gives_each_step_its_routes():
    other = Route(1, 1, 0.75)
    schedule = RouteSchedule((ROUTE,), dense_before=2, dense_after=7, changes=((4, (other,)), (6, ())))
    dense, other_dense = replace(ROUTE, selection_ratio=0.0), replace(other, selection_ratio=0.0)
    taken = [route for step in range(9) for route in schedule.at(step)]
    assert taken == [dense, dense, ROUTE, ROUTE, other, other, other_dense, other_dense, other_dense]
    assert RouteSchedule((ROUTE,)).at(10**6) == (ROUTE,)
    sampling = RouteSchedule((ROUTE,), selection_ratios=(0.3, 0.7), changes=((4, ()),))
    assert {*ratios_of(sampling, 4)} == {0.3, 0.7} and ratios_of(sampling, 20)[4:] == 16 * [0]
    sprint = RouteSchedule((Route(2, 3, 0.75, path_drop=0.1),), dense_after=1)
    assert sprint.at(1) == (Route(2, 3, 0.0, path_drop=0.1),)   # path drop continues where the network is dense


def test_each_ratio_is_sampled_equally_often_for_all_routes_of_a_step_by_seed_and_step_alone():
    schedules = [RouteSchedule((ROUTE, Route(4, 4, 0.1)), selection_ratios=(0.3, 0.5, 0.7), seed=seed)
                 for seed in (0, 1)]
    state = torch.get_rng_state()
    first, other = (ratios(schedule, 3000) for schedule in schedules)
    backwards = [schedules[0].at(step) for step in reversed(range(3000))]
    assert first == [[route.selection_ratio for route in routes] for routes in reversed(backwards)]
    assert torch.equal(torch.get_rng_state(), state), "it takes random numbers from training"
    counted = Counter(map(tuple, first))
    assert first != other and counted.keys() == {(0.3, 0.3), (0.5, 0.5), (0.7, 0.7)}
    assert all(abs(count - 1000) < 120 for count in counted.values())


# ---- training on it -------------------------------------------------------------------------------------------------


def test_an_off_ramp_is_the_dense_command_after_it(taught, tmp_path):
    trained(tmp_path / "plain", taught)
    by_hand = killed(tmp_path / "plain", 4, tmp_path / "by hand")
    trained(by_hand, taught, "model.routes=[]")
    printed = trained(tmp_path / "off-ramp", taught, "route_schedule.dense_after=0.7")
    assert_same_end(tmp_path / "off-ramp", by_hand)
    assert "routes 2→2 at selection ratio 0.5; from step 4 on none; " in printed
    assert printed.count("step 4/6  routes none") == 1


def test_what_was_trained_is_recorded_and_guidance_uses_the_initial_route(taught, pixel_reference, tmp_path):
    trained(tmp_path / "run", taught, "route_schedule.dense_after=0.85", "route_schedule.selection_ratios=[0.25,0.75]",
            "evaluate.every=3", f"evaluate.reference={pixel_reference}", "evaluate.num_samples=2",
            "evaluate.num_steps=1")
    meta = checkpoints.read_meta(checkpoints.latest(tmp_path / "run"))
    assert meta["route_schedule"] == {"dense_after": 5, "selection_ratios": [0.25, 0.75]}
    net = load_trained(tmp_path / "run").net
    assert net.routes == (ROUTE,) and Guidance(1.5, 0.25, 0.75).routes_at(net, 0.75, 0.0) == (Route(2, 2, 0.75),)
    schedule = build_schedule(net, meta["route_schedule"], meta["seed"])
    assert len({*ratios_of(schedule, 5)}) == 2 and ratios_of(schedule, 6)[5] == 0
    flops = [8 * 6 * sum(multiply_adds(net, schedule.at(step))) for step in range(6)]
    scored = [score["flops"] for score in compare.read_run("x", tmp_path / "run")["scores"]]
    assert scored == [0, sum(flops[:3]), sum(flops)]
    printed = trained(tmp_path / "run", taught, "route_schedule.dense_after=0.85", "steps=12",
                      "route_schedule.selection_ratios=[0.25,0.75]")
    assert 'route_schedule was {"dense_after": 5, ' in printed and 'and is now {"dense_after": 10, ' in printed


@pytest.mark.parametrize("name", [None, "version1", "alignment"])
def test_every_objective_takes_the_routes_of_its_step(name):
    """All that a network is called with is the step's: none asks for those that the network was built with."""
    net = build_network(NETWORK)
    schedule = RouteSchedule(net.routes, changes=((1, (Route(1, 1, 0.25), Route(4, 4, 0.75))), (2, ())))
    objective = build_objective(net, EDM(), {"name": name}, {"teacher": (16, 5)}, schedule)
    seen, forward = [], net.forward
    net.forward = lambda *args, **kwargs: (seen.append((args, kwargs)), forward(*args, **kwargs))[1]
    arrays = {array: torch.randn(2, 16, 5) for array in objective.arrays}
    for objective.step in range(3):
        objective(torch.randn(2, 3, 8, 8), torch.tensor([0, 1]), **arrays)
    routes = [kwargs.get("routes", args[3] if len(args) > 3 else ()) for args, kwargs in seen]
    assert routes == [schedule.at(step) for step in range(3)]
