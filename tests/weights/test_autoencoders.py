"""The autoencoder that made the latents decodes them: diffusers' classes, LDM's files, one's own decoder, or none."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import torch
import training_runs
from closed_forms import amplitude_of
from conftest import ROOT, change_record, run_command, save_vae
from own_code import bright
from safetensors.torch import load_file, save_file
from spoils import without_hashes
from test_published_parity import assert_equal, published, wave

import sample
from autoencoder import SD_VAE_SCALE, Convention, DiffusersAutoencoder, OwnDecoder, pixels_to_images
from runtime.files import sha256
from scoring import image_sets
from weights import autoencoders

VAVAE = published("vavae")
IMAGES = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
WEIGHTS = "diffusion_pytorch_model.safetensors"
MEAN, STD = (0.3, -0.2, 0.1, -0.4), (0.5, 1.5, 0.8, 0.6)
# what config.json says of the latents, and the convention that this means
FORMS = {
    "plain": ({}, Convention(SD_VAE_SCALE)), "one scale": ({"scaling_factor": 2.0}, Convention(2.0)),
    "scale and shift": ({"scaling_factor": 1.5, "shift_factor": 0.25}, Convention(1.5, 0.25)),
    "statistics": ({"scaling_factor": 1.2, "latents_mean": MEAN, "latents_std": STD}, Convention(1.2, 0.0, MEAN, STD)),
}


def make_network(form: str, folder: Path) -> str:
    return str(save_vae(folder, levels=4, **FORMS[form][0]))


@pytest.fixture(scope="module")
def vavae(tmp_path_factory) -> Path:
    """A weights file of VA-VAE's keys, as a training run leaves it, without statistics beside it."""
    file = tmp_path_factory.mktemp("vavae") / "vavae.pt"
    state = {key: wave(tuple(shape), k, amplitude_of(torch.empty(shape)))
             + (1.0 if "norm" in key and key.endswith("weight") else 0.0)
             for k, (key, shape) in enumerate(VAVAE["keys"])}  # as the published side's
    others = {"loss.logvar": torch.zeros(()), "foundation_model.model.cls_token": torch.zeros(3),
              "linear_proj.weight": torch.zeros(3)}
    torch.save({"state_dict": state | others, "global_step": 3}, file)
    return file


def decoder_of(name, shape=(4, 4, 4), convention=None, **options):
    return autoencoders.load_decoder(str(name), shape, convention, **options)


# ---- encoding and decoding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_images_are_encoded_and_decoded_as_the_network_does_by_itself(form, tmp_path):
    name, convention = make_network(form, tmp_path), FORMS[form][1]
    loaded = autoencoders.load_autoencoder(name)
    assert loaded.convention == convention == autoencoders.own_convention(name)

    encoded = loaded.vae.encode(IMAGES.permute(0, 3, 1, 2) / 127.5 - 1).latent_dist
    z, spread = encoded.mean, encoded.std
    offset, divisor = (torch.tensor(numbers or (default,)).float().view(-1, 1, 1) for numbers, default in (
        (convention.latents_mean, 0.0), (convention.latents_std, 1.0)))
    mean, std = loaded.encode(IMAGES)
    assert mean.dtype == std.dtype == torch.float32 and mean.shape == std.shape == z.shape
    torch.testing.assert_close(mean, (z - convention.shift - offset) / divisor * convention.scale)
    torch.testing.assert_close(std, (spread / divisor * convention.scale).expand_as(std))

    expected = pixels_to_images(loaded.vae.decode(z).sample)
    decoder = decoder_of(name, mean.shape[1:], convention)
    assert (decoder.decode(mean).int() - expected.int()).abs().max() <= 1 and expected.float().std() > 3
    decoder.convention = Convention()
    assert (decoder.decode(mean).int() - expected.int()).abs().max() > 4


@pytest.mark.parametrize(("dtype", "levels"), [(torch.bfloat16, 12), (torch.float16, 2)])
def test_half_precision_returns_float32_and_rounds_the_same_latents_and_images(dtype, levels, tmp_path):
    name = make_network("plain", tmp_path)
    exact, half = autoencoders.load_autoencoder(name), autoencoders.load_autoencoder(name, dtype=dtype)
    (mean, _), (rough, std) = exact.encode(IMAGES), half.encode(IMAGES)
    assert rough.dtype == std.dtype == torch.float32 and 0 < (rough - mean).abs().max() < 0.1 * mean.abs().max()
    latents = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0)) * SD_VAE_SCALE
    assert 0 < (half.decode(latents).int() - exact.decode(latents).int()).abs().max() <= levels


