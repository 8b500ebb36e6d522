"""What is exported is read by those that it is for, with the same numbers, and by us again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, run_command, save_vae
from diffusers import DiTTransformer2DModel

import sample
from runtime import files
from scripts import export
from weights import checkpoint as checkpoints
from weights.loading import load_trained
from weights.others import from_diffusers, to_diffusers
from weights.records import build_network

NETWORK = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=32, depth=3, num_heads=2, num_classes=5,
               init="xavier", routes=[dict(selection_ratio=0.5, start_layer_idx=1, end_layer_idx=-1)])
EDM = {"name": "edm", "P_mean": -1.0, "P_std": 1.2, "sigma_data": 0.4}
RF = {"name": "rf", "timestep_sampling": "uniform", "cosine_weight": 0.0}


def network(**changes):
    torch.manual_seed(0)
    net = build_network(NETWORK | changes)
    for p in net.parameters():  # biases too, and modulations that do something
        torch.nn.init.normal_(p, std=0.15)
    return net.eval()


def save_run(run, diffusion, autoencoder="identity", convention=None, **changes):
    net = network(**changes)
    recorded = {"network": NETWORK | changes, "diffusion": diffusion, "step": 7,
                "data": {"autoencoder": str(autoencoder), "class_names": list("abcde"), "display_names": None,
                         "convention": convention}}
    other = {name: value + 0.01 for name, value in net.state_dict().items()}
    checkpoints.save(checkpoints.step_folder(run, 7), {"ema": net.state_dict(), "model": other}, recorded)
    return run


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    """A tiny autoencoder of Stable Diffusion's kind, random."""
    return save_vae(tmp_path_factory.mktemp("vae"), scaling_factor=0.5)


def exported(run, to, out, **settings):
    run_command(export.main, "export.py", f"checkpoint={run}", f"to={to}", f"out={out}", **settings)
    return out


def drawn(checkpoint, out, *overrides):
    """What sample.py draws of seeds 0 to 4, uint8."""
    run_command(sample.main, "sample.py", "cpu=true", f"checkpoint={checkpoint}", "seeds=0-4", f"out={out}",
                "batch_size=5", *overrides)
    return np.load(out)["arr_0"]


