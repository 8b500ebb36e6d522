"""Situations from public reports, sampling and guidance: the source, the situation, what comes out.

Tested elsewhere: an image of a batch sampled alone by its seed (huggingface/diffusers#6233, Comfy-Org/ComfyUI#2134) and
guidance of the first channels alone (facebookresearch/DiT#41, hustvl/LightningDiT#21) in
tests/weights/test_foreign.py; labels beside the images (openai/guided-diffusion#117) and classes whose names are
numbers (its #56) in test_sample.py.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from conftest import run_command
from training_runs import write_run

import sample
from edm import DDPM
from guidance import Guidance

NETWORK = dict(input_size=8, patch_size=2, in_channels=3, hidden_size=32, depth=2, num_heads=2, num_classes=3,
               init="xavier", learn_sigma=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), NETWORK, 1, {"name": "ddpm"}, class_names=["ant", "7", "cat"])


def sampled(run, out, *options) -> dict:
    steps = [] if any(option.startswith("num_steps=") for option in options) else ["num_steps=3"]
    run_command(sample.main, "sample.py", "cpu=true", *steps, f"checkpoint={run}", f"out={out}", *options)
    return dict(np.load(out))


def test_scale_0_is_without_a_label_and_scale_1_without_guidance(run, tmp_path):
    """huggingface/diffusers#9680: scales 0 and 1 gave the same images, where 0 should be unconditional."""
    def images(*options):
        return sampled(run, tmp_path / "x.npz", "seeds=[4]", *options)["arr_0"]

    labels = [f"classes=[{label}]" for label in (0, 2)]
    zero = [images("guidance=cfg", "scale=0", label) for label in labels]
    one = [images("guidance=cfg", "scale=1", label) for label in labels]
    assert np.array_equal(*zero) and not np.array_equal(*one)
    assert all(np.array_equal(guided, images(label)) for guided, label in zip(one, labels, strict=True))


def test_the_interval_of_a_ddpm_is_in_sigma():
    """kynkaat/guidance-interval#1: which of DiT's 250 steps lie between sigma 0.34 and 1.02?"""
    rows = []

    class Watch(torch.nn.Module):
        num_classes, in_channels, input_size, null_label = 3, 3, 8, True

        def forward(self, x, t, y, routes=()):
            rows.append((t[0].item(), len(x)))
            return torch.zeros(len(x), 6, 8, 8)

    DDPM().sample(Watch(), torch.zeros(1, 3, 8, 8), torch.tensor([0]), num_steps=250, solver="ancestral",
                  guidance=Guidance(2.5, interval=(0.34, 1.02)))
    guided = {t for t, count in rows if count == 2}
    abar = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))  # DiT's own schedule
    sigma = np.sqrt((1 - abar) / abar)
    assert guided == {t for t, _ in rows if 0.34 <= sigma[int(t)] <= 1.02} and 0 < len(guided) < 125


@pytest.mark.parametrize(("options", "message"), [
    (["seeds=-1"], "seeds=-1 is not understood"), (["seeds=abc"], "seeds=abc is not understood"),
    (["seeds=1.5"], "seeds="), (["seeds=null"], "seeds=null"),
    (["seeds=[9223372036854775808]"], "is too large: 2^63 - 1 = 9223372036854775807 is the largest"),
    (["seeds=18446744073709551615"], "2^63 - 1"), (["seeds=0-18446744073709551615"], "2^63 - 1"),
    (["seeds=0", "classes=3"], "asks for class 3, which is none of the 3"), (["seeds=0", "classes=-1"], "-1"),
    (["seeds=0", "classes=dog"], "asks for class dog"),
    (["seeds=0", "guidance=cfg", "scale=nan"], "scale"), (["seeds=0", "guidance=cfg", "scale=two"], "scale"),
    (["seeds=0", "guidance=cfg", "scale=2", "interval=[5,1]"], "interval=[5.0, 1.0] does not fit"),
    (["seeds=0", "guidance=cfg", "channels=4"], "channels=4"),
    (["seeds=0", "num_steps=0"], "num_steps=0"),
    (["seeds=0", "num_steps=1001", "sampler.solver=ancestral"],
     "num_steps=1001, but solver=ancestral visits 1000 noise levels"),
    (["seeds=0", "sampler.solver=ddim"], "sampler.solver=ddim"), (["seeds=0", "sampler.rho=0"], "sampler.rho=0"),
])  # fmt: skip
def test_a_slip_raises_a_one_line_error_before_anything_is_sampled(options, message, run, tmp_path):
    """pytorch/torchtitan#746 and invoke-ai/InvokeAI#2386 (seeds), facebookresearch/DiT#108 (labels), and kin."""
    with pytest.raises(SystemExit) as ended:
        sampled(run, tmp_path / "x.npz", *options)
    assert message in str(ended.value) and "\n" not in str(ended.value) and not (tmp_path / "x.npz").exists()


@pytest.mark.parametrize("diffusion", ["edm", "rf"])
def test_one_step_is_a_picture_and_not_nan(diffusion, tmp_path):
    """archinetai/audio-diffusion-pytorch#15: the noise levels of a single step divide by 0."""
    run = write_run(tmp_path / "run", NETWORK | {"learn_sigma": False}, 1, {"name": diffusion})
    latents = sampled(run, tmp_path / "x.npz", "seeds=0-1", "latents=true", "num_steps=1")["latents"]
    assert np.isfinite(latents).all() and latents.std() < 2


@pytest.mark.parametrize(("data", "drop_label", "message"), [
    ({"class_names": ["cat", "7", "ant"]}, False, "ant is class 2 there and 0 here"),
    ({"class_names": ["cat", "7", "ant"]}, True, None),     # its weak pass has no label
    ({"class_names": ["x", "y", "z"]}, False, None),
    ({"class_names": ["ant", "7", "cat"], "convention": {"scale": 0.5, "shift": 0.0}}, False,
     "its latents have another scale"),
])
def test_a_weak_network_of_other_classes_or_latents_is_refused_where_it_has_a_label(
        data, drop_label, message, tmp_path):
    """As in facebookresearch/deit#130, label 0 is another class to a network that was trained on another order."""
    weak = write_run(tmp_path / "weak", NETWORK, 2, {"name": "ddpm"}, **data)
    strong = write_run(tmp_path / "strong", NETWORK, 1, {"name": "ddpm"},
                       class_names=["ant", "7", "cat"], convention={"scale": 1.0, "shift": 0.0})
    with pytest.raises(SystemExit, match=message) if message else nullcontext():
        sampled(strong, tmp_path / "x.npz", "seeds=0", f"weak={weak}", "scale=1.5", "gamma1=0", "gamma2=0",
              f"drop_label={str(drop_label).lower()}")