def test_decoding_in_pieces_returns_the_same_images_and_never_more_at_once(tmp_path, monkeypatch):
    name, latents, sizes = make_network("scale and shift", tmp_path), torch.randn(7, 4, 4, 4), []
    decode = DiffusersAutoencoder._decode
    monkeypatch.setattr(DiffusersAutoencoder, "_decode", lambda self, z: sizes.append(len(z)) or decode(self, z))
    whole = decoder_of(name).decode(latents)
    monkeypatch.setattr("autoencoder.PIXELS_AT_ONCE", 2 * 32 * 32)  # the default counts pixels
    for batch_size, pieces in ((3, [3, 3, 1]), (7, [7]), (100, [7]), (None, [2, 2, 2, 1])):
        sizes.clear()
        images = decoder_of(name, batch_size=batch_size).decode(latents)
        assert sizes == pieces and (images.int() - whole.int()).abs().max() <= 1
    assert (whole[0].int() - whole[1].int()).abs().max() > 4


def test_an_autoencoder_that_overflows_in_fp16_is_a_line_and_not_black_images(tmp_path):
    name, large = make_network("scale and shift", tmp_path), torch.full((2, 4, 4, 4), 6e5)  # beyond what fp16 holds
    decoder = decoder_of(name, dtype=torch.float16)
    assert decoder_of(name).decode(large, strict=True).shape == (2, 32, 32, 3)
    with pytest.raises(ValueError, match="pixels that are not finite: set decode_precision=fp32 or bf16"):
        decoder.decode(large, strict=True)
    assert decoder.decode(large).shape == (2, 32, 32, 3)  # in training it is only a grid


# ---- VA-VAE against the published code ------------------------------------------------------------------------------


def test_vavae_encodes_and_decodes_as_the_published_code_does(vavae, tmp_path):
    file = tmp_path / "vavae.safetensors"
    save_file(torch.load(vavae, weights_only=True)["state_dict"], file)
    for path in (vavae, file):
        loaded = decoder_of(path, (8, 4, 4), Convention())
        assert (loaded.channels, loaded.downsample) == (8, 4)
        with torch.no_grad():
            assert_equal(loaded.vae.encode(wave((1, 3, 16, 16), 3)).latent_dist.parameters, VAVAE["moments"]["values"])
            assert_equal(loaded._decode(wave((1, 8, 4, 4), 5, math.sqrt(2))), VAVAE["decoded"]["values"])
    mean, std = torch.linspace(-1, 1, 8), torch.linspace(0.5, 2, 8)
    torch.save({"mean": mean.view(1, -1, 1, 1), "std": std.view(1, -1, 1, 1)}, tmp_path / "latents_stats.pt")
    convention = autoencoders.load_autoencoder(str(file)).convention
    assert convention == Convention(1.0, 0.0, tuple(mean.tolist()), tuple(std.tolist()))


# ---- mistakes -------------------------------------------------------------------------------------------------------


def changed(**config):
    """Changes the config.json of a folder."""
    return lambda folder: change_record(folder, "config.json", **config)


def rewritten(change):
    """Changes the tensors of a folder."""
    return lambda folder: save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


@pytest.mark.parametrize(("spoil", "says"), [
    (rewritten(lambda tensors: {key: tensors[key] for key in tensors if key != "encoder.conv_in.bias"}),
     "lack 1 tensors, encoder.conv_in.bias"),
    (rewritten(lambda tensors: tensors | {"encoder.conv_in.bias": torch.zeros(3)}), "is not .*that fit.*expected"),
    (changed(_class_name="os.system"), "has the class os.system, but only AutoencoderKL can be read"),
    (changed(latents_mean=[0.0] * 4), "latents_mean has 4 numbers and latents_std 0"),
    (changed(latents_mean=[0.0] * 5, latents_std=[1.0] * 5), "5 numbers each, but the latents have 4 channels"),
    (changed(latents_mean=[0.0] * 4, latents_std=[1.0, 0.0, 1.0, 1.0]), "are not all numbers above 0"),
    (changed(scaling_factor=None), "config.json: scale=null: it"),
    (lambda folder: (folder / "config.json").unlink(), "nor a folder with config.json or vae/config.json"),
    (lambda folder: (folder / WEIGHTS).rename(folder / "weights.bin"), "holds no diffusion_pytorch_model.s.*No pickle"),
    (shutil.rmtree, r"is neither one of identity, sd_vae_ema, sd_vae_mse nor a file .* or vae/config\.json\.$"),
])
def test_a_folder_that_is_no_complete_autoencoder_is_refused(tmp_path, spoil, says):
    spoil(Path(make_network("plain", tmp_path / "vae")))
    with pytest.raises(ValueError, match=says):
        autoencoders.load_autoencoder(str(tmp_path / "vae"))