# What somebody does who has diffusers and folders alone.
ELSEWHERE = """
import json, sys
import numpy as np, torch
from diffusers import DiffusionPipeline
found = {}
for name, (folder, call) in json.loads(sys.argv[1]).items():
    pipe = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    x = torch.randn(6, pipe.transformer.config.in_channels, 8, 8, generator=torch.Generator().manual_seed(3))
    t = torch.tensor([-3.3, -1.0, 0.0, 0.25, 7.5, 999.0])
    with torch.no_grad():
        [of_network] = pipe.transformer(x, timestep=t, class_labels=torch.arange(6), return_dict=False)
        found[f"{name} network"] = of_network.numpy()
    generator = [torch.Generator().manual_seed(seed) for seed in range(5)]
    found[f"{name} images"] = np.stack([np.asarray(image) for image in pipe([0, 1, 2, 3, 4], generator, **call).images])

    def draw(pipe, labels, generator):
        return np.stack([np.asarray(image) for image in pipe(labels, generator, **call).images])

    seeded = lambda: torch.Generator().manual_seed(7)
    found[f"{name} single"] = np.concatenate([draw(pipe, *given) for given in (
        (3, seeded()), (3, [seeded()]), (np.int64(3), seeded()), ([3], seeded()))])
    noise = [torch.Generator().manual_seed(7)] * 2  # one after the other draws what one draw of both does
    found[f"{name} one for two"] = np.concatenate([
        draw(pipe, [1, 2], seeded()), draw(pipe, torch.tensor([1, 2]), noise)])
    torch.manual_seed(7)
    unseeded = draw(pipe, [1, 2], None)
    found[f"{name} none"] = np.concatenate([unseeded, draw(pipe, [1, 2], None)])
    for bad in ([], [6], 1.5, -1):
        try:
            pipe(bad, seeded())
            raise SystemExit(f"{bad} was drawn")
        except ValueError as error:
            assert "class_labels=" in str(error), error
    pipe.save_pretrained(f"saved-{name}")
    again = DiffusionPipeline.from_pretrained(f"saved-{name}", trust_remote_code=True)
    again.save_pretrained(f"saved-{name}")  # over itself
    again = DiffusionPipeline.from_pretrained(f"saved-{name}", trust_remote_code=True)
    found[f"{name} again"] = draw(again, [0, 1, 2, 3, 4], [torch.Generator().manual_seed(seed) for seed in range(5)])
    found[f"{name} latents"] = pipe(3, seeded(), output_type="latent", **call).images.numpy()
pipe = DiffusionPipeline.from_pretrained("saved-edm", trust_remote_code=True)
for name, form in {"shards": {"max_shard_size": "50KB"}, "variant": {"variant": "fp16"},
                   "both": {"variant": "fp16", "max_shard_size": "50KB"}}.items():
    pipe.save_pretrained(f"saved-{name}", **form)
half = DiffusionPipeline.from_pretrained("saved-edm", trust_remote_code=True, torch_dtype=torch.float16)
half.save_pretrained("saved-half")
call = json.loads(sys.argv[1])["edm"][1]
found["half latents"] = half(3, torch.Generator().manual_seed(7), output_type="latent", **call).images.float().numpy()
pipe.save_pretrained(json.loads(sys.argv[1])["edm"][0])  # over the first export
pipes = {name: DiffusionPipeline.from_pretrained(f"saved-{name}", trust_remote_code=True)
         for name in ("edm", "rf", "pixels")}
for i, (name, call) in enumerate(json.loads(sys.argv[3])):
    try:
        given = (0,) if "generator" in call else (call.pop("class_labels", 0), seeded())
        pipes[name](*given, **call)
        found[f"refused {i}"] = "nothing"
    except ValueError as error:
        found[f"refused {i}"] = str(error)
refused = []
for folder in json.loads(sys.argv[2]):  # of networks whose null label was never trained
    pipe = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    pipe([0], num_inference_steps=1, guidance_scale=1.0)
    try:
        pipe([0], num_inference_steps=1, guidance_scale=2.0)
    except ValueError as error:
        refused.append(str(error))
ours = {"dit", "blocks", "sample", "trained", "settings", "edm"} & {*sys.modules}
assert not ours and not any("timm" in name for name in sys.modules), ours
np.savez("found.npz", refused=refused, **found)
"""
CASES = {  # diffusion, changes of the network, arguments of the pipeline and of sample.py
    "edm": (EDM, {}, {"num_inference_steps": 4}, ["num_steps=4"]),
    "guided": (EDM, {}, {"num_inference_steps": 3, "guidance_scale": 2.0, "interval": [0.1, 20.0],
                         "sampler": {"S_churn": 2.0, "sigma_max": 40.0}},
               ["num_steps=3", "guidance=cfg", "scale=2.0", "interval=[0.1,20.0]", "sampler.S_churn=2.0",
                "sampler.sigma_max=40.0"]),
    "rf": (RF, {}, {"num_inference_steps": 3, "guidance_scale": 1.5, "sampler": {"solver": "heun"}},
           ["num_steps=3", "guidance=cfg", "scale=1.5", "sampler.solver=heun"]),
    "pixels": ({"name": "ddpm"}, {"in_channels": 3, "learn_sigma": True},
               {"num_inference_steps": 3, "guidance_scale": 1.5, "channels": 2, "sampler": {"solver": "ancestral"}},
               ["num_steps=3", "guidance=cfg", "scale=1.5", "channels=2", "sampler.solver=ancestral"]),
}  # fmt: skip


