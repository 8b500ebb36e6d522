"""The example makes a training script of diffusers train with a route, by two changed lines."""

import pytest
import torch

from examples import route_diffusers
from routing_module import Router

SCRIPT = '''
"""A script whose step is written as those of diffusers are."""

import argparse

import accelerate
import diffusers
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--max_train_steps", type=int)
args = parser.parse_args()
accelerator = accelerate.Accelerator(cpu=True)
torch.manual_seed(0)
transformer = accelerator.prepare(diffusers.SD3Transformer2DModel(
    sample_size=8, in_channels=4, out_channels=4, num_layers=6, num_attention_heads=2, attention_head_dim=8,
    joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8))
for global_step in range(args.max_train_steps):
    if True:
        models_to_accumulate = [transformer]
        with accelerator.accumulate(models_to_accumulate):
            model_pred = transformer(torch.randn(2, 4, 8, 8), torch.randn(2, 5, 16), torch.randn(2, 16), torch.ones(2),
                                     return_dict=False)[0]
            accelerator.backward(model_pred.square().mean())
'''


def test_a_script_of_diffusers_is_routed_for_the_first_of_its_steps(tmp_path, monkeypatch, capsys):
    drawn, draw = [], Router.get_mask
    monkeypatch.setattr(Router, "get_mask", lambda *args, **how: drawn.append(draw(*args, **how)) or drawn[-1])
    (tmp_path / "train.py").write_text(SCRIPT)
    route_diffusers.main(["--route=1,-2,0.25", "--dense_after=0.5", str(tmp_path / "train.py"), "--max_train_steps=4"])
    assert [ids.shape for ids in drawn] == [torch.Size([2, 12])] * 2
    said = capsys.readouterr().out
    assert "from routed import Route, routed" in said and "transformer, [Route(1,-2,0.25)] if global_step < 0.5" in said


@pytest.mark.parametrize(("old", "new", "says"), [
    (".accumulate(", ".gather(", "exactly one is needed"),
    ("(models_to_accumulate)", "(prior)", r"trains prior, and its step calls the transformers \['transformer'\]"),
    ("args.max_train_steps", "args.steps", "does not define args.max_train_steps"),
])
def test_a_script_is_refused_if_it_has_no_such_step_or_not_what_the_changed_line_names(old, new, says):
    with pytest.raises(SystemExit, match=says):
        route_diffusers.patched(SCRIPT.replace(old, new), "2,-4,0.5", 0.85)
