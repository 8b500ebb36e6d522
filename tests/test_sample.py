"""An image is a function of its seed, its label and the weights; checkpoints of every kind load."""

import argparse
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from safetensors.torch import save_file

import checkpoint as checkpoints
from dit import DiT, DiT_models
from edm import DDPM, EDM
from sample import generate, labels_of, load_trained, parse_classes, parse_range, read_weights

NETWORK = dict(input_size=8, patch_size=2, in_channels=3, hidden_size=32, depth=3, num_heads=2, num_classes=4,
               routes=[dict(selection_ratio=0.5, start_layer_idx=1, end_layer_idx=1)], init="xavier")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with two checkpoints of an untrained network."""
    from sample import build_network

    folder = tmp_path_factory.mktemp("runs") / "tiny"
    for step in (1, 2):
        torch.manual_seed(step)
        state = build_network(NETWORK).state_dict()
        meta = {"step": step, "network": NETWORK, "diffusion": {"name": "edm", "sigma_data": 0.6},
                "data": {"autoencoder": "identity", "class_names": ["ant", "bee", "cat", "dog"]}}
        checkpoints.save(checkpoints.step_folder(folder, step), {"ema": state, "model": state}, meta)
    return folder


def draw(trained, seeds, labels, batch_size, **options):
    batches = generate(trained.net, trained.diffusion, lambda x: x, seeds, labels, batch_size=batch_size, num_steps=4, **options)
    drawn = [(seed, image) for s, _, images in batches for seed, image in zip(s.tolist(), images, strict=True) if seed >= 0]
    assert [seed for seed, _ in drawn] == seeds
    return torch.stack([image for _, image in drawn])


@pytest.mark.parametrize("options", [{}, {"S_churn": 10}])
def test_an_image_does_not_depend_on_its_batch(run, options):
    trained, seeds = load_trained(run), list(range(10, 17))
    labels = labels_of(seeds, [0, 1, 2])
    whole = draw(trained, seeds, labels, 7, **options)
    assert torch.allclose(whole, draw(trained, seeds, labels, 3, **options), atol=1e-4)
    assert torch.allclose(whole[2:4], draw(trained, seeds[2:4], labels[2:4], 1, **options), atol=1e-4)
    assert (whole[0] - whole[3]).abs().max() > 0.1      # the same class, another seed


def test_sampling_leaves_the_random_state_alone(run):
    trained, before = load_trained(run), torch.get_rng_state()
    draw(trained, [1, 2], [0, 0], 2, S_churn=10)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_a_checkpoint_folder_and_a_weights_file_in_it_load_the_same(run):
    newest = run / "checkpoints" / "step-00000002"
    loaded = [load_trained(path) for path in (run, newest, newest / "ema.safetensors")]
    for trained in loaded:
        assert trained.step == 2 and trained.diffusion.sigma_data == 0.6 and trained.autoencoder == "identity"
        assert all(torch.equal(a, b) for a, b in zip(loaded[0].net.parameters(), trained.net.parameters(), strict=True))
    assert load_trained(newest.with_name("step-00000001")).step == 1


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(run, tmp_path):
    import shutil

    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "checkpoints/step-00000002/ema.safetensors").write_bytes(b"broken")
    with pytest.warns(UserWarning, match="step-00000002 is damaged"):
        assert load_trained(copy).step == 1
    with pytest.raises(ValueError, match="is damaged"):
        load_trained(copy / "checkpoints/step-00000002")


def published(learn_sigma):
    torch.manual_seed(0)
    return DiT_models["DiT-S/8"](learn_sigma=learn_sigma, init="xavier").state_dict()


@pytest.mark.parametrize(("layout", "learn_sigma"), [
    ("facebookresearch/DiT's download", True), ("DiT's train.py", True), ("CompVis/tread", False), ("CompVis/tread, January 2025", False),
])
def test_official_weights_load_from_pt_files(tmp_path, layout, learn_sigma):
    state, other = published(learn_sigma), {key: torch.zeros_like(value) for key, value in published(learn_sigma).items()}
    content = {
        "facebookresearch/DiT's download": state,
        "DiT's train.py": {"model": other, "ema": state, "opt": {"state": {}}, "args": argparse.Namespace(lr=1e-4)},
        "CompVis/tread": {"model": {f"module.{k}": v for k, v in other.items()}, "ema": {f"_orig_mod.{k}": v for k, v in state.items()}},
        "CompVis/tread, January 2025": {"model_state_dict": {f"model.{k}": v for k, v in other.items()},
                                        "ema_state_dict": {f"model.{k}": v for k, v in state.items()}, "step": 7},
    }[layout]
    torch.save(content, tmp_path / "weights.pt")
    trained = load_trained(tmp_path / "weights.pt")
    assert type(trained.diffusion) is (DDPM if learn_sigma else EDM) and trained.autoencoder == "sd_vae_ema"
    assert all(torch.equal(trained.net.state_dict()[key], value) for key, value in state.items())
    assert draw(trained, [3], [999], 1).shape == (1, 4, 32, 32)


def test_a_file_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="weights alone"):
        read_weights(tmp_path / "evil.pt")
    assert not (tmp_path / "owned").exists()


def test_seeds_and_classes_are_read_as_people_write_them():
    assert parse_range("seeds", "0-3,7") == parse_range("seeds", [0, "1-3", 7]) == [0, 1, 2, 3, 7]
    assert parse_range("seeds", 5) == [5]
    names = ["ant", "bee", "cat"]
    assert parse_classes("classes", None, 3, names) == [0, 1, 2]
    assert parse_classes("classes", "bee", 3, names) == parse_classes("classes", 1, 3, names) == [1]
    assert parse_classes("classes", ["cat", 0], 3, names) == parse_classes("classes", "cat, 0", 3, names) == [2, 0]
    assert parse_classes("classes", "0-2", 3, None) == [0, 1, 2]
    assert parse_classes("classes", "tench, Tinca tinca", 2, ["ant", "tench, Tinca tinca"]) == [1]
    assert labels_of([0, 1, 2, 100_001], [4, 9]) == [4, 9, 4, 9]


@pytest.mark.parametrize("given", ["a", "3-1", "1..4", "-5", [], 2**63])
def test_a_range_that_makes_no_sense_is_a_sentence(given):
    with pytest.raises(ValueError, match="seeds=0-63"):
        parse_range("seeds", given)


def test_a_class_there_is_not_is_a_sentence():
    with pytest.raises(ValueError, match="class 4; there are 4"):
        parse_classes("classes", "0-4", 4, None)
    with pytest.raises(ValueError, match="samples.classes=fish asks for 'fish'.*the names are ant, bee"):
        parse_classes("samples.classes", "fish", 2, ["ant", "bee"])
    with pytest.raises(ValueError, match="asks for none"):
        parse_classes("classes", [], 4, None)


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {"model": {"weight": 1.0}}])
def test_a_pt_file_without_a_state_dict_is_a_sentence(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="holds no state dict"):
        load_trained(tmp_path / "other.pt")


def test_files_of_the_old_format_load_and_truncated_ones_are_a_sentence(tmp_path):
    state = published(learn_sigma=True)
    torch.save(state, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(load_trained(tmp_path / "legacy.pt").net.state_dict()["pos_embed"], state["pos_embed"])
    save_file(state, tmp_path / "whole.safetensors")
    (tmp_path / "half.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:1000])
    with pytest.raises(ValueError, match="no whole safetensors file"):
        load_trained(tmp_path / "half.safetensors")


def test_the_recorded_diffusion_keeps_its_settings_when_named_again(run):
    assert load_trained(run, diffusion="edm").diffusion.sigma_data == 0.6
    assert type(load_trained(run, diffusion="ddpm").diffusion) is DDPM


def test_a_weights_file_of_another_network_is_a_sentence(tmp_path):
    save_file({"conv.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="not a DiT's"):
        load_trained(tmp_path / "other.safetensors")
    state = DiT(input_size=8, hidden_size=384, depth=12, num_heads=6).state_dict()
    del state["final_layer.linear.bias"]
    save_file(state, tmp_path / "partial.safetensors")
    with pytest.raises(ValueError, match="1 are missing or of another shape"):
        load_trained(tmp_path / "partial.safetensors")


def sample(*overrides, launcher=(sys.executable,)):
    return subprocess.run([*launcher, "sample.py", *overrides], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_guided_grid_folder_and_npz_from_one_process_and_from_two_are_the_same(run, tmp_path):
    def options(name):
        return [f"checkpoint={run}", "seeds=0-9", "num_steps=3", "batch_size=2", "guidance=cfg_tread", "gamma1=0.3", f"out={tmp_path / name}"]

    two = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29531")
    results = [sample(*options("one.npz")), sample(*options("two.npz"), launcher=two), sample(*options("pngs")), sample(*options("grid.png"))]
    for result in results:
        assert result.returncode == 0, result.stderr
    one, both = (np.load(tmp_path / f"{name}.npz") for name in ("one", "two"))
    assert one["arr_0"].shape == (10, 8, 8, 3) and one["arr_0"].dtype == np.uint8
    assert one["seeds"].tolist() == list(range(10)) and one["arr_1"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert all(np.array_equal(one[key], both[key]) for key in ("arr_0", "arr_1", "seeds"))
    assert len(list((tmp_path / "pngs").iterdir())) == 10
    assert np.array_equal(np.asarray(Image.open(tmp_path / "pngs" / "000005_1.png")), one["arr_0"][5])
    assert Image.open(tmp_path / "grid.png").height == 2 * (8 * 8 + 2)      # enlarged eightfold, in two rows of mixed classes
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize(("overrides", "says"), [
    ([], "Say what to sample from"), (["checkpoint=nowhere"], "no run, checkpoint folder or weights file at nowhere"),
    (["classes=fish"], "the names are ant, bee"), (["precision=fp8"], "not one of fp32"), (["decode_precision=fp8"], "decode_precision=fp8 is not one of"), (["batch_size=0"], "at least 1"),
    (["num_steps=null"], "num_steps=None"), (["weights=best"], "neither ema nor model"), (["scale=much"], "not a number"),
    (["out=/dev/null/x.png", "seeds=0", "num_steps=1"], "cannot be written"), (["+sampler.S_chrun=3"], "sampler.S_chrun=3: the sampler of EDM has no such setting"), (["out=grid.jpg"], "neither a grid (.png)"), (["diffusion_name=ddim"], "choose one of edm, ddpm, rf"),
    (["sampler.solver=heun"], "has no such setting"), (["sampler.rho=many"], "of another kind than its usual value"),
    (["gamma2=0.5"], "guides nothing without a scale"), (["guidance=tread", "gamma1=1.5"], "outside [0, 1)"), (["guidance=tread", "gamma1=x"], "neither a number nor a pair"),
    (["guidance=tread", "gamma1=0.9", "gamma2=0.5"], "may not be sparser"), (["guidance=interval", "interval=[3,1]"], "is empty"),
    (["guidance=autoguidance"], "needs weak="), (["guidance=cfg", "weak=nowhere"], "no run, checkpoint folder"), (["guidance=cfg", "drop_label=maybe"], "neither true nor false"),
])
def test_a_mistake_ends_in_a_sentence_not_in_a_traceback(run, overrides, says):
    given = [] if not overrides or overrides[0].startswith("checkpoint") else [f"checkpoint={run}"]
    result = sample(*given, *overrides)
    assert result.returncode == 1 and says in result.stderr and "Traceback" not in result.stderr


def test_a_meta_json_is_plain_json(run):
    assert json.loads((run / "checkpoints/step-00000002/meta.json").read_text())["step"] == 2
