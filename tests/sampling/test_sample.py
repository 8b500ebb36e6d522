"""An image is a function of its seed, its label and the weights; what is refused, written and laid out as a grid."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import forked
import numpy as np
import pytest
import torch
from conftest import ROOT, one_rank, run_command
from PIL import Image
from test_rf import noise_and_labels, small_dit
from training_runs import write_run

from edm import DDPM, EDM
from guidance import Guidance
from rf import RF
from sample import main
from sampling.generate import compile_to_sample, gathered, generate
from sampling.options import labels_of, parse_classes, parse_range
from sampling.pictures import draw_grid
from sampling.sampler import Sampler
from weights import checkpoints
from weights.loading import load_trained
from weights.records import build_network

NETWORK = dict(input_size=8, patch_size=2, in_channels=3, hidden_size=32, depth=3, num_heads=2, num_classes=4,
               routes=[dict(selection_ratio=0.5, start_layer_idx=1, end_layer_idx=1)], init="xavier")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    for step in (1, 2):
        write_run(folder, NETWORK, step, {"name": "edm", "sigma_data": 0.6}, class_names=["ant", "bee", "cat", "dog"])
    return folder


def sample(run, out, *options, num_steps=1) -> None:
    run_command(main, "sample.py", "cpu=true", f"num_steps={num_steps}", f"checkpoint={run}",
                *([f"out={out}"] if out else []), *options)


def draw(trained, seeds, labels, batch_size, guidance=None, precision="fp32", **settings):
    sampler = Sampler(trained.diffusion, 4, guidance, settings)
    batches = generate(one_rank(), trained.net, sampler, lambda x: x, seeds, labels, batch_size=batch_size,
                       precision=precision)
    return torch.cat([*gathered(one_rank(), batches)])


@pytest.mark.parametrize("options", [{}, {"S_churn": 10}, {"guidance": Guidance(1.5, 0.3, 0.7)}])
def test_an_image_depends_neither_on_its_batch_nor_on_torchs_generator(run, options):
    trained, seeds, state = load_trained(run), list(range(10, 17)), torch.get_rng_state()
    labels = labels_of(seeds, [0, 1, 2])
    images = draw(trained, seeds, labels, 7, **options)
    assert torch.allclose(images, draw(trained, seeds, labels, 3, **options), atol=1e-4)
    assert torch.allclose(images[2:4], draw(trained, seeds[2:4], labels[2:4], 1, **options), atol=1e-4)
    assert (images[0] - images[3]).abs().max() > 0.1  # the same class, another seed
    bf16 = draw(trained, seeds, labels, 7, precision="bf16", **options)
    assert 1e-4 < (images - bf16).abs().mean() / images.std() < 0.02
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("diffusion", "guidance", "count"), [
    (RF(), dict(scale=2), 1),                                               # both passes are one batch
    (EDM(), dict(scale=2, interval=(0.4, 100)), 2),                         # of two sizes
    (RF(), dict(scale=2, gamma1=0.25, gamma2=0.75, drop_label=False), 3),   # 16, 12 and 4 tokens, as sample_tread's
    (EDM(), dict(scale=2, net2=dict(hidden_size=16), gamma2=0.5), 3),       # of two networks
])
def test_each_shape_is_one_graph_whose_images_are_those_of_the_plain_network(diffusion, guidance, count, graphs):
    net, weak = (build_network(NETWORK | changes) for changes in ({}, guidance.get("net2", {})))
    guidance = Guidance(**guidance | ({"net2": weak} if "net2" in guidance else {}))
    trained, options = SimpleNamespace(net=net, diffusion=diffusion), dict(guidance=guidance)
    seeds = list(range(5))  # three batches, the last one padded
    plain = draw(trained, seeds, [0, 1, 2, 3, 0], 2, **options)
    assert compile_to_sample(net, guidance, True, 5, torch.device("cpu"))
    assert torch.allclose(draw(trained, seeds, [0, 1, 2, 3, 0], 2, **options), plain, atol=1e-5)
    assert graphs.frame_count == count


def test_default_grids_of_other_settings_or_weights_lie_side_by_side(run, tmp_path, monkeypatch):
    run, names = shutil.copytree(run, tmp_path / "run"), set()
    for option, is_new in (("scale=1.5", True), ("classes=[ant,cat]", True), ("scale=1.5", False),
                           ("sampler.rho=5", True), ("weights=model", True)):
        sample(run, None, "seeds=0-3", option)
        before, names = names, {path.name for path in (run / "samples").iterdir()}
        assert before < names if is_new else before == names
    folder, other = (shutil.copytree(checkpoints.step_folder(run, step), tmp_path / place / "published")
                     for step, place in ((2, ""), (1, "other")))
    before = {*folder.iterdir()}
    monkeypatch.chdir(tmp_path)
    sample(folder, None, "seeds=0-3")
    [grid] = tmp_path.glob("published-ema-*.png")
    assert {*folder.iterdir()} == before and json.loads(Image.open(grid).info["sampling"])["seeds"] == "0-3"
    sample(other, None, "seeds=0-3")
    assert len([*tmp_path.glob("published-ema-*.png")]) == 2, "other weights in a folder of the same name"


def test_seeds_and_classes_are_read_as_people_write_them():
    assert parse_range("seeds", "0-3,7") == parse_range("seeds", [0, "1-3", 7]) == [0, 1, 2, 3, 7]
    assert parse_range("seeds", 5) == [5] and parse_range("seeds", ["0-2", "1-3"]) == [0, 1, 2, 3], "each seed once"
    assert labels_of([0, 1, 2, 100_001], [4, 9]) == [4, 9, 4, 9]
    assert {*Counter(labels_of(range(100_007, 150_007), [*range(1000)])).values()} == {50}, "classes are balanced"


NAMES, FLOWERS, MIXED = ["ant", "bee", "tench, Tinca tinca"], ["1", "10", "11", "2", "03"], ["1", "10", "2", "other"]


@pytest.mark.parametrize(("names", "text", "labels"), [
    (NAMES, None, [2]), (NAMES, ["bee", 0], [1, 0]), (NAMES, "bee, 0", [1, 0]), (NAMES, "tench, Tinca tinca", [2]),
    (NAMES, "0-2", [0, 1, 2]), (None, "0-2", [0, 1, 2]), (NAMES, 3, None), (NAMES, "fish", None), (NAMES, "1-3", None),
    # Numbers that are names select names, one by one or as a range, however they are padded.
    (FLOWERS, ["1", "2", "3"], [0, 3, 4]), (FLOWERS, "1,2-3", [0, 3, 4]), (FLOWERS, 0, None), (FLOWERS, "0-1", None),
    (MIXED, "10", [1]), (MIXED, ["other", 2], [3, 2]), (MIXED, "1-3", None), (["b", "a", "c", "c"], "c", None),
])
def test_classes_are_names_or_indices_and_none_is_guessed(names, text, labels):
    if labels is None:
        with pytest.raises(ValueError, match=f"asks for class .*or names, {names[0]}, {names[1]}"):
            parse_classes("classes", text, len(names), names, [2])
    else:
        assert parse_classes("classes", text, len(names or "abc"), names, [2]) == labels


@pytest.mark.parametrize(("options", "reason"), [
    ("sampler.sigma_min=100", "sigma_min=100.0 is not below sampler.sigma_max=80"),
    ("sampler.S_churn=4 sampler.S_max=0", "S_min=0 is not below sampler.S_max=0"),
    ("sampler.rho=-7", "or equal to 0.1"), ("sampler.S_noise=1.003", "also set sampler.S_churn=40"),
    # Of 16 tokens, no pass routes any, and both route 8.
    ("scale=2 drop_label=false gamma2=0.05", "guides nothing"),
    ("scale=2 drop_label=false gamma1=0.5 gamma2=0.55", "guides nothing"),
])
def test_settings_that_would_change_nothing_or_leave_only_noise_are_refused(run, tmp_path, options, reason):
    with pytest.raises(SystemExit, match=reason):
        sample(run, tmp_path / "x.png", "seeds=0", *options.split(), num_steps=3)


def test_guided_grid_folder_and_npz_from_one_process_and_from_two_are_the_same(run, tmp_path):
    def options(name):
        return [f"checkpoint={run}", "seeds=0-9", "num_steps=3", "batch_size=2", "guidance=cfg_tread", "gamma1=0.3",
                f"out={tmp_path / name}", "cpu=true"]

    two_ranks = [forked.start("sample.py", *options(name), ranks=2) for name in ("two.npz", "two")]
    assert [life.wait().code for life in two_ranks] == [0, 0]
    for name in ("one.npz", "one", "grid.png"):
        run_command(main, "sample.py", *options(name))
    one, two = (np.load(tmp_path / f"{name}.npz") for name in ("one", "two"))
    assert one["arr_0"].shape == (10, 8, 8, 3) and one["arr_0"].dtype == np.uint8
    assert one["seeds"].tolist() == list(range(10)) and one["arr_1"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert all(np.array_equal(one[key], two[key]) for key in ("arr_0", "arr_1", "seeds"))
    pngs = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert pngs[0] == pngs[1] and len(pngs[0]) == 10
    assert np.array_equal(np.asarray(Image.open(tmp_path / "two/000005_1.png")), one["arr_0"][5])
    assert Image.open(tmp_path / "grid.png").height == 4 * (8 * 8 + 2)  # enlarged eightfold, a row a class
    assert not list(tmp_path.rglob(".*.tmp"))


def test_a_command_prints_only_its_own_lines_and_imports_nothing_heavy(run, tmp_path):
    heavy = {"timm", "torchvision", "torchao", "wandb", "tensorboard", "diffusers", "transformers", "tensorflow",
             "torch_fidelity", "matplotlib", "datasets", "pyarrow", "torch._dynamo", "torch._inductor"}
    code = (f"import sys, train, fid, sample; print({heavy} & {{*sys.modules}}); sample.main(); "
            f"print({heavy} & {{*sys.modules}})")
    command = [sys.executable, "-c", code, f"checkpoint={run}", "seeds=0-3", "num_steps=2", f"out={tmp_path}/x.png"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.stderr == "", "no warning of a library, and no bar that fills a log"
    assert result.stdout == f"set()\n4 images from {run}/checkpoints/step-00000002: {tmp_path}/x.png\nset()\n"


# ---- what is written


@pytest.mark.parametrize("name", ["set", "x.png", "x.npz"])
def test_an_output_of_the_same_settings_is_replaced_as_a_whole_and_nothing_else(run, tmp_path, name):
    def content():
        return {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    def is_refused(seeds):
        before = content()
        with pytest.raises(SystemExit, match=f"out={out} exists and was not made by this command with these settings"):
            sample(run, out, seeds)
        return content() == before

    out = tmp_path / name
    for _ in range(2):
        sample(run, out, "seeds=7-8")
    assert is_refused("seeds=0-3"), "hours of sampling with other settings are kept"
    if name == "set":
        (tmp_path / "link").symlink_to("set")   # to a larger disk
        sample(run, tmp_path / "link", "seeds=7-8")
        assert (tmp_path / "link").is_symlink()
        assert {file.name for file in out.iterdir()} == {"000007_3.png", "000008_0.png"}
        (out / "notes.txt").write_text("mine")
    else:
        Image.new("RGB", (8, 8)).save(out) if name == "x.png" else np.savez(out, arr_0=np.zeros(3))
    assert is_refused("seeds=7-8")


# ---- the grid


@pytest.mark.parametrize(("classes", "each", "columns", "rows"),
                         [(1, 80, 10, 8), (3, 27, 9, 9), (2, 11, 6, 4), (12, 2, 2, 12), (80, 1, 8, 10)])
def test_a_grid_has_at_most_ten_columns_and_a_class_begins_a_row(classes, each, columns, rows):
    labels = [i % classes for i in range(classes * each)]
    images = torch.tensor(labels, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 8, 8, 3)  # as grey as their class
    grid = draw_grid(images.contiguous(), labels, ["x"] * classes)
    cells = np.asarray(grid.convert("L"))[33::66, -20::-66][:, columns - 1::-1]  # in the middle of each cell
    assert len(cells) == rows and cells[cells < 255].tolist() == sorted(labels)
    assert each == 1 or all(len({*row[row < 255].tolist()}) == 1 for row in cells)


# ---- public reports: the source and the situation


def test_the_interval_of_a_ddpm_is_in_sigma():
    """kynkaat/guidance-interval#1: which of DiT's 250 steps lie between sigma 0.34 and 1.02?"""
    guided = []

    class Noted(Guidance):
        def combine(self, strong, weak, t):
            guided.append(t)
            return strong

    net, (noise, y) = small_dit(learn_sigma=True), noise_and_labels()
    DDPM().sample(net, noise, y, num_steps=250, solver="ancestral", guidance=Noted(2.5, interval=(0.34, 1.02)))
    abar = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))  # DiT's own schedule
    sigma = np.sqrt((1 - abar) / abar)[np.linspace(999, 0, 250).round().astype(int)]
    assert guided == pytest.approx(sigma[(sigma >= 0.34) & (sigma <= 1.02)]) and 0 < len(guided) < 125