# ---- the forms that people have -------------------------------------------------------------------------------------


def test_a_pipelines_folder_and_a_folder_of_one_variant_are_read_as_the_autoencoder(tmp_path):
    vae = make_network("one scale", tmp_path / "pipeline/vae")
    (tmp_path / "pipeline/model_index.json").write_text('{"_class_name": "DiTPipeline", "vae": ["diffusers", "x"]}')
    tensors = load_file(Path(vae, WEIGHTS))
    for folder, variants in {"half": ("fp16",), "two": ("fp16", "ema")}.items():
        shutil.copytree(vae, tmp_path / folder)
        (tmp_path / folder / WEIGHTS).unlink()
        for variant in variants:
            save_file({key: value.half() for key, value in tensors.items()},
                      tmp_path / folder / f"diffusion_pytorch_model.{variant}.safetensors")
    latents = torch.randn(2, 4, 4, 4)
    expected = decoder_of(vae).decode(latents)
    for name in (str(tmp_path / "pipeline"), str(tmp_path / "half")):
        loaded = decoder_of(name)
        assert autoencoders.own_convention(name) == loaded.convention == Convention(2.0)
        assert loaded.dtype == torch.float32
        assert (loaded.decode(latents).int() - expected.int()).abs().max() <= 1
    with pytest.raises(ValueError, match=r"two holds \S+.ema.safetensors and \S+.fp16.safetensors: get diffusion"):
        decoder_of(tmp_path / "two")


def test_stable_diffusions_single_file_is_read_as_diffusers_reads_it_and_needs_only_its_scale(tmp_path):
    """The file alone has LDM's keys, as in a whole pipeline's file. The line that asks for the scale works as it is."""
    import diffusers

    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(block_out_channels=(32,) * 4, down_block_types=("DownEncoderBlock2D",) * 4,
                                  up_block_types=("UpDecoderBlock2D",) * 4)
    vae.save_pretrained(tmp_path / "vae")
    ldm = {autoencoders.ldm_key(key, 4): value for key, value in vae.state_dict().items()}
    ldm = {key: value[:, :, None, None] if value.ndim == 2 else value for key, value in ldm.items()}  # as convolutions
    files = [tmp_path / "my files" / f"{name}.safetensors" for name in ("vae-ft-mse-840000-ema-pruned", "v1-5-pruned")]
    files[0].parent.mkdir()
    save_file(ldm | {"model_ema.decay": torch.ones(())}, files[0])
    save_file({f"first_stage_model.{key}": value for key, value in ldm.items()}, files[1])
    with pytest.raises(ValueError, match="does not record how its latents are scaled") as refused:
        autoencoders.load_autoencoder(str(files[0]))
    subprocess.run(str(refused.value).partition("as in: ")[2], shell=True, check=True)
    theirs = diffusers.AutoencoderKL.from_single_file(str(files[0]), config=str(tmp_path / "vae")).state_dict()
    for file in files:
        assert autoencoders.own_convention(str(file)) == Convention(SD_VAE_SCALE)
        ours = autoencoders.load_autoencoder(str(file)).vae.state_dict()
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize(("name", "says"), [
    ("sd_vae_ema", "`hf download stabilityai/sd-vae-ft-ema --include 'config.json' --include "
     "'diffusion_pytorch_model.safetensors' --local-dir sd-vae-ft-ema`, then name ./sd-vae-ft-ema instead"),
    ("stabilityai/sdxl-vae", "`hf download stabilityai/sdxl-vae --include 'vae/.*' --include 'config.json' "
     r"--include 'diffusion_pytorch_model\*.safetensors' --local-dir sdxl-vae`, then name ./sdxl-vae instead"),
])
def test_a_hub_model_that_is_not_here_is_a_line_with_the_download(name, says, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=says):
        autoencoders.load_autoencoder(name)


