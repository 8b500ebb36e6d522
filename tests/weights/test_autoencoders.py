"""The autoencoder that made the latents decodes them: diffusers' classes, LDM's files, TorchScript, Python, or none."""

import json
import math
import runpy
import shutil
import sys
import zipfile
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import torch
import training_runs
from closed_forms import amplitude_of
from conftest import ROOT, change_record, one_rank, run_command, save_vae
from safetensors.torch import load_file, save_file
from test_prepare_latents import prepare
from test_published_parity import assert_equal, published, signature, wave
from training_runs import write_run

import sample
from autoencoder import SD_VAE_SCALE, Convention, DiffusersAutoencoder, OwnDecoder, pixels_to_images
from latents.folder import open_latents
from latents.loader import to_latent
from scoring import image_sets
from weights import autoencoders
from weights.loading import load_trained

VAVAE = published("vavae")
COUNT, SIDE = 12, 16


def kl(levels=3, latent_channels=5, **config):
    return "AutoencoderKL", dict(block_out_channels=(8,) * levels, down_block_types=("DownEncoderBlock2D",) * levels,
                                 norm_num_groups=4, up_block_types=("UpDecoderBlock2D",) * levels,
                                 latent_channels=latent_channels,
                                 **config)


MEAN, STD = [0.3, -0.2, 0.1, 0.0, -0.4], [0.5, 1.5, 0.8, 1.0, 0.6]
NETWORKS = {  # downsample, and the network
    "one scale": (4, kl(scaling_factor=2.0)),
    "scale and shift": (4, kl(scaling_factor=1.5, shift_factor=0.25)),
    "statistics by channel": (4, kl(scaling_factor=1.2, latents_mean=MEAN, latents_std=STD)),
    "tiny": (4, ("AutoencoderTiny", dict(
        encoder_block_out_channels=(8, 8, 8), decoder_block_out_channels=(8, 8, 8), num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1), latent_channels=4, scaling_factor=1.0))),
    "deep compression": (8, ("AutoencoderDC", dict(
        latent_channels=8, encoder_block_out_channels=(16, 16, 32, 32), decoder_block_out_channels=(16, 16, 32, 32),
        encoder_layers_per_block=(1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1), encoder_block_types="ResBlock",
        decoder_block_types="ResBlock", decoder_norm_types="rms_norm", decoder_act_fns="silu",
        encoder_qkv_multiscales=((),) * 4, decoder_qkv_multiscales=((),) * 4, attention_head_dim=8,
        scaling_factor=0.41))),
}


def make_network(form, folder) -> str:
    """Saves a random network whose latents, with its own convention, are near a standard deviation of 1."""
    import diffusers

    name, config = NETWORKS[form][1]
    torch.manual_seed(3)
    vae = getattr(diffusers, name)(**config)
    last = [module for module in vae.encoder.modules() if isinstance(module, torch.nn.Conv2d)][-1]
    if name != "AutoencoderTiny":
        with torch.no_grad():  # an untrained network maps every image to nearly the same latent
            last.weight *= 4
    vae.save_pretrained(folder)
    return str(folder)


def closed_form(keys) -> dict[str, torch.Tensor]:
    """The weights that the published side of vavae.json had."""
    return {key: wave(tuple(shape), k, amplitude_of(torch.empty(shape)))
            + (1.0 if "norm" in key and key.endswith("weight") else 0.0)
            for k, (key, shape) in enumerate(keys)}


@pytest.fixture(scope="module")
def vavae(tmp_path_factory) -> Path:
    """A weights file of VA-VAE's keys, as a training run leaves it, without statistics beside it."""
    file = tmp_path_factory.mktemp("vavae") / "vavae.pt"
    others = {"loss.logvar": torch.zeros(()), "foundation_model.model.cls_token": torch.zeros(3),
              "linear_proj.weight": torch.zeros(3)}
    torch.save({"state_dict": closed_form(VAVAE["keys"]) | others, "global_step": 3}, file)
    return file


def decoder_of(name, shape=(4, 4, 4), convention=None, **options):
    return autoencoders.load_decoder(str(name), shape, convention, **options)


