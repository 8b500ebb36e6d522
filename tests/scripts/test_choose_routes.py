"""The choice of a route: what is counted is what a network counts, and the order is that of the paper's ablations."""

import subprocess
from types import SimpleNamespace

import pytest
import torch
from conftest import run_command
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dit import DiT_models, multiply_adds
from routing_module import Route, resolve_routes
from runtime import schema
from scripts import benchmark, choose_routes, clocks
from weights.records import build_network

TINY = ["model.hidden_size=32", "model.depth=12", "model.num_heads=2", "tokens=[16]"]


def load(*overrides):
    with initialize_config_dir(str(schema.CONFIGS), version_base="1.3"):
        return schema.read(choose_routes.ChoiceSettings,
                           OmegaConf.to_container(compose("choose_routes", overrides=list(overrides)), resolve=True))


def printed(capsys, *overrides):
    run_command(choose_routes.main, "choose_routes.py", *overrides)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", DiT_models)
def test_the_flop_ratio_of_counted_blocks_is_that_of_the_full_network(name):
    cfg = load(f"model.backbone_type={name}", "model.depth=7", "model.hidden_size=64", "model.num_heads=2")
    network = choose_routes.network_of(cfg.model, 49)  # 0.3 of them is not a whole number
    with torch.device("meta"):
        net = build_network(network)
    for routes in ([Route(2, -4, 0.5)], [Route(0, 1, 0.3), Route(3, -1, 0.7)]):
        routes = resolve_routes(routes, 7)
        counted = sum(multiply_adds(net)) / sum(multiply_adds(net, routes))
        assert choose_routes.flop_ratio(net, routes) == pytest.approx(counted, rel=1e-12)


@pytest.mark.parametrize("depth", [12, 24, 28])
def test_the_papers_route_comes_first_and_all_are_long_and_near_it(depth):
    found = choose_routes.candidates(depth)
    assert found[0] == Route(2, depth - 4, 0.5) and choose_routes.fid_lost(found[0], depth) == 0
    lost = [choose_routes.fid_lost(route, depth) for route in found]
    assert lost == sorted(lost) and len(set(found)) == len(found) >= 40
    for route in found:
        assert route.selection_ratio <= 0.5
        assert abs(route.start_layer_idx - 2) <= 1 and abs(route.end_layer_idx - depth + 4) <= 1
        assert 2 * (route.end_layer_idx - route.start_layer_idx + 1) >= depth


def test_the_fid_that_a_route_loses_is_that_of_the_ablations():
    for route, lost in ((Route(1, 8, 0.5), 28.21 - 28.02), (Route(2, 8, 0.25), 26.50 - 21.34),
                        (Route(2, 8, 0.375), (26.50 - 21.34) / 2), (Route(2, 9, 0.5), (57.36 - 33.58) / 2),
                        (Route(0, 10, 0.75), (33.58 - 28.02) + (57.36 - 33.58) + (49.29 - 21.34))):
        assert choose_routes.fid_lost(route, 12) == pytest.approx(lost)


def test_the_routes_that_reach_a_speed_up_are_listed_with_the_reasons(capsys):
    lines = printed(capsys, "model.backbone_type=DiT-XL/2", "speedup=1.6", "tokens=[256]", "count=3").splitlines()
    assert [line.split(" | ")[1:] for line in lines if line.startswith(("| 1", "| 2", "| 3"))] == [
        ["2→24 at selection ratio 0.5", "1.72", "0.0 |"], ["1→24 at selection ratio 0.5", "1.77", "0.2 |"],
        ["2→24 at selection ratio 0.45", "1.60", "1.0 |"]]
    text = "\n".join(lines)
    assert not any(line.startswith("| 4") for line in lines) and max(map(len, lines)) <= 120
    for number in ("21.34", "49.29", "57.36", "28.02", "7.38", "18.81", "B/2 at 400K"):
        assert number in text
    assert lines[-1].endswith("'model.routes=[{selection_ratio: 0.5, start_layer_idx: 2, end_layer_idx: -4}]'")


def test_where_no_route_reaches_the_speed_up_the_largest_is_listed(capsys):
    text = printed(capsys, "speedup=1.8", "tokens=[256]")
    assert "has a FLOP ratio of 1.8 at 256 tokens" in text and "The largest is 1.62" in text
    assert "| 1→9 at selection ratio 0.5 | 1.62 |" in text


def test_without_a_speed_up_the_presets_are_listed(capsys):
    text = printed(capsys, "tokens=[256]", "model.backbone_type=DiT-B/2")
    for name, ratio in {"lora": "1.26", "paper": "1.43", "balanced": "1.62", "high_resolution": "1.68",
                        "masked": "2.13", "max_speed": "2.85"}.items():
        assert any(line.startswith(f"| {name} |") and line.endswith(f"| {ratio} |") for line in text.splitlines())


def test_a_measured_ratio_is_the_benchmarks(capsys, monkeypatch):
    asked, ratios = [], []

    def run(call, **options):  # the command, without the seconds that a process takes to begin
        assert call[1].endswith("scripts/benchmark.py")
        with initialize_config_dir(str(schema.CONFIGS), version_base="1.3"):
            plain = OmegaConf.to_container(compose("benchmark", overrides=call[2:]), resolve=True)
        asked.append(schema.read(benchmark.BenchmarkSettings, plain))
        ratios.append(benchmark.run(asked[-1])["ratios"]["tread over dit"])
        return subprocess.CompletedProcess(call, 0)

    monkeypatch.setattr(benchmark, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setitem(clocks.SQUARES, "cpu", (32,))
    monkeypatch.setattr(benchmark, "plot", lambda record, path: None)
    text = printed(capsys, *TINY, "model.depth=7", "speedup=1.1", "count=1", "measure=true", "benchmark.batch_size=2",
                   "benchmark.steps=1", "benchmark.rounds=1", "+benchmark.num_latents=2", "+benchmark.num_classes=3",
                   "+benchmark.device=cpu")
    [row] = [line for line in text.splitlines() if line.startswith("| 1 |")]
    assert "measured at 16" in text and [row.split()[-2]] == [f"{ratio:.2f}" for ratio in ratios]
    [cfg], [route, *_] = asked, choose_routes.candidates(7)
    assert (cfg.mode, cfg.tokens, cfg.hidden_size, cfg.depth, cfg.batch_size) == ("train", 16, 32, 7, 2)
    assert (cfg.backbone_type, cfg.init) == ("DiT-B/2", "xavier")
    assert cfg.routes[0].start_layer_idx == route.start_layer_idx and cfg.routes[0].end_layer_idx == route.end_layer_idx
