"""Situations from public reports, weights and exports: the source, the situation, what comes out.

Tested elsewhere: pointers of Git LFS (microsoft/OmniParser#34, huggingface/transformers#27923), parts of ZeRO-3
(huggingface/transformers#20082), whether weights are averaged (facebookresearch/DiT#83, zhuyu-cs/MeanFlow#12) and other
precisions (huggingface/peft#1388, kohya-ss/musubi-tuner#155) in test_weights_in.py; pipelines saved again
(huggingface/optimum-intel#961) and the head of a model card (huggingface/huggingface_hub#1934) in test_export.py.
"""

import argparse

import numpy as np
import pytest
import torch
from conftest import one_rank, run_command
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file, save_model
from test_published_parity import fill

import sample
from dit import DiT
from training.run_folder import open_parent
from weights.loading import load_trained

PIXELS = dict(input_size=8, patch_size=2, in_channels=3, hidden_size=32, depth=2, num_heads=2, num_classes=3)


def net(**changes) -> DiT:
    return fill(DiT(**PIXELS | changes)).eval()


def drawn(file, out, *options) -> np.ndarray:
    """The images that sample.py writes of seeds 0 to 3."""
    given = ["cpu=true", "num_heads=2", "num_steps=2", "seeds=0-3", "batch_size=4", f"checkpoint={file}", f"out={out}"]
    run_command(sample.main, "sample.py", *given, *options)
    return np.load(out)["arr_0"]


def refusal(*given) -> str:
    with pytest.raises(SystemExit) as ended:
        run_command(sample.main, "sample.py", "cpu=true", *given)
    assert "\n" not in str(ended.value)
    return str(ended.value)


def test_positions_of_512_pixels_make_a_network_of_512_pixels(tmp_path):
    """willisma/SiT#9: size mismatch for pos_embed, 1,024 tokens in the file and 256 in the network."""
    save_file(net(input_size=16).state_dict(), tmp_path / "x.safetensors")
    assert drawn(tmp_path / "x.safetensors", tmp_path / "x.npz", "diffusion_name=sit").shape == (4, 16, 16, 3)
    said = refusal(f"checkpoint={tmp_path}/x.safetensors", "num_heads=2", "diffusion_name=sit", "input_size=8")
    assert "input_size=8 does not fit the weights" in said and "have 16" in said
    record = {"network": PIXELS | {"routes": []}, "diffusion": {"name": "rf"}}
    with pytest.raises(ValueError, match="another network.*'input_size': 16} there, {'input_size': 8} here"):
        open_parent(one_rank(), str(tmp_path / "x.safetensors"), record, "sit")


def test_the_null_label_is_the_last_row_of_the_table_not_label_1000(tmp_path):
    """facebookresearch/DiT#108, huggingface/diffusers#13616: with fewer classes, guidance used label 1,000."""
    network = net(learn_sigma=True)
    save_file(network.state_dict(), tmp_path / "x.safetensors")
    guided = drawn(tmp_path / "x.safetensors", tmp_path / "x.npz", "diffusion_name=dit", "guidance=cfg", "scale=2")
    state = network.state_dict()
    state["y_embedder.embedding_table.weight"] = state["y_embedder.embedding_table.weight"].clone()
    state["y_embedder.embedding_table.weight"][3] += 1  # the null label alone
    save_file(state, tmp_path / "y.safetensors")
    other = drawn(tmp_path / "y.safetensors", tmp_path / "x.npz", "diffusion_name=dit", "guidance=cfg", "scale=2")
    unguided = [drawn(tmp_path / name, tmp_path / "x.npz", "diffusion_name=dit")
                for name in ("x.safetensors", "y.safetensors")]
    assert not np.array_equal(guided, other) and np.array_equal(*unguided)
    assert "asks for class 3, which is none of the 3" in refusal(
        f"checkpoint={tmp_path}/x.safetensors", "num_heads=2", "diffusion_name=dit", "classes=[3]",
        f"out={tmp_path}/z.npz")


