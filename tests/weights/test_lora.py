"""LoRA: the base does not change, only the adapter is trained, saved and averaged, and both together sample."""

import copy
import importlib.util
import shutil
import sys

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import ROOT, run_command
from safetensors.torch import load_file
from training_runs import write_run

import fid
import sample
import train
from runtime import files
from scripts import benchmark, merge_lora
from training.speed import compile_blocks
from weights import checkpoint as checkpoints
from weights import lora
from weights.loading import load_trained
from weights.records import build_network

pytest.importorskip("peft")
NETWORK = dict(input_size=8, patch_size=2, in_channels=3, hidden_size=32, depth=4, num_heads=2, num_classes=4,
               init="xavier", routes=[dict(selection_ratio=0.5, start_layer_idx=2, end_layer_idx=-2)])
LAYERS = {f"blocks.{i}.{name}" for i in range(4) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}


def network():  # the parent's weights, too
    torch.manual_seed(7)
    return build_network(NETWORK)


def inputs(batch=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, 8, 8, generator=generator), torch.rand(batch, generator=generator), torch.arange(batch)


def adapted(rank=4, **options):
    """A network, and a copy of it with an adapter."""
    base = network()
    net = copy.deepcopy(base)
    lora.attach(net, rank, **options)
    return base, net


def shaken(net):
    """The same with an adapter that does something."""
    for name, p in net.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    return net


def test_an_adapter_starts_as_zero_bit_for_bit_on_every_linear_layer_but_the_modulations():
    base, net = adapted()
    assert {name.split(".lora_")[0] for name, p in net.named_parameters() if p.requires_grad} == LAYERS
    noise = torch.rand(3, 1, 16, generator=torch.Generator().manual_seed(2))
    for options in ({}, {"routes": net.routes, "mask_noise": noise}):
        assert torch.equal(net(*inputs(), **options), base(*inputs(), **options))
    assert not torch.equal(shaken(net)(*inputs()), base(*inputs()))


def test_targets_name_ends_of_layers():
    _, net = adapted(targets=["attn.qkv", "adaLN_modulation.1"])
    names = {name.split(".lora_")[0].split(".", 2)[2] for name, p in net.named_parameters() if p.requires_grad}
    assert names == {"attn.qkv", "adaLN_modulation.1"}


@pytest.mark.parametrize("alpha", [None, 12.0])
def test_base_and_adapter_give_what_the_merged_weights_give(alpha):
    base, net = adapted(alpha=alpha)
    saved = lora.tensors(shaken(net))
    merged = build_network(NETWORK)
    merged.load_state_dict(lora.merge(base.state_dict(), saved, (alpha or 4) / 4))
    given, expected = merged(*inputs()), net(*inputs())
    assert torch.allclose(given, expected, atol=1e-6 * expected.abs().max().item())
    assert not torch.equal(given, base(*inputs()))


def test_each_number_of_tokens_is_one_graph_with_an_adapter(graphs):
    _, net = adapted(targets=["attn.qkv"])
    compile_blocks(net, True)
    for _ in range(2):
        net(*inputs(), routes=net.routes)
    assert graphs.frame_count == 3  # block 0 has one alone: the tokens before it need no gradient