@pytest.mark.parametrize(("data", "drop_label", "message"), [
    ({"class_names": ["cat", "7", "ant"]}, False, "ant is class 2 there and 0 here"),
    ({"class_names": ["ant", "7", "cat", "ant"]}, False, None),     # some lists of ImageNet's classes have two cranes
    ({"class_names": ["cat", "7", "ant"]}, True, None),     # its weak pass has no label
    ({"class_names": ["x", "y", "z"]}, False, None),
    ({"class_names": ["ant", "7", "cat"], "convention": {"scale": 0.5, "shift": 0.0}}, False,
     "its latents have another scale"),
])
def test_a_weak_network_of_other_classes_or_latents_is_refused_where_it_has_a_label(
        data, drop_label, message, tmp_path):
    """As in facebookresearch/deit#130, label 0 is another class to a network that was trained on another order."""
    network = NETWORK | {"num_classes": 4}
    weak = write_run(tmp_path / "weak", network, 2, **data)
    strong = write_run(tmp_path / "strong", network, class_names=["ant", "7", "cat", "ant"],
                       convention={"scale": 1.0, "shift": 0.0})
    with pytest.raises(SystemExit, match=message) if message else nullcontext():
        sample(strong, tmp_path / "x.npz", "seeds=0", f"weak={weak}", "scale=1.5", "gamma1=0", "gamma2=0",
              f"drop_label={str(drop_label).lower()}")


@pytest.mark.parametrize("count", [18, 5])     # more and fewer than fill both ranks
def test_images_are_the_same_bit_for_bit_on_one_rank_and_on_two(run, count):
    trained, images = load_trained(run), {}
    for world in (1, 2):
        for rank in range(world):
            state = SimpleNamespace(num_processes=world, process_index=rank, is_main_process=rank == 0)
            for places, batch in generate(state, trained.net, Sampler(trained.diffusion, 2), lambda x: x,
                                          [*range(count)], [0] * count, batch_size=8):
                images |= {(world, place): image for place, image in zip(places.tolist(), batch, strict=True)}
    assert all(torch.equal(images[1, seed], images[2, seed]) for seed in range(count))
