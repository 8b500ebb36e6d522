"""The example that trains LoRA on other people's networks prints what a route gives and what it costs."""

import re

import pytest
import torch
from foreign_networks import family
from safetensors.torch import save_file

pytest.importorskip("peft", reason="the example's LoRA is PEFT's, which is optional")
from examples import route_diffusers


def numbers(capsys, *words):
    route_diffusers.main(["--steps", "2", "--batch", "2", *words])
    said = capsys.readouterr().out
    return said, [float(loss) for loss in re.findall(r"loss (\d\.\d{4})", said)]


def test_the_example_prints_the_ratio_of_step_times_and_the_loss_of_both_loras(capsys):
    said, (dense, routed) = numbers(capsys, "--side", "4", "--ratio", "0.75")
    assert re.match(r"FluxTransformer2DModel, route 2→-4 at .* routed, \d+\.\d\d times as fast", said)
    assert dense != routed and numbers(capsys, "--side", "4", "--ratio", "0")[1] == [dense, dense]


@pytest.mark.parametrize(("name", "latents"), [
    ("SD3Transformer2DModel", (4, 8, 8)), ("QwenImageTransformer2DModel", (1, 8, 8)), ("WanTransformer3DModel", (4, 2, 4, 8))])
def test_a_network_and_its_data_are_read_from_disk(tmp_path, capsys, name, latents):
    family(name).model.save_pretrained(tmp_path / "network" / "transformer")
    data = dict(latents=torch.randn(8, *latents), prompt_embeds=torch.randn(8, 5, 16), pooled=torch.randn(8, 16))
    save_file(data, tmp_path / "data.safetensors")
    said, losses = numbers(capsys, "--network", str(tmp_path / "network"), "--data", str(tmp_path / "data.safetensors"),
                           "--start", "1", "--end", "-2")
    assert said.startswith(name) and len(losses) == 2