# ---- commands -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    benchmark.write_latents(folder, 16, (3, 8, 8), 4)
    return folder


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A run that has trained already."""
    return write_run(tmp_path_factory.mktemp("parent") / "run", NETWORK, 7, {"name": "edm", "sigma_data": 0.5})


@pytest.fixture(scope="module")
def command(data):
    """Trains an adapter in this process."""
    def call(run, parent, *overrides, **settings):
        settings = {"init_from": parent, "lora.rank": 4, "lora.alpha": 2, "steps": 4, **settings}
        try:
            AcceleratorState._reset_state(reset_partial_state=True)
            run_command(train.main, "train.py", "data=folder", "routes=balanced", "cpu=true", f"data.path={data}",
                        "data.autoencoder=identity", f"run_dir={run}", "model.backbone_type=DiT-S/2",
                        "model.hidden_size=32", "model.depth=4", "model.num_heads=2", "model.init=xavier",
                        "batch_size=4", "precision=fp32", "compile=false", "samples.every=0", "log.every=2",
                        "checkpoint.every=2", "optimizer.lr=1e-2", "ema.decay=0.5", *overrides, **settings)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
    return call


@pytest.fixture(scope="module")
def trained_run(parent, command, tmp_path_factory):
    run = tmp_path_factory.mktemp("lora") / "run"
    command(run, parent)
    return run


def test_a_run_holds_only_the_adapter_and_names_its_base(trained_run, parent):
    folder, base = checkpoints.latest(trained_run), checkpoints.latest(parent) / "ema.safetensors"
    meta, saved = checkpoints.read_meta(folder), {name: load_file(folder / f"{name}.safetensors")
                                                  for name in ("ema", "model", "training")}
    assert meta["lora"] == {"rank": 4, "alpha": 2.0, "targets": None, "base": str(base)}
    assert meta["parent"] == {"step": 7, "weights_sha256": files.sha256(base)} and meta["step"] == 4
    assert saved["ema"].keys() == saved["model"].keys()
    assert all(".lora_" in key or key == "sums" for each in saved.values() for key in each)
    assert any(not torch.equal(saved["ema"][key], value) for key, value in saved["model"].items())
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) < base.stat().st_size
    whole = load_trained(trained_run, "model").net.state_dict()
    for key, value in load_file(base).items():
        assert torch.equal(whole[key], value) != (key.removesuffix(".weight") in LAYERS), key
    _, net = adapted(alpha=2.0)
    lora.load_adapter(net, saved["model"])
    given, expected = load_trained(trained_run, "model").net(*inputs()), net(*inputs())
    assert torch.allclose(given, expected, atol=1e-6 * expected.abs().max().item())


def test_a_run_that_was_killed_ends_as_one_that_was_not_though_its_parent_has_gone_on(trained_run, parent, command,
                                                                                      tmp_path):
    killed = shutil.copytree(trained_run, tmp_path / "run")
    shutil.rmtree(checkpoints.step_folder(killed, 4))
    checkpoints.save(checkpoints.step_folder(parent, 8),
                     {"ema": {key: value + 1 for key, value in network().state_dict().items()}},
                     checkpoints.read_meta(checkpoints.latest(parent)) | {"step": 8})
    try:
        command(killed, parent)
    finally:
        shutil.rmtree(checkpoints.step_folder(parent, 8))
    for name in ("ema", "model", "training"):
        one, other = (load_file(checkpoints.step_folder(folder, 4) / f"{name}.safetensors")
                      for folder in (killed, trained_run))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one), name


def drawn(checkpoint, out):
    run_command(sample.main, "sample.py", "cpu=true", f"checkpoint={checkpoint}", "seeds=0-7", "num_steps=2",
                f"out={out}")
    return np.load(out)["arr_0"]


def test_the_merged_folder_samples_what_base_and_adapter_sample(trained_run, parent, tmp_path):
    run_command(merge_lora.main, "merge_lora.py", f"checkpoint={trained_run}", f"out={tmp_path}/merged")
    assert checkpoints.problem(tmp_path / "merged") is None and "lora" not in checkpoints.read_meta(tmp_path / "merged")
    images = [drawn(each, tmp_path / f"{i}.npz") for i, each in enumerate((trained_run, tmp_path / "merged", parent))]
    assert np.array_equal(images[0], images[1]) and not np.array_equal(images[0], images[2])
    scores = []
    for reference in (1, 2):  # images of the merged weights, and of the base alone
        run_command(fid.main, "fid.py", "cpu=true", f"checkpoint={trained_run}",
                    f"reference={tmp_path}/{reference}.npz", "features=pixels", "metrics=[fd_pixels]", "num_samples=8",
                    "num_steps=2", "seed=0", f"results={tmp_path}/results.jsonl")
        scores.append(files.read_rows(tmp_path / "results.jsonl")[-1]["metrics"]["fd_pixels"])
    assert abs(scores[0]) < 1e-6 < scores[1]
    for weights in ("ema", "model"):
        one, other = (load_trained(each, weights).net.state_dict() for each in (trained_run, tmp_path / "merged"))
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_base_that_is_gone_or_has_changed_raises_a_one_line_error(trained_run, parent, command, tmp_path, capsys):
    own = shutil.copytree(parent, tmp_path / "parent")
    run = shutil.copytree(trained_run, tmp_path / "run",
                          ignore=shutil.ignore_patterns("base"))  # as the first versions wrote it
    base = checkpoints.latest(own) / "ema.safetensors"
    for folder in checkpoints.all_steps(run):
        meta = checkpoints.read_meta(folder)
        meta["lora"]["base"], meta["init_from"] = str(base), str(own)
        checkpoints.write_meta(folder, meta)
    base.write_bytes(base.read_bytes()[:-1] + b"\1")
    for says in ("has changed: its SHA-256 differs. Put that file back", "is missing. Put that file back"):
        with pytest.raises(ValueError, match=says):
            load_trained(run)
        with pytest.raises(SystemExit) as ended:
            command(run, own, steps=6)
        assert says in str(ended.value) and str(base) in str(ended.value)
        base.unlink(missing_ok=True)


def test_a_base_that_was_pruned_or_moved_is_known_by_its_hash(parent, command, tmp_path, monkeypatch):
    own, run, second = shutil.copytree(parent, tmp_path / "own"), tmp_path / "run", tmp_path / "second"
    command(run, own)
    command(second, run, steps=2, **{"lora.rank": 2})  # an adapter on an adapter
    wanted = drawn(second, tmp_path / "second.npz")
    held = run / "base/ema.safetensors"
    assert held.samefile(checkpoints.latest(own) / "ema.safetensors")  # which takes no room
    moved = own.rename(tmp_path / "moved")
    (tmp_path / "linked").symlink_to(moved)
    monkeypatch.chdir(tmp_path)
    for steps, spelled in enumerate((moved, "moved", tmp_path / "linked", checkpoints.latest(moved)), start=5):
        command(run, spelled, steps=steps)
    shutil.rmtree(run / "base")  # as in a run of the first versions, whose base is found where init_from says
    command(run, moved, steps=9)
    assert held.samefile(checkpoints.latest(moved) / "ema.safetensors")
    other = shutil.copytree(parent, tmp_path / "other")
    weights = {"ema": {key: value + 1 for key, value in network().state_dict().items()}}
    checkpoints.save(checkpoints.step_folder(other, 8), weights,
                     checkpoints.read_meta(checkpoints.latest(other)) | {"step": 8})
    with pytest.raises(SystemExit) as ended:
        command(run, checkpoints.step_folder(other, 8), steps=10)  # the run itself still holds the one of step 7
    assert "was trained with another init_from" in str(ended.value)
    shutil.rmtree(moved)
    shutil.rmtree(run)
    assert np.array_equal(drawn(second, tmp_path / "again.npz"), wanted)


def test_a_run_resumes_with_its_own_adapter_only(trained_run, parent, command):
    for rank in (2, None):
        with pytest.raises(SystemExit) as ended:
            command(trained_run, parent, steps=6, **{"lora.rank": rank, "lora.alpha": rank})
        assert "was trained with another adapter, so it cannot resume: it has {'rank': 4" in str(ended.value)


def test_without_peft_there_raises_a_one_line_error_and_sampling_still_works(trained_run, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError,
                       match=f"lora.rank=4 needs PEFT, which is not installed: pip install peft=={lora.PEFT}"):
        lora.attach(network(), 4)
    assert load_trained(trained_run).net is not None
    assert f"peft=={lora.PEFT}\n" in (ROOT / "requirements-dev.txt").read_text()
