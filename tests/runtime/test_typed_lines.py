"""Each line that an error or an end prints for typing does what it says, whatever a folder is called."""

import re
import shlex
import shutil

import numpy as np
import pytest
from safetensors.torch import save_file
from test_prepare_latents import script as preparing
from training_runs import command as training_command

import sample
import train
from runtime.command import by_key, compose
from runtime.schema import for_shell, typed
from sample import SampleSettings
from scripts import import_weights
from weights.loading import find_checkpoint
from weights.records import build_network

NAMES = ["a b", "a[1]", "größe", "-x", "it's", "$HOME", 'a"b', "a,b", "1_1", "null", "x!", "back\\", "{a}", "#1", "~x",
         # reports: hydra-ecosystem/hydra#1843, #2891, #962 and #2705, NVIDIA/cloudai#557, IDEA-Research/detrex#309
         "a|b", "李明", "pattern_%r.bin@x", "#", "mlx5_0:1,mlx5_3:1", "2023-09-16"]
FOLDERS = ["a b[1]", "-größe"]


def settings_in(line: str) -> list[str]:
    """The settings of the command in a printed line, as a shell passes them on."""
    return [word for word in shlex.split(line) if "=" in word]


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_that_is_printed_is_read_back_as_it_was(name):
    [word] = shlex.split(typed("checkpoint", f"runs/{name}"))
    assert compose("sample", SampleSettings, [word])["checkpoint"] == f"runs/{name}"
    assert shlex.split(f"ls {for_shell(name)}") == ["ls", name]


@pytest.mark.parametrize("name", FOLDERS)
def test_the_lines_at_the_ends_of_commands_are_typed(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [out] = shlex.split(typed("out", name))
    preparing.main("source=shapes", "shapes.count=24", out)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("next: "))
    small = [*training_command(tmp_path, tmp_path, "compile=false", "cpu=true", "optimizer.warmup_steps=0")[4:],
             "precision=fp32"]
    kept = [setting for setting in small if not setting.startswith(("steps=", "experiment="))]
    typed_words = settings_in(line)
    assert typed_words[0] == "experiment=small_cpu" and by_key(typed_words)["data.path"].strip("'") == name
    train.main(*typed_words, *kept, "steps=1")
    assert (tmp_path / "runs" / name / "checkpoints").is_dir()
    following = capsys.readouterr().out.partition("Next: ")[2].strip()
    assert shlex.split(following)[:2] == ["python", "sample.py"]
    sample.main(*settings_in(following), "seeds=0-1", "num_steps=1", "out=x.npz")
    assert len(np.load("x.npz")["arr_0"]) == 2
    # Other data under the same name: the line names init_from=, which works when typed.
    shutil.rmtree(name)
    preparing.main("source=shapes", "shapes.count=30", out)
    with pytest.raises(ValueError, match="another data set") as error:
        train.main(*typed_words, *kept, "steps=2")
    [word] = shlex.split(re.search("name=<another> and (.*), which continues", str(error.value))[1])
    train.main(*typed_words[:2], *kept, word, "steps=1", "name=another")
    assert (tmp_path / "runs/another/checkpoints").is_dir()


@pytest.mark.parametrize("name", FOLDERS)
def test_the_lines_that_import_weights_are_typed(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    network = dict(input_size=4, patch_size=2, in_channels=3, hidden_size=8, depth=1, num_heads=2, num_classes=2)
    save_file(build_network(network).state_dict(), f"{name}.safetensors")
    with pytest.raises(ValueError, match="Import it once") as error:
        find_checkpoint(f"{name}.safetensors")
    words = settings_in(re.search(r"import_weights.py (.*?) and one of", str(error.value))[1])
    import_weights.main(*words, "format=tread", "num_heads=2", "autoencoder=identity")
    capsys.readouterr()
    [out] = shlex.split(typed("out", name))
    import_weights.main(words[0], out, "format=tread", "num_heads=2", "autoencoder=identity")
    [word] = settings_in(capsys.readouterr().out.partition("next: ")[2])
    sample.main(word, "seeds=0-1", "out=x.npz", "num_steps=1")
    assert len(np.load("x.npz")["arr_0"]) == 2