def test_tensors_that_share_memory_are_found_under_all_of_their_names(tmp_path):
    """huggingface/transformers#38870, keras-team/keras-hub#3075: save_model stores one of tied tensors."""
    tied = net()
    tied.blocks[1].adaLN_modulation[1].weight = tied.blocks[0].adaLN_modulation[1].weight
    save_model(tied, tmp_path / "tied.safetensors")
    save_file({key: value.clone() for key, value in tied.state_dict().items()}, tmp_path / "plain.safetensors")
    images = [drawn(tmp_path / f"{name}.safetensors", tmp_path / "x.npz", "diffusion_name=edm")
              for name in ("tied", "plain")]
    assert np.array_equal(*images)


def adapted() -> torch.nn.Module:
    return get_peft_model(net(), LoraConfig(r=2, target_modules=["qkv"]))


@pytest.mark.parametrize("is_alone", [True, False], ids=["an adapter", "a network with one"])
def test_an_adapter_is_called_one_and_its_merged_weights_are_read(is_alone, tmp_path):
    """huggingface/peft#309, huggingface/peft#2566: adapter_model.safetensors alone; keys with base_layer."""
    model = adapted()
    (tmp_path / "adapter").mkdir()
    state = get_peft_model_state_dict(model) if is_alone else model.state_dict()
    save_file({key: value.clone() for key, value in state.items()}, tmp_path / "adapter/adapter_model.safetensors")
    said = refusal(f"checkpoint={tmp_path}/adapter", "num_heads=2", "diffusion_name=edm")
    assert "holds a LoRA adapter" in said and "merge_and_unload()" in said
    save_file(model.merge_and_unload().state_dict(), tmp_path / "merged.safetensors")
    save_file(net().state_dict(), tmp_path / "base.safetensors")
    images = [drawn(tmp_path / f"{name}.safetensors", tmp_path / "x.npz", "diffusion_name=edm")
              for name in ("merged", "base")]
    assert np.array_equal(*images), "B begins at zero"


def test_deepspeeds_file_of_stage_2_holds_the_network(tmp_path):
    """Tencent-Hunyuan/HunyuanDiT#107: which file of global_step…/ is to be sampled, mp_rank_00_model_states.pt?"""
    folder = tmp_path / "global_step100"
    folder.mkdir()
    beside = {"buffer_names": [], "optimizer": None, "ds_config": {"zero_optimization": {"stage": 2}},
              "ds_version": "0.16.2", "global_steps": 100}
    torch.save({"module": net().state_dict(), **beside}, folder / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": {}, "ds_config": {}}, folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    save_file(net().state_dict(), tmp_path / "x.safetensors")
    places = (folder / "mp_rank_00_model_states.pt", folder, tmp_path / "x.safetensors")
    images = [drawn(place, tmp_path / "x.npz", "diffusion_name=edm") for place in places]
    assert np.array_equal(images[0], images[2]) and np.array_equal(images[1], images[2])


@pytest.mark.parametrize("family", ["dit", "edm", "repa"])
def test_channels_of_a_variance_are_there_or_not_whatever_the_family(family, tmp_path):
    """huggingface/diffusers#13616: a DiT without channels for variances cannot be sampled."""
    both = net(learn_sigma=True).state_dict()
    save_file(both, tmp_path / "x.safetensors")
    one = dict(both)
    for key in ("final_layer.linear.weight", "final_layer.linear.bias"):
        one[key] = both[key].unflatten(0, (4, 6))[:, :3].flatten(0, 1).contiguous()
    save_file(one, tmp_path / "y.safetensors")
    images = [drawn(tmp_path / name, tmp_path / "x.npz", f"diffusion_name={family}")
              for name in ("x.safetensors", "y.safetensors")]
    assert np.abs(images[0].astype(int) - images[1]).max() <= 1 and images[0].std() > 1


def test_the_table_of_labels_decides_where_the_arguments_name_another_count_of_classes(tmp_path):
    """As facebookresearch/DiT#108: args.num_classes is 1,000 although the network has another number."""
    torch.save({"ema": net(learn_sigma=True).state_dict(),
                "args": argparse.Namespace(model="DiT-S/2", image_size=64, num_classes=1000, vae="ema")},
               tmp_path / "x.pt")
    trained = load_trained(tmp_path / "x.pt", num_heads=2)
    assert trained.family == "dit" and trained.net.num_classes == 3 and trained.net.null_label