REFUSED = [  # pipeline, arguments, the error
    ("edm", {"output_type": "latents"}, "output_type='latents' is none of pil, np, pt, latent"),
    ("edm", {"guidance_scale": 2.0, "interval": [5, 1]},
     "interval=[5, 1] does not fit the sampler's noise levels, from 80 to 0.002"),
    ("edm", {"guidance_scale": 2.0, "interval": [100, 200]}, "does not fit"),
    ("edm", {"guidance_scale": 2.0, "interval": [1]}, "interval=[1]"),
    ("rf", {"guidance_scale": 2.0, "interval": [0.3, 3.0]}, "A sigma of EDM is t = sigma / (1 + sigma)"),
    ("edm", {"interval": [0.3, 3.0]}, "changes nothing without guidance_scale"),
    ("edm", {"channels": 3}, "changes nothing without guidance_scale"),
    ("edm", {"guidance_scale": 2.0, "channels": 5}, "channels=5 must be from 1 to 4"),
    ("edm", {"guidance_scale": 2.0, "channels": 2.0}, "channels=2.0"),
    ("edm", {"guidance_scale": "2"}, "guidance_scale='2'"),
    ("edm", {"guidance_scale": float("nan")}, "guidance_scale=nan"),
    ("edm", {"num_inference_steps": 0}, "num_inference_steps=0"),
    ("edm", {"num_inference_steps": 40.5}, "num_inference_steps=40.5"),
    ("edm", {"num_inference_steps": 20_000}, "from 1 to 10000"),
    ("edm", {"num_inference_steps": "4"}, "num_inference_steps='4'"),
    ("edm", {"generator": 0}, "generator=0 is no torch.Generator"),
    ("edm", {"generator": [0]}, "generator=0 is no torch.Generator"),
    ("edm", {"class_labels": "a"}, "class_labels='a' must be integers: 0 … 4, or 5 for no class"),
    ("edm", {"class_labels": True}, "class_labels=True"),
    ("edm", {"sampler": {"solver": "heun"}}, "sampler.solver=heun: the sampler of EDM has no such setting"),
    ("edm", {"sampler": "heun"}, "sampler='heun'"),
    ("edm", {"sampler": {"sigma_min": 90}}, "is not below sampler.sigma_max"),
    ("edm", {"sampler": {"rho": "7"}}, "sampler.rho='7'"),
    ("edm", {"sampler": {"rho": 0}}, "sampler.rho=0: give a number from 0.1 to 100"),
    ("edm", {"sampler": {"S_noise": 1.1}}, "set sampler.S_churn=40"),
    ("edm", {"sampler": {"num_steps": 3}}, "no such setting"),
    ("rf", {"sampler": {"solver": "ancestral"}}, "solver=ancestral is none of euler"),
    ("rf", {"sampler": {"shift": "big"}}, "sampler.shift='big'"),
    ("pixels", {"sampler": {"solver": "ancestral"}, "num_inference_steps": 1001}, "num_steps=1001"),
]  # fmt: skip


@pytest.fixture(scope="module")
def elsewhere(vae, tmp_path_factory):
    """Runs and what is made of their exports in a process, in another folder, whose path has nothing of ours."""
    home = tmp_path_factory.mktemp("elsewhere")
    folders = {}
    for name, (diffusion, changes, call, _) in CASES.items():
        conventions = {"rf": {"scale": 2.0, "shift": 0.1, "latents_mean": [0.5, 0.0, -0.5, 0.1],
                              "latents_std": [1.0, 2.0, 0.5, 1.5]},
                       "pixels": {"scale": 0.5, "shift": 0.1}}
        run = save_run(home / "runs" / name, diffusion, "identity" if changes else vae, conventions.get(name),
                       **changes)
        folders[name] = (str(exported(run, "diffusers", home / f"folder-{name}")), call)
    unguided = []
    for name, changes in (("plain", {}), ("with a head", {"head_block": 1})):
        run = save_run(home / "runs" / name, RF, in_channels=3, **changes)
        folder = checkpoints.step_folder(run, 7)
        checkpoints.write_meta(folder, checkpoints.read_meta(folder) | {"null_label": False})
        unguided.append(str(exported(run, "diffusers", home / f"folder-{name}")))
    shutil.move(home / "runs", home / "gone")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run([sys.executable, "-c", ELSEWHERE, json.dumps(folders), json.dumps(unguided),
                             json.dumps([case[:2] for case in REFUSED])], cwd=home, text=True, capture_output=True,
                            env=environment | {"HF_MODULES_CACHE": str(home / "modules"), "HF_HUB_OFFLINE": "1"})
    assert result.returncode == 0, result.stderr
    return home / "gone", np.load(home / "found.npz")