# ---- diffusers' folders, and the hub ---------------------------------------------------------------------------------


IMAGES = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory):
    return str(save_vae(tmp_path_factory.mktemp("vae"), levels=4))


def test_vae_moments_are_the_posterior_scaled(vae_folder):
    from diffusers import AutoencoderKL

    vae = autoencoders.load_autoencoder(vae_folder)
    assert (vae.channels, vae.downsample, vae.convention) == (4, 8, Convention(0.18215))
    mean, std = vae.encode(IMAGES)
    assert mean.shape == std.shape == (2, 4, 4, 4) and mean.dtype == std.dtype == torch.float32

    reference = AutoencoderKL.from_pretrained(vae_folder, use_safetensors=True)
    with torch.no_grad():
        posterior = reference.encode(IMAGES.permute(0, 3, 1, 2) / 127.5 - 1).latent_dist
        torch.testing.assert_close(mean, posterior.mean * 0.18215)
        torch.testing.assert_close(std, posterior.std * 0.18215)
        pixels = reference.decode(mean / 0.18215).sample
    expected = np.floor(np.clip(pixels.numpy() * 127.5 + 128, 0, 255)).astype(np.uint8).transpose(0, 2, 3, 1)
    decoded = vae.decode(mean)
    assert decoded.shape == (2, 32, 32, 3) and np.abs(decoded.numpy().astype(int) - expected).max() <= 1


@pytest.mark.parametrize(("dtype", "levels"), [(torch.bfloat16, 12), (torch.float16, 2)])
def test_half_precision_returns_float32_and_rounds_the_same_latents_and_images(vae_folder, dtype, levels):
    exact, half = autoencoders.load_autoencoder(vae_folder), autoencoders.load_autoencoder(vae_folder, dtype=dtype)
    (mean, _), (rough, std) = exact.encode(IMAGES), half.encode(IMAGES)
    assert rough.dtype == std.dtype == torch.float32 and 0 < (rough - mean).abs().max() < 0.1 * mean.abs().max()
    latents = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0)) * SD_VAE_SCALE
    assert 0 < (half.decode(latents).int() - exact.decode(latents).int()).abs().max() <= levels


def changed(**config):
    """Changes the config.json of a folder."""
    def write(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return write


def rewritten(change):
    """Changes the tensors of a folder."""
    return lambda folder: save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


@pytest.mark.parametrize(("spoil", "says"), [
    (rewritten(lambda tensors: {key: tensors[key] for key in tensors if key != "encoder.conv_in.bias"}),
     "lack 1 tensors, encoder.conv_in.bias"),
    (rewritten(lambda tensors: tensors | {"encoder.conv_in.bias": torch.zeros(3)}), "can be read and fits.*expected"),
    (changed(_class_name="os.system"), "has the class os.system, but only AutoencoderKL, .* can be read"),
    (changed(latents_mean=[0.0] * 5), "latents_mean has 5 numbers and latents_std 0"),
    (changed(latents_mean=[0.0] * 5, latents_std=[1.0] * 5), "5 numbers each, but the latents have 4 channels"),
    (changed(latents_mean=[0.0] * 4, latents_std=[1.0, 0.0, 1.0, 1.0]), "are not all numbers above 0"),
    (changed(scaling_factor=None), "scaling_factor null"),
    (changed(norm_num_groups=3), "can be read and fits config.json"),
    (shutil.rmtree, "is neither one of identity, sd_vae_ema, sd_vae_mse nor a local folder or file"),
])
def test_a_folder_that_is_no_complete_autoencoder_is_refused(vae_folder, tmp_path, spoil, says):
    spoil(folder := Path(shutil.copytree(vae_folder, tmp_path / "vae")))
    with pytest.raises(ValueError, match=says):
        autoencoders.load_autoencoder(str(folder))


def test_an_unavailable_hub_model_is_a_line_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="stabilityai/sd-vae-ft-ema.*hf download.*autoencoder=path/to/sd_vae_ema"):
        autoencoders.load_autoencoder("sd_vae_ema")


# ---- VA-VAE against the published code ------------------------------------------------------------------------------


