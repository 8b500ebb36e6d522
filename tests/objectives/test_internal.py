"""Internal guidance: a head in the middle that learns with the network, is averaged, saved and guides in one pass."""

import copy
from functools import partial

import pytest
import torch
from closed_forms import amplitude_of, wave
from conftest import run_command
from safetensors.torch import load_file
from test_objectives import published_loss
from test_published_parity import CountedNoise, assert_equal, published
from training_runs import trained

from dit import DiT
from edm import DDPM, EDM
from guidance import Guidance
from objectives import DiffusionLoss
from objectives.internal import Internal
from rf import RF
from sample import main as sample_main
from sampling.generate import sampling_cost
from scripts.export import main as export_main
from weights import checkpoint as checkpoints
from weights.loading import load_trained
from weights.records import build_network

THEIRS = published("internal")
TINY = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=64, depth=4, num_heads=4, num_classes=10)


def with_head(block=1, **config) -> DiT:
    torch.manual_seed(0)
    return build_network(TINY | {"init": "xavier"} | config | {"head_block": block})


def awake(net: DiT) -> DiT:
    """A network whose head, which starts at zero, says something."""
    with torch.no_grad():
        for p in net.internal_head.parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return net


def filled_as_theirs() -> DiT:
    net = with_head()
    theirs = {key.replace("internal_head", "final_layer_xr"): weight
              for key, weight in net.state_dict().items() if key != "pos_embed"}
    for k, key in enumerate(sorted(theirs)):
        theirs[key].copy_(wave(theirs[key].shape, k, amplitude_of(theirs[key])))
    return net.eval()


def by_head(scale, **changes) -> Guidance:
    return Guidance(scale, **{"drop_label": False, "internal": True, **changes})


def batch(n=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, 8, 8, generator=generator), torch.arange(n) * 3 % 10


# ---- the published numbers -------------------------------------------------------------------------------------------


