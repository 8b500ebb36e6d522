"""Each line that an error or an end prints for typing does what it says, whatever a folder is called."""

import re
import shlex
import shutil

import numpy as np
import pytest
from conftest import last_of_each
from safetensors.torch import save_file
from test_prepare_latents import script as preparing
from training_runs import command as training_command

import sample
import train
from runtime.command import compose
from runtime.schema import for_shell, typed
from sample import SampleSettings
from scripts import import_weights
from weights.loading import find_checkpoint
from weights.records import build_network

NAMES = ["a b", "it's", "$HOME", 'a"b', "a,b", "1_1", "null", "x!", "back\\", "{a}", "#1", "~x",
         # reports: hydra-ecosystem/hydra#1843, #2891, #962 and #2705, NVIDIA/cloudai#557, IDEA-Research/detrex#309
         "a|b", "李明", "pattern_%r.bin@x", "#", "mlx5_0:1,mlx5_3:1", "2023-09-16"]
NAME = "-größe b[1]"


def settings_of(line: str) -> list[str]:
    """The settings of the command in a printed line, as a shell passes them on."""
    return [word for word in shlex.split(line) if "=" in word]


@pytest.fixture
def settings_after(tmp_path, monkeypatch, capsys):
    """Returns the settings of the command that was printed after some words; commands run in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    return lambda words: settings_of(capsys.readouterr().out.partition(words)[2].partition("\n")[0])


@pytest.mark.parametrize("name", [NAME, *NAMES])
def test_a_setting_that_is_printed_is_read_back_as_it_was(name):
    [word] = shlex.split(typed("checkpoint", f"runs/{name}"))
    assert compose("sample", SampleSettings, [word])["checkpoint"] == f"runs/{name}"
    assert shlex.split(f"ls {for_shell(name)}") == ["ls", name]


def test_the_lines_at_the_ends_of_preparing_and_training_and_of_other_data_work_when_typed(tmp_path, settings_after):
    def train_on(*typed_words: str) -> None:
        train.main(*last_of_each([*small, *typed_words]))

    small = [word for word in training_command("", "", "cpu=true", "compile=false")[1:] if "run_dir" not in word]
    [out] = settings_of(typed("out", NAME))
    preparing.main("source=shapes", "shapes.count=24", out)
    prepared = settings_after("next: ")
    train_on(*prepared, "precision=fp32", "steps=1")
    sample.main(*settings_after("Next: python sample.py"), "seeds=0-1", "num_steps=1", "out=x.npz")
    assert (tmp_path / "runs" / NAME / "samples").is_dir() and len(np.load("x.npz")["arr_0"]) == 2

    shutil.rmtree(NAME)
    preparing.main("source=shapes", "shapes.count=30", out)
    with pytest.raises(ValueError, match="another data set") as error:
        train_on(*prepared, "precision=fp32", "steps=2")
    [word] = shlex.split(re.search("name=<another> and (.*), which continues", str(error.value))[1])
    train_on(*prepared, "precision=fp32", "steps=1", word, "name=another")
    assert (tmp_path / "runs/another/checkpoints").is_dir()


def test_the_lines_that_import_weights_work_when_typed(settings_after):
    network = dict(input_size=4, patch_size=2, in_channels=3, hidden_size=8, depth=1, num_heads=2, num_classes=2)
    save_file(build_network(network).state_dict(), f"{NAME}.safetensors")
    with pytest.raises(ValueError, match="Import it once") as error:
        find_checkpoint(f"{NAME}.safetensors")
    words = settings_of(re.search(r"import_weights.py (.*?) and one of", str(error.value))[1])
    import_weights.main(*words, "format=tread", "num_heads=2", "autoencoder=identity")
    sample.main(*settings_after("next: python sample.py"), "seeds=0-1", "out=x.npz", "num_steps=1")
    assert len(np.load("x.npz")["arr_0"]) == 2