def test_vavae_encodes_and_decodes_as_the_published_code_does(vavae, tmp_path):
    file = tmp_path / "vavae.safetensors"
    save_file(torch.load(vavae, weights_only=True)["state_dict"], file)
    for path in (vavae, file):
        loaded = decoder_of(path, (8, 4, 4), Convention())
        assert (loaded.channels, loaded.downsample, loaded.samples_only) == (8, 4, False)
        with torch.no_grad():
            assert_equal(loaded.vae.encode(wave((1, 3, 16, 16), 3)).latent_dist.parameters, VAVAE["moments"]["values"])
            assert_equal(loaded._decode(wave((1, 8, 4, 4), 5, math.sqrt(2))), VAVAE["decoded"]["values"])


def test_f16d32_has_the_keys_and_shapes_of_the_published_network():
    from diffusers import AutoencoderKL

    down = ["DownEncoderBlock2D"] * 4 + ["AttnDownEncoderBlock2D"]
    up = ["AttnUpDecoderBlock2D"] + ["UpDecoderBlock2D"] * 4
    with torch.device("meta"):
        vae = AutoencoderKL(block_out_channels=(128, 128, 256, 256, 512), layers_per_block=2, latent_channels=32,
                            down_block_types=down, up_block_types=up)
    shapes = {autoencoders.ldm_key(key, 5): tuple(value.shape) for key, value in vae.state_dict().items()}
    shapes = {key: (*shape, 1, 1) if "attn" in key and len(shape) == 2 else shape for key, shape in shapes.items()}
    assert len(shapes) == VAVAE["keys_f16d32"]["count"] and signature(shapes) == VAVAE["keys_f16d32"]["signature"]


def test_vavae_has_a_scale_only_by_the_statistics_beside_it_or_by_the_latents_record(vavae, tmp_path):
    with pytest.raises(ValueError, match="does not record how its latents are scaled: put its latents_stats.pt next"):
        autoencoders.load_autoencoder(str(vavae))
    alone = shutil.copy(vavae, tmp_path / "vavae.pt")
    mean, std = torch.linspace(-1, 1, 8), torch.linspace(0.5, 2, 8)
    torch.save({"mean": mean.view(1, 8, 1, 1), "std": std.view(1, 8, 1, 1)}, tmp_path / "latents_stats.pt")
    found = autoencoders.load_autoencoder(str(alone)).convention
    assert found.scale == 1 and torch.equal(torch.tensor(found.latents_mean),
                                            mean) and torch.equal(torch.tensor(found.latents_std), std)
    recorded = Convention(latents_mean=(0.0,) * 8, latents_std=(2.0,) * 8)
    assert decoder_of(alone, (8, 4, 4), recorded).convention == recorded
    torch.save({"mean": mean[:3], "std": std[:3]}, tmp_path / "latents_stats.pt")
    with pytest.raises(ValueError, match="have 3 numbers each, but the latents have 8 channels"):
        autoencoders.load_autoencoder(str(alone))


# ---- latents are decoded by what they were made by ------------------------------------------------------------------