def outputs_of(net):
    x = torch.randn(6, net.in_channels, net.input_size, net.input_size, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return net(x, torch.tensor([-3.3, -1.0, 0.0, 0.25, 7.5, 999.0]), torch.arange(6)).numpy()


# ---- to=diffusers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_diffusers_alone_loads_the_folder_and_samples_our_images(name, elsewhere, tmp_path):
    runs, found = elsewhere
    _, changes, _, overrides = CASES[name]
    expected = outputs_of(network(**changes))
    assert abs(found[f"{name} network"] - expected).max() < 1e-5 * abs(expected).max()
    images = drawn(runs / name, tmp_path / "ours.npz", *overrides).astype(int)
    assert abs(found[f"{name} images"] - images).max() <= 1 and images.std() > 5


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_takes_one_generator_a_list_or_none_and_a_single_label(name, elsewhere):
    _, found = elsewhere
    single, both, none = (found[f"{name} {which}"].astype(int) for which in ("single", "one for two", "none"))
    assert single.shape[0] == 4 and all(np.array_equal(single[0], image) for image in single)
    assert len(none) == 4 and abs(none[:2] - none[2:]).max() > 1, "the second call goes on with torch's own generator"
    if "sampler" not in CASES[name][2] or name == "rf":  # no noise on the way
        assert abs(both[:2] - none[:2]).max() <= 1, "torch.manual_seed(7) is a generator of seed 7"
        assert abs(both[:2] - both[2:]).max() <= 1


@pytest.mark.parametrize("name", CASES)
def test_what_save_pretrained_writes_loads_and_samples_the_same_bits(name, elsewhere):
    _, found = elsewhere
    assert np.array_equal(found[f"{name} again"], found[f"{name} images"])


def test_a_pipeline_returns_latents_where_they_are_asked_for(elsewhere):
    _, found = elsewhere
    assert found["edm latents"].shape == (1, 4, 8, 8) and found["edm latents"].dtype == np.float32
    assert abs(found["edm latents"]).max() > 0.1


def test_a_pipeline_in_float16_samples_the_same_image_but_for_rounding(elsewhere):
    """AUTOMATIC1111/stable-diffusion-webui#6510: torch_dtype=torch.float16, and NaN or other images."""
    _, found = elsewhere
    assert 0 < abs(found["half latents"] - found["edm latents"]).max() < 0.03


@pytest.mark.parametrize("i", range(len(REFUSED)), ids=[f"{name} {call}" for name, call, _ in REFUSED])
def test_a_pipeline_refuses_what_sample_py_refuses(i, elsewhere):
    said = str(elsewhere[1][f"refused {i}"])
    assert REFUSED[i][2] in said and "\n" not in said


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_that_diffusers_saved_again_is_sampled_by_us_as_the_run_is(name, elsewhere, tmp_path):
    runs, _ = elsewhere
    saved, overrides = runs.with_name(f"saved-{name}"), CASES[name][3]
    assert not (saved / "meta.json").exists()
    ours = drawn(runs / name, tmp_path / "ours.npz", *overrides)
    for given in (saved, saved / "transformer", saved / "transformer/diffusion_pytorch_model.safetensors"):
        assert np.array_equal(drawn(given, tmp_path / "saved.npz", *overrides), ours)
    again, first = load_trained(saved), load_trained(runs / name)
    assert (again.class_names, again.display_names) == (first.class_names, first.display_names)
    assert (again.step, again.weights) == (7, "ema")
    assert again.recorded["diffusion"] == first.recorded["diffusion"] and again.net.routes == first.net.routes
    with pytest.raises(ValueError, match="diffusion_name=sit is for weights without a record"):
        load_trained(saved, diffusion="sit")


@pytest.mark.parametrize("form", ["shards", "variant", "both", "half", "over itself"])
def test_shards_variants_halves_and_an_export_saved_over_itself_are_read_with_their_record(form, elsewhere, tmp_path):
    runs, _ = elsewhere
    saved = shutil.copytree(runs.with_name("folder-edm" if form == "over itself" else f"saved-{form}"),
                            tmp_path / "renamed")
    images, ours = (drawn(given, tmp_path / "x.npz", "num_steps=4").astype(int) for given in (saved, runs / "edm"))
    assert abs(images - ours).max() <= (2 if form == "half" else 0)


def test_a_pipeline_decodes_with_its_own_autoencoder_where_it_is_copied_to(elsewhere, vae, tmp_path):
    run = save_run(tmp_path / "run", EDM, shutil.copytree(vae, tmp_path / "vae"), {"scale": 2.0})
    ours = drawn(run, tmp_path / "x.npz", "num_steps=2")
    copied = shutil.move(exported(run, "diffusers", tmp_path / "folder"), tmp_path / "copied")
    shutil.rmtree(tmp_path / "vae")
    assert np.array_equal(drawn(copied, tmp_path / "x.npz", "num_steps=2"), ours)
    assert str(tmp_path) not in (copied / "meta.json").read_text()


def test_a_pipeline_is_not_guided_by_a_null_label_that_was_never_trained(elsewhere):
    _, found = elsewhere
    assert ["guidance by the label needs a null label" in said for said in found["refused"].tolist()] == [True, True]


def test_the_names_of_diffusers_and_back_are_the_same_tensors():
    state = network().state_dict()
    theirs = to_diffusers(state, 3)
    stock = DiTTransformer2DModel(2, 16, 4, num_layers=3, sample_size=8, num_embeds_ada_norm=5).state_dict()
    assert {name: value.shape for name, value in theirs.items() if name != "pos_embed.pos_embed"} == {
        name: value.shape for name, value in stock.items()}
    back = from_diffusers(theirs)
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
    del theirs["transformer_blocks.1.attn1.to_k.bias"]
    with pytest.raises(ValueError, match="but transformer_blocks.1.attn1.to_k.bias is not among them"):
        from_diffusers(theirs)


@pytest.mark.parametrize("to", ["diffusers", "hub"])
def test_exported_weights_are_sampled_again_by_us(to, vae, tmp_path):
    run = save_run(tmp_path / "run", RF, vae)
    folder = exported(run, to, tmp_path / "folder", weights="model")
    trained = load_trained(folder)
    assert (trained.step, trained.weights, trained.class_names) == (7, "model", list("abcde"))
    assert trained.recorded == load_trained(run).recorded
    images = [drawn(each, tmp_path / "x.npz", "num_steps=2", *more)
              for each, more in ((folder, ()), (run, ["weights=model"]), (run, ()))]
    assert np.array_equal(images[0], images[1]) and not np.array_equal(images[0], images[2])
    with pytest.raises(ValueError, match="holds weights=model, not weights=ema"):
        load_trained(folder, "ema")


@pytest.mark.parametrize("to", ["diffusers", "hub"])
def test_weights_in_half_precision_have_half_the_bytes_and_sample_almost_the_same_images(to, tmp_path):
    run = save_run(tmp_path / "run", EDM, in_channels=3)
    found = {dtype: exported(run, to, tmp_path / dtype, dtype=dtype) for dtype in ("fp32", "fp16", "bf16")}
    sizes = {dtype: sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
             for dtype, folder in found.items()}
    assert 0.48 < sizes["fp16"] / sizes["fp32"] < 0.6 and sizes["bf16"] < 0.6 * sizes["fp32"]
    assert {p.dtype for p in load_trained(found["fp16"]).net.parameters()} == {torch.float32}
    images = {dtype: drawn(folder, tmp_path / "x.npz", "num_steps=2").astype(int) for dtype, folder in found.items()}
    apart = {dtype: np.abs(images[dtype] - images["fp32"]).mean() for dtype in ("fp16", "bf16")}
    assert 0 < apart["bf16"] < 1 and apart["fp16"] < 0.1
    with pytest.raises(ValueError, match="dtype=fp16 cannot hold these weights, .*: set dtype=bf16"):
        export.stored({"weight": torch.tensor([1e5])}, "fp16")
    assert export.stored({"weight": torch.tensor([1e5])}, "bf16")


# ---- to=dit ---------------------------------------------------------------------------------------------------------


def test_the_pt_holds_tensors_under_the_names_of_facebookresearch(tmp_path, capsys):
    run = save_run(tmp_path / "run", {"name": "edm"}, in_channels=3)
    state = torch.load(exported(run, "dit", tmp_path / "x.pt"), weights_only=True)
    of_a_block = ["adaLN_modulation.1", "attn.proj", "attn.qkv", "mlp.fc1", "mlp.fc2"]
    layers = ["final_layer.adaLN_modulation.1", "final_layer.linear", "t_embedder.mlp.0", "t_embedder.mlp.2",
              "x_embedder.proj", *(f"blocks.{i}.{name}" for i in range(3) for name in of_a_block)]
    assert {*state} == {"pos_embed", "y_embedder.embedding_table.weight",
                        *(f"{name}.{kind}" for name in layers for kind in ("weight", "bias"))}
    ours = network(in_channels=3).state_dict()
    assert isinstance(state, dict) and all(torch.equal(value, ours[name]) for name, value in state.items())
    printed = capsys.readouterr().out
    words = printed.split("sample.py checkpoint=")[1].rstrip(".\n").split()
    assert np.array_equal(drawn(words[0], tmp_path / "1.npz", *words[1:], "num_steps=2"),
                          drawn(run, tmp_path / "2.npz", "num_steps=2"))
    exported(save_run(tmp_path / "other", EDM, in_channels=3), "dit", tmp_path / "y.pt")
    said = capsys.readouterr().out
    assert "cannot express P_mean=-1.0, sigma_data=0.4: keep" in said and "convention" not in said


@pytest.mark.parametrize(("convention", "is_lost"), [
    ({"scale": 2.0, "shift": 0.1}, True), ({"scale": 0.5, "shift": 0.0}, False), (None, False)])
def test_the_pt_says_that_a_convention_of_the_latents_is_lost(convention, is_lost, vae, tmp_path, capsys):
    exported(save_run(tmp_path / "run", {"name": "edm"}, vae, convention), "dit", tmp_path / "x.pt")
    printed = capsys.readouterr().out
    assert ("cannot express the convention of its latents (scale=2.0, shift=0.1;" in printed) == is_lost


def test_the_pt_says_that_a_null_label_was_never_trained(tmp_path, capsys):
    folder = checkpoints.step_folder(save_run(tmp_path / "run", {"name": "edm"}, in_channels=3), 7)
    checkpoints.write_meta(folder, checkpoints.read_meta(folder) | {"null_label": False})
    exported(folder, "dit", tmp_path / "x.pt")
    assert "its null label was never trained" in capsys.readouterr().out


# ---- to=hub ---------------------------------------------------------------------------------------------------------


def scored_run(tmp_path):
    run = save_run(tmp_path / "run", EDM, in_channels=3)
    (run / "samples").mkdir()
    shutil.copy(ROOT / "docs" / "quickstart_grid.png", run / "samples" / "step-00000007.png")
    digest = files.sha256(checkpoints.latest(run) / "ema.safetensors")
    for step, fid, weights in ((6, 9.0, digest), (7, 8.0, "of before it was trained anew"), (7, 4.25, digest)):
        files.append_row(run / "results.jsonl", {
            "metrics": {"fid": fid}, "images": 50_000, "commit": "abc", "extractor": {"name": "adm"},
            "reference": {"path": "a/ref.npz"},
            "source": {"step": step, "weights": "ema", "weights_sha256": weights, "guidance": {"scale": 1.5},
                       "num_steps": 40}})
    files.append_row(run / "results.jsonl", {
        "metrics": {"fid": 7.5}, "images": 1000, "extractor": {"name": "adm"}, "reference": {"path": "a/ref.npz"},
        "source": {"step": 7, "weights": "ema", "in_training": True, "guidance": None, "num_steps": 18}})
    return run


def test_a_hubs_folder_has_card_grid_scores_and_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", None)  # nothing is uploaded without a word
    folder = exported(scored_run(tmp_path), "hub", tmp_path / "x", repo="user/x", license="mit")
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n") and "![one row a class](grid.png)" in card
    assert (folder / "grid.png").is_file()
    assert "| fid | 4.25 | 50,000 | scale 1.5 | 40 | adm | ref.npz |" in card and "| 9 |" not in card
    assert "| fid | 7.5 | 1,000 |" in card and "| 8 |" not in card
    assert "blocks 1 to -1 without 50% of the tokens" in card and "hf download user/x --local-dir x" in card
    assert "EDM, P_mean -1.0" in card
    assert [row["commit"] for row in files.read_rows(folder / "scores.jsonl") if "commit" in row] == ["abc"]
    assert {*os.listdir(folder)} == {"README.md", "grid.png", "scores.jsonl", "weights.safetensors", "meta.json"}
    weights = shutil.copy(checkpoints.latest(tmp_path / "run") / "model.safetensors", tmp_path)
    bare = exported(weights, "hub", tmp_path / "bare", diffusion_name="rf", num_heads=2)
    assert load_trained(bare).step is None and load_trained(bare).recorded["diffusion"] == {"name": "rf"}
    assert "have not been scored" in (bare / "README.md").read_text() and not (bare / "grid.png").exists()


@pytest.mark.parametrize("license", [
    "mit", "My licence: v2", "a 'quoted' \"one\"", "two\nlines", "- [x] #1", "Größe: ½", "no", "1.0"])
def test_the_head_of_a_model_card_is_yaml_whatever_the_licence_is_called(license, tmp_path):
    trained = load_trained(save_run(tmp_path / "run", EDM, in_channels=3))
    card = export.model_card(trained, SimpleNamespace(license=license, repo="user/x"), "x", [], has_grid=False)
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["license"] == license and head["tags"] == ["diffusion", "dit", "tread", "class-conditional"]


def test_a_hubs_folder_has_no_path_of_this_machine_and_follows_no_link(tmp_path):
    run = scored_run(tmp_path)
    rows = files.read_rows(run / "results.jsonl")
    rows[2]["reference"]["path"] = "/users/me/secret/ref.npz"
    rows[2]["source"] |= {"checkpoint": str(run), "autoencoder": "~/secret/vae",
                          "weak": {"checkpoint": "C:\\secret\\weak"}, "seeds": "0-9"}
    (run / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = exported(run, "hub", tmp_path / "x")
    kept = files.read_rows(folder / "scores.jsonl")[0]
    assert kept["reference"]["path"] == "ref.npz" and kept["metrics"] == {"fid": 4.25}
    assert kept["source"].items() >= {"checkpoint": "run", "autoencoder": "vae", "weak": {"checkpoint": "weak"},
                                      "seeds": "0-9"}.items()
    for file in folder.rglob("*.[jm]*"):
        assert b"secret" not in file.read_bytes() and str(tmp_path).encode() not in file.read_bytes()
    for name in ("results.jsonl", "samples/step-00000007.png"):
        (run / name).rename(tmp_path / Path(name).name)
        (run / name).symlink_to(tmp_path / Path(name).name)
    linked = exported(run, "hub", tmp_path / "y")
    assert not (linked / "grid.png").exists() and not (linked / "scores.jsonl").exists()


def test_a_folder_is_uploaded_when_it_is_asked_for(tmp_path, monkeypatch, capsys):
    calls = []

    class Hub:
        def create_repo(self, repo, **options):
            calls.append((repo, options))

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            assert (tmp_path / "x" / "meta.json").is_file()
            calls.append((repo_id, folder_path))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    exported(scored_run(tmp_path), "hub", tmp_path / "x", repo="user/x", upload=True)
    assert calls == [("user/x", {"private": True, "exist_ok": True}), ("user/x", str(tmp_path / "x"))]
    assert "https://huggingface.co/user/x" in capsys.readouterr().out


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "says"), [
    (dict(to="diffusers", out="x", autoencoder="python:mine.decode"),
     "is code of your own, which the folder cannot hold"),
    (dict(to="diffusers", out="x", autoencoder="{vae}"), "decodes latents of 4 channels, but these have 3"),
    (dict(to="hub", out="x", autoencoder="no_such_thing"), "autoencoder=no_such_thing is neither one of identity"),
])  # fmt: skip
def test_a_mistake_raises_a_one_line_error_and_writes_nothing(settings, says, vae, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_run(tmp_path / "run", EDM, in_channels=3)
    (tmp_path / "there").mkdir()
    settings = {key: value.format(vae=vae) if isinstance(value, str) else value for key, value in settings.items()}
    with pytest.raises(SystemExit) as ended:
        run_command(export.main, "export.py", checkpoint="run", **settings)
    assert says in str(ended.value)
    assert sorted(os.listdir(tmp_path)) == ["run", "there"] and not os.listdir(tmp_path / "there")


@pytest.mark.parametrize(("to", "changes"), [
    ("dit", dict(block="lightning")), ("diffusers", dict(block="lightning")), ("dit", dict(qk_norm=True)),
    ("diffusers", dict(mlp_ratio=2.0)),
])
def test_what_the_format_cannot_hold_is_refused(to, changes, tmp_path):
    run = save_run(tmp_path / "run", EDM, in_channels=3, **changes)
    with pytest.raises(SystemExit, match=f"to={to} holds DiT's own blocks.*to=hub accepts any"):
        exported(run, to, tmp_path / ("x.pt" if to == "dit" else "x"))
    key, value = next(iter(changes.items()))
    assert load_trained(exported(run, "hub", tmp_path / "hub")).recorded["network"][key] == value


def test_overwriting_replaces_what_an_export_made_and_never_a_run_or_the_weights_themselves(tmp_path):
    run = save_run(tmp_path / "run", EDM, in_channels=3)
    folder, pt = exported(run, "hub", tmp_path / "x"), exported(run, "dit", tmp_path / "x.pt")
    for out, to in ((folder, "hub"), (pt, "dit")):
        before = out.stat().st_ino
        with pytest.raises(SystemExit, match="exists already"):
            exported(run, to, out)
        assert exported(run, to, out, overwrite=True).stat().st_ino != before
    with pytest.raises(SystemExit, match="exists already"):
        exported(folder, "hub", run, overwrite=True)
    with pytest.raises(SystemExit, match="holds the weights that are to be exported"):
        exported(folder, "hub", folder, overwrite=True)
    assert checkpoints.problem(folder) is None