def test_the_file_that_decodes_is_known_by_its_hash_also_where_it_is_the_default(decoders, monkeypatch, tmp_path):
    default, other = (Path(make_network(form, tmp_path / form)) for form in ("plain", "one scale"))
    monkeypatch.setattr(autoencoders, "from_hub", lambda repo, *names, remedy: default)
    for name, file in {"sd_vae_ema": default / WEIGHTS, str(other): other / WEIGHTS,
                       "python:own_code.bright": ROOT / "tests/own_code.py"}.items():
        record = image_sets.weights_record(name, [0], 1)
        assert record["autoencoder_sha256"] == sha256(file)
    assert autoencoders.sha256_of("identity") is autoencoders.sha256_of("none") is None
    shutil.rmtree(other)
    assert autoencoders.sha256_of(str(other)) is None


# ---- code of one's own, and none at all -----------------------------------------------------------------------------


@pytest.fixture
def decoders(tmp_path, monkeypatch):
    """A module of decoders, which says when it is imported."""
    (tmp_path / "my_decoder.py").write_text(
        "from own_code import bright as decode\n\n"
        "def grey(z):\n    return z[:, :1]\n\n"
        "def bytes(z):\n    return decode(z).byte()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield "python:my_decoder.decode"
    sys.modules.pop("my_decoder", None)


def test_a_custom_decoder_gets_the_autoencoders_latents_where_the_user_names_it(decoders):
    latents = torch.linspace(-1, 1, 2 * 4 * 16).view(2, 4, 4, 4)
    with pytest.raises(ValueError, match="runs code, so it is loaded only if the command names it"):
        decoder_of(decoders)
    with pytest.raises(ValueError, match="can only decode"):
        autoencoders.load_autoencoder(decoders)
    assert "my_decoder" not in sys.modules
    loaded = decoder_of(decoders, convention=Convention(2.0, 0.25), trusted=True)
    assert torch.equal(loaded.decode(latents), pixels_to_images(bright(latents / 2 + 0.25)))
    assert (loaded.channels, loaded.downsample) == (4, 2)
    assert torch.equal(decoder_of(decoders, trusted=True).decode(latents), pixels_to_images(bright(latents)))
    elsewhere = OwnDecoder("python:x", lambda z: torch.zeros(len(z), 3, 8, 8), (4, 4, 4), "meta")  # meta: a GPU
    assert elsewhere.decode(torch.zeros(2, 4, 4, 4, device="meta")).device.type == "meta"


@pytest.mark.parametrize("name, says", [
    ("python:no_such.decode", "No module named.*: start the command with PYTHONPATH="),
    ("python:my_decoder.grey", r"maps one latent \(1, 4, 4, 4\) to Tensor \(1, 1, 4, 4\).*: return one"),
    ("python:my_decoder.bytes", "torch.uint8: return one"),
])
def test_what_is_no_decoder_is_refused(decoders, name, says):
    with pytest.raises(ValueError, match=says):
        decoder_of(name, trusted=True)


def test_the_example_of_a_decoder_is_one():
    example = decoder_of("python:examples.own_decoder.decode", trusted=True)
    assert example.decode(torch.ones(1, 4, 4, 4)).shape == (1, 32, 32, 3)


def test_latents_that_only_their_owner_can_decode_are_trained_on_and_sampled(shapes, decoders, tmp_path):
    folder = Path(shutil.copytree(shapes, tmp_path / "set"))
    for file in folder.glob("latents-*.npy"):
        np.save(file, np.load(file)[:, [0, 1, 2, 0]])
    without_hashes(folder)
    change_record(folder, autoencoder="none", shape=[4, 16, 16], scale=2.0, shift=0.5, latents_mean=[0.1] * 4,
                  latents_std=[2.0] * 4)
    printed = training_runs.trained(tmp_path / "run", folder, "data=folder", "steps=1", "samples.every=1")
    assert "autoencoder=none: these latents cannot be decoded here, so no grids are sampled" in printed
    settings = {"checkpoint": tmp_path / "run", "num_steps": 2, "seeds": "0-4", "cpu": True}
    for autoencoder, says in ((None, "autoencoder=none: .*out=x.npz latents=true"), ("identity", "3 channels")):
        with pytest.raises(SystemExit, match=says):
            run_command(sample.main, "sample.py", **settings, out="images.npz", autoencoder=autoencoder)
    run_command(sample.main, "sample.py", **settings, out="x.npz", latents=True)
    run_command(sample.main, "sample.py", **settings, out="images.npz", autoencoder=decoders)
    latents = torch.from_numpy(np.load("x.npz")["latents"])
    # What a decoder of one's own makes of a checkpoint's images is what it makes of these latents.
    assert torch.equal(torch.from_numpy(np.load("images.npz")["arr_0"]), pixels_to_images(
        bright((latents / 2 * 2 + 0.1) + 0.5)))