@pytest.mark.parametrize("form", [*NETWORKS, "vavae"])
def test_a_prepared_folder_decodes_to_the_autoencoders_own_reconstruction(form, vavae, tmp_path):
    if form == "vavae":
        name, downsample = str(shutil.copy(vavae, tmp_path / "vavae.pt")), 4
        torch.save({"mean": torch.linspace(-0.5, 0.5, 8), "std": torch.linspace(0.2, 1, 8)},
                   tmp_path / "latents_stats.pt")
    else:
        name, downsample = make_network(form, tmp_path / "network"), NETWORKS[form][0]
    with pytest.MonkeyPatch.context() as patch:  # a random network's latents have any spread
        patch.setattr("latents.folder._check_values", lambda latents: None)
        prepare("shapes", tmp_path / "out", SIDE, name, shapes={"count": COUNT, "seed": 0})
        latents = open_latents(tmp_path / "out")
    loaded = autoencoders.load_autoencoder(name)
    assert latents.kind == ("sample" if form in ("tiny", "deep compression") else "moments")
    assert latents.shape == (loaded.channels, SIDE // downsample, SIDE // downsample)
    assert latents.autoencoder == name and latents.convention == loaded.convention

    torch.manual_seed(0)
    x = to_latent(torch.from_numpy(latents.read(np.arange(COUNT))[0]), latents.kind)
    images = decoder_of(latents.autoencoder, latents.shape, latents.convention).decode(x)

    prepare("shapes", tmp_path / "pixels", SIDE, "identity",
            shapes={"count": COUNT, "seed": 0})  # the same images, as they are
    pixels = torch.from_numpy(open_latents(tmp_path / "pixels").read(np.arange(COUNT))[0]).float()
    with torch.no_grad():  # the network by itself, without a line of ours
        encoded = loaded.vae.encode(pixels)
        if latents.kind == "sample":
            z = encoded[0]
        else:
            torch.manual_seed(0)
            z = encoded.latent_dist.mean + encoded.latent_dist.std * torch.randn(encoded.latent_dist.mean.shape)
        expected = pixels_to_images(loaded.vae.decode(z).sample)
    difference = (images.int() - expected.int()).abs()
    assert difference.max() <= 2 and difference.float().mean() < 0.2  # latents are stored in float16
    assert images.float().std() > 3, "nothing is to be seen"
    if form != "tiny":  # whose scale is 1
        others = decoder_of(name, latents.shape, Convention())
        others.convention = Convention()
        assert (others.decode(x).int() - expected.int()).abs().max() > 4


def test_latents_are_undone_by_their_record_and_not_by_another_autoencoders_scale(tmp_path):
    name = make_network("one scale", tmp_path / "network")
    recorded = Convention(0.5, 0.0, tuple(MEAN), tuple(STD), (0.0, 1.0))
    loaded, z = decoder_of(name, (5, 4, 4), recorded), torch.randn(2, 5, 4, 4)
    by_hand = pixels_to_images(loaded.vae.decode(z).sample * 2 - 1)  # EDM2: 0 … 1
    latents = (z - torch.tensor(MEAN).view(5, 1, 1)) / torch.tensor(STD).view(5, 1, 1) * 0.5
    assert (loaded.decode(latents).int() - by_hand.int()).abs().max() <= 1
    tiny = make_network("tiny", tmp_path / "tiny")
    assert decoder_of(tiny, (4, 4, 4), Convention(0.18215)).convention == Convention()  # it takes scaled latents
    with pytest.raises(ValueError, match="is an AutoencoderTiny, which needs latents with one scale"):
        decoder_of(tiny, (4, 4, 4), Convention(0.5, 0.0, (0.0,) * 4, (1.0,) * 4))


# ---- code of one's own ----------------------------------------------------------------------------------------------


class Bright(torch.nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z[:, :3].repeat_interleave(2, dim=2).repeat_interleave(2, dim=3) * 0.5


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The same decoder twice: a TorchScript file and a module that says when it is imported."""
    torch.jit.script(Bright()).save(tmp_path / "own.pt")
    (tmp_path / "my_decoder.py").write_text(
        "def decode(z):\n    return z[:, :3].repeat_interleave(2, dim=2).repeat_interleave(2, dim=3) * 0.5\n\n"
        "def flat(z):\n    return z.flatten(1)\n\n"
        "def grey(z):\n    return z[:, :1]\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield [str(tmp_path / "own.pt"), "python:my_decoder.decode"]
    sys.modules.pop("my_decoder", None)


def test_a_custom_decoder_gets_the_autoencoders_latents_and_returns_pixels(own):
    latents = torch.linspace(-1, 1, 2 * 4 * 16).view(2, 4, 4, 4)
    expected = pixels_to_images(Bright()(latents / 2 + 0.25))
    for name in own:
        loaded = decoder_of(name, convention=Convention(2.0, 0.25), trusted=True)
        assert torch.equal(loaded.decode(latents), expected) and (loaded.channels, loaded.downsample) == (4, 2)
        assert torch.equal(decoder_of(name, trusted=True).decode(latents), pixels_to_images(Bright()(latents)))
        with pytest.raises(ValueError, match="can only decode"):
            autoencoders.load_autoencoder(name)


def test_what_a_custom_decoder_computes_elsewhere_comes_back_to_the_device():
    def on_the_cpu(z):
        return torch.zeros(len(z), 3, 8, 8)

    loaded = OwnDecoder("python:x", on_the_cpu, (4, 4, 4), "meta")  # which stands for a GPU
    assert loaded.decode(torch.zeros(2, 4, 4, 4, device="meta")).device.type == "meta"


def test_what_runs_code_is_loaded_only_where_the_user_names_it(own, tmp_path):
    for name in own:
        with pytest.raises(ValueError, match="runs code, so it is loaded only if the command names it"):
            decoder_of(name)
    assert "my_decoder" not in sys.modules
    settings = {"checkpoint": write_run(tmp_path / "run", NETWORK, autoencoder=own[1]), "num_steps": 1, "seeds": "0-3",
                "cpu": True, "out": tmp_path / "x.npz"}
    with pytest.raises(SystemExit, match="runs code, so it is loaded only"):
        run_command(sample.main, "sample.py", **settings)
    run_command(sample.main, "sample.py", **settings, autoencoder=own[1], decode_batch_size=3)
    with np.load(tmp_path / "x.npz") as drawn:
        assert drawn["arr_0"].shape == (4, 16, 16, 3) and drawn["arr_0"].std() > 3


@pytest.mark.parametrize("name, says", [
    ("python:decode", "is not python:module.function"), ("python:no_such.decode", "No module named.*set PYTHONPATH"),
    ("python:my_decoder.nothing", "has no attribute 'nothing'"),
    ("python:my_decoder.flat", r"maps one latent \(1, 4, 4, 4\) to \(1, 64\); images are"),
    ("python:my_decoder.grey", r"to \(1, 1, 4, 4\); images are \(1, 3, H, W\)"),
    ("broken.pt", "broken.pt is not a complete TorchScript file"),
])
def test_what_is_no_decoder_is_refused(own, tmp_path, monkeypatch, name, says):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("broken.pt", "w") as archive:
        archive.writestr("decoder/code/a.py", "")
    with pytest.raises(ValueError, match=says):
        decoder_of(name, trusted=True)


def test_the_example_of_a_decoder_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "own_decoder.py"), run_name="own_decoder")
    assert decoder_of("own.pt", trusted=True).decode(torch.ones(1, 4, 4, 4)).shape == (1, 32, 32, 3)


# ---- in pieces ------------------------------------------------------------------------------------------------------


def test_decoding_in_pieces_returns_the_same_images_and_never_more_at_once(tmp_path, monkeypatch):
    name, latents = make_network("scale and shift", tmp_path), torch.randn(7, 5, 4, 4)
    sizes = []
    decode = DiffusersAutoencoder._decode
    monkeypatch.setattr(DiffusersAutoencoder, "_decode", lambda self, z: sizes.append(len(z)) or decode(self, z))
    whole = decoder_of(name, (5, 4, 4)).decode(latents)
    assert sizes == [7]
    for batch_size, pieces in ((3, [3, 3, 1]), (1, [1] * 7), (7, [7]), (100, [7])):
        sizes.clear()
        images = decoder_of(name, (5, 4, 4), batch_size=batch_size).decode(latents)
        assert sizes == pieces and (images.int() - whole.int()).abs().max() <= 1
    assert (whole[0].int() - whole[1].int()).abs().max() > 4
    sizes.clear()
    monkeypatch.setattr("autoencoder.PIXELS_AT_ONCE", 2 * 16 * 16)  # the default counts pixels
    decoder_of(name, (5, 4, 4)).decode(latents)
    assert sizes == [2, 2, 2, 1]
    assert autoencoders.load_autoencoder(name).encode(whole)[0].shape == latents.shape


def test_an_autoencoder_that_overflows_in_fp16_raises_a_one_line_error_and_not_black_images(tmp_path):
    name = make_network("scale and shift", tmp_path)
    decoder = autoencoders.load_decoder(name, (5, 4, 4), None, "cpu", torch.float16)
    large = torch.full((2, 5, 4, 4), 6e4)  # scaled beyond what fp16 holds
    assert decoder_of(name, (5, 4, 4)).decode(large * 10, strict=True).shape == (2, 16, 16, 3)
    with pytest.raises(ValueError, match="pixels that are not finite: set decode_precision=fp32 or bf16"):
        decoder.decode(large * 10, strict=True)
    assert decoder.decode(large * 10).shape == (2, 16, 16, 3)  # in training it is only a grid


# ---- commands -------------------------------------------------------------------------------------------------------

NETWORK = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=32, depth=3, num_heads=2, num_classes=3,
               learn_sigma=False, routes=[], init="xavier")


@pytest.fixture(scope="module")
def folder(shapes, tmp_path_factory) -> Path:
    """Latents of 4 channels that only their owner can decode."""
    folder = Path(shutil.copytree(shapes, tmp_path_factory.mktemp("none") / "set"))
    for file in folder.glob("latents-*.npy"):
        pixels = np.load(file)
        np.save(file, np.concatenate([pixels, pixels[:, :1]], axis=1))
    change_record(folder, autoencoder="none", shape=[4, 16, 16], scale=2.0, shift=0.5, latents_mean=[0.1] * 4,
                  latents_std=[2.0] * 4)
    return folder


SAMPLED = ("data=folder", "steps=1", "samples.every=1", "samples.seeds=0-2", "samples.num_steps=1")


def test_latents_that_only_their_owner_can_decode_are_trained_on_and_sampled_as_they_are(folder, own, tmp_path):
    printed = training_runs.trained(tmp_path / "run", folder, *SAMPLED)
    assert "autoencoder=none: these latents cannot be decoded here, so no grids are sampled" in printed
    assert not list((tmp_path / "run").glob("samples/*"))
    trained = load_trained(tmp_path / "run")
    assert trained.autoencoder == "none" and trained.convention == Convention(2.0, 0.5, (0.1,) * 4, (2.0,) * 4)

    settings = {"checkpoint": tmp_path / "run", "num_steps": 2, "seeds": "0-4", "cpu": True, "batch_size": 2}
    with pytest.raises(SystemExit, match="autoencoder=none: .*out=x.npz latents=true"):
        run_command(sample.main, "sample.py", **settings, out=tmp_path / "images.npz")
    run_command(sample.main, "sample.py", **settings, out=tmp_path / "x.npz", latents=True)
    with np.load(tmp_path / "x.npz") as drawn:
        assert set(drawn.files) == {"latents", "labels", "seeds"} and drawn["latents"].dtype == np.float32
        assert drawn["seeds"].tolist() == [0, 1, 2, 3, 4]
        latents = torch.from_numpy(drawn["latents"])
    # What a decoder of one's own makes of a checkpoint's images is what it makes of these latents.
    run_command(sample.main, "sample.py", **settings, out=tmp_path / "images.npz", autoencoder=own[1])
    with np.load(tmp_path / "images.npz") as drawn:
        images = torch.from_numpy(drawn["arr_0"])
    assert torch.equal(images, pixels_to_images(Bright()((latents / 2 * 2 + 0.1) + 0.5)))


def test_grids_in_training_are_decoded_by_a_custom_decoder_and_none_is_scored_without_one(folder, own, tmp_path):
    training_runs.trained(tmp_path / "run", folder, *SAMPLED, f"data.autoencoder={own[0]}", "decode_batch_size=2")
    assert len(list((tmp_path / "run").glob("samples/*.png"))) == 1
    result = training_runs.train_here(tmp_path / "other", folder, *SAMPLED, "evaluate.every=1",
                                      "evaluate.reference=x.npz")
    assert "latents cannot be decoded" in result.stderr and "set samples.every=0 evaluate.every=0" in result.stderr
    with pytest.raises(ValueError, match="autoencoder=none: these latents cannot be decoded"):
        image_sets.open_images(one_rank(), "images", str(folder))
    assert image_sets.describe_weights("x", 1, "ema", str(ROOT / "README.md"), "fp32", [0], 1)["autoencoder_sha256"]