@torch.no_grad()
def test_both_outputs_and_both_losses_equal_the_published_implementations():
    net, shape, y = filled_as_theirs(), THEIRS["shape"], torch.tensor(THEIRS["y"])
    assert_equal(net(wave(shape, amplitude=1.4), torch.tensor(THEIRS["t"]), y), THEIRS["out"])
    assert_equal(net.internal_head.answer(), THEIRS["internal_out"])
    loss, terms = published_loss(Internal(DiffusionLoss(net, RF())), THEIRS)
    assert terms["internal"].tolist() == pytest.approx(THEIRS["internal_loss"], abs=1e-5)
    torch.testing.assert_close(loss, torch.tensor(THEIRS["loss"]) + 0.5 * terms["internal"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", THEIRS["sampled"]["latents"])
def test_samples_of_internal_guidance_equal_the_published_implementations(scale):
    case = THEIRS["sampled"]
    x = RF().sample(filled_as_theirs(), wave((2, 4, 8, 8), 2, 1.4), torch.tensor(case["y"]), case["num_steps"],
                    solver="euler_maruyama", guidance=by_head(float(scale)), randn_like=CountedNoise())
    assert_equal(x, case["latents"][scale])


def test_the_head_starts_at_zero_and_the_network_around_it_as_without_one():
    net = with_head()
    torch.manual_seed(0)
    plain = build_network(TINY | {"init": "xavier"}).state_dict()
    assert all(torch.equal(net.state_dict()[key], value) for key, value in plain.items())
    head = net.internal_head.state_dict()
    assert head.keys() == {key.removeprefix("final_layer_xr.") for key in THEIRS["zero"]}
    assert len(net.state_dict()) == len(plain) + len(head) and not any(value.any() for value in head.values())


# ---- on a route ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("diffusion", [EDM(), RF()], ids=["edm", "rf"])
def test_on_a_route_the_head_predicts_the_kept_tokens_and_its_loss_is_their_mean(diffusion):
    net, (x, y) = awake(with_head(routes=[dict(start_layer_idx=1, end_layer_idx=2, selection_ratio=0.5)])), batch(4)
    objective, ids, seen = Internal(DiffusionLoss(net, diffusion), weight=0.25), [], []
    get_mask, loss_of = net.router.get_mask, diffusion.loss
    net.router.get_mask = lambda *given: ids.append(get_mask(*given)) or ids[-1]
    diffusion.loss = lambda network, *given, weight, **how: (
        seen.append((network, given, weight)) or loss_of(network, *given, weight=weight, **how))
    mask = torch.rand(4, 1, 8, 8)
    loss, terms = objective(x, y, weight=mask)
    del diffusion.loss
    kept = torch.zeros(4, 16).scatter(1, ids[0], 1.0)
    pixels = kept.view(4, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3)
    image = net.internal_head.answer()
    assert (image * (1 - pixels) == 0).all() and (image * pixels != 0).any()
    # The same noise levels and noise; by the pixel, over those that were kept.
    (own, (*_, level, eps), weight), (_, (*_, level2, eps2), _) = seen
    assert own is net and torch.equal(level, level2) and torch.equal(eps, eps2) and torch.equal(weight, mask)
    per_pixel = torch.stack([loss_of(lambda *_, **__: image, x, y, (), level, eps,
                                     weight=mask * 64 * pixel.view(1, 1, 8, 8))
                             for pixel in torch.eye(64)], dim=1)                                       # (4, 64)
    torch.testing.assert_close(terms["internal"], (per_pixel * pixels.flatten(1)).sum(1) / pixels.flatten(1).sum(1))
    torch.testing.assert_close(loss - 0.25 * terms["internal"], loss_of(
        net, x, y, net.routes, level, eps, weight=mask, mask_noise=1 - kept[:, None]))


def test_the_head_learns_and_teaches_the_blocks_before_it_alone():
    net, (x, y) = awake(with_head()), batch()
    Internal(DiffusionLoss(net, RF()))(x, y)[1]["internal"].sum().backward()
    moved = {name.split(".")[0] if "blocks" not in name else name[:8]
             for name, p in net.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == {"x_embedder", "t_embedder", "y_embedder", "blocks.0", "blocks.1", "internal_head"}


def test_a_copy_of_the_network_has_its_own_head():
    net, (x, y) = awake(with_head()), batch()
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.internal_head.linear.bias += 1
        net(x, torch.rand(3), y)
        before = net.internal_head.answer().clone()
        other(x, torch.rand(3), y)
    assert torch.equal(net.internal_head.answer(), before) and not torch.allclose(other.internal_head.answer(), before)


# ---- guidance --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("diffusion", "settings"), [
    (EDM(), {}), (EDM(), {"S_churn": 5.0}), (RF(), {}), (RF(), {"solver": "heun"}),
    (RF(), {"solver": "euler_maruyama"}), (DDPM(), {"solver": "ancestral"}),
], ids=["edm", "churn", "euler", "heun", "sde", "ddpm"])  # fmt: skip
def test_internal_guidance_works_with_every_sampler_at_one_pass_an_evaluation(diffusion, settings):
    net, (noise, y), passes = awake(with_head(learn_sigma=isinstance(diffusion, DDPM))), batch(), []
    counter = net.register_forward_pre_hook(lambda _, given: passes.append(given[2].tolist()))
    draw = partial(diffusion.sample, net, noise, y, 4, randn_like=torch.zeros_like, **settings)
    plain, taken = draw(), len(passes)
    guided = draw(guidance=by_head(1.4))
    assert len(passes) == 2 * taken and all(labels == y.tolist() for labels in passes)
    assert torch.equal(draw(guidance=by_head(1.0)), plain) and not torch.allclose(guided, plain, atol=1e-3)
    counter.remove()
    assert sampling_cost(net, diffusion, 4, by_head(1.4), **settings) == sampling_cost(net, diffusion, 4, **settings)
    assert sampling_cost(net, diffusion, 4, **settings)[0] == taken


@torch.no_grad()
def test_the_weak_prediction_is_the_heads_through_the_diffusions_own_preconditioning():
    net, (x, y), sigma = awake(with_head()), batch(), torch.full((3,), 0.7)
    guided = by_head(1.7).guide(EDM().denoise, net, x, y, 4)(x, 0.7, 0)
    strong, image = EDM().denoise(net, x, sigma, y), net.internal_head.answer()
    c_skip, c_out, *_ = EDM().preconditioning(sigma.view(-1, 1, 1, 1))
    weak = c_skip * x + c_out * image
    torch.testing.assert_close(guided, weak + 1.7 * (strong - weak))
    outside = by_head(1.7, interval=(1.0, 2.0)).guide(EDM().denoise, net, x, y, 4)(x, 0.7, 0)
    assert torch.equal(outside, strong)
    assert by_head(1.7).record()["internal"] and "internal" not in Guidance(1.7).record()


@pytest.mark.parametrize(("wrong", "says"), [
    ({"drop_label": True}, "set drop_label=false"), ({"gamma2": 0.5}, "leave out weak, gamma1 and gamma2"),
    ({"net2": DiT(**TINY)}, "leave out weak"),
])
def test_guidance_that_would_need_another_pass_raises_a_one_line_error(wrong, says):
    with pytest.raises(ValueError, match=says):
        by_head(1.4, **wrong)


# ---- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(shapes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("internal") / "run"
    assert "  internal " in trained(folder, shapes, "objective=internal", "steps=4", "checkpoint.every=2",
                                    "ema.decay=0.5")
    return folder


def test_the_head_is_a_part_of_the_weights_and_of_their_average(run):
    last = checkpoints.latest(run)
    model, ema, training = (load_file(last / f"{name}.safetensors") for name in ("model", "ema", "training"))
    head = [key for key in model if key.startswith("internal_head.")]
    assert len(head) == 4 and model.keys() == ema.keys() and not any(key.startswith("objective.") for key in training)
    assert all(ema[key].any() and not torch.equal(ema[key], model[key]) for key in head)
    assert checkpoints.read_meta(last)["network"]["head_block"] == 1  # of six blocks the second


def test_a_checkpoint_with_a_head_samples_with_and_without_its_guidance(run, tmp_path):
    draw = partial(run_command, sample_main, "sample.py", checkpoint=str(run), seeds="0-3", num_steps=2, cpu=True)
    draw(out=str(tmp_path / "plain.png"))
    draw("guidance=internal", out=str(tmp_path / "guided.png"))
    assert (tmp_path / "plain.png").read_bytes() != (tmp_path / "guided.png").read_bytes()


def test_an_adapter_learns_around_the_trained_head_of_its_base(run, shapes, tmp_path):
    adapted = tmp_path / "adapted"
    trained(adapted, shapes, "objective=internal", f"init_from={run}", "lora.rank=2", "steps=2")
    base, net = (load_trained(folder).net.state_dict() for folder in (run, adapted))
    changed = {key for key in base if not torch.equal(base[key], net[key])}
    assert changed and not any(key.startswith("internal_head.") for key in changed)


@pytest.mark.parametrize("to", ["dit", "diffusers", "hub"])
def test_an_export_is_a_plain_network_or_keeps_the_head(run, tmp_path, to, capsys):
    out = tmp_path / ("x.pt" if to == "dit" else "x")
    run_command(export_main, "export.py", checkpoint=str(run), to=to, out=str(out))
    said = capsys.readouterr().out
    net, (x, y) = load_trained(run).net, (torch.randn(2, 3, 16, 16), torch.arange(2))
    again = load_trained(out, **({"diffusion": "edm", "num_heads": 2} if to == "dit" else {})).net
    assert torch.allclose(again(x, torch.rand(2) * 0, y), net(x, torch.rand(2) * 0, y), atol=1e-5)
    assert hasattr(again, "internal_head") == (to == "hub") == ("guidance=internal" not in said)
