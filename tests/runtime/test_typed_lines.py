"""Each line that an error or an end prints for typing does what it says, whatever a folder is called."""

import ast
import glob
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file
from test_command import words_of
from test_labels import numbered, put, put_tar, shard
from test_prepare_latents import script as preparing
from training_runs import command as training_command

import sample
import train
from latents.images import open_source
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


def offered(call, *keys: str) -> list[dict[str, str]]:
    """What the one-line error of a call offers to type: each setting of these keys, as the command reads it."""
    with pytest.raises(ValueError) as error:
        call()
    _, _, remedy = str(error.value).partition(": ")  # what comes before repeats what was typed
    found = re.findall(rf"\"(?:{'|'.join(keys)})=[^\"]*\"|(?<![\w\"])(?:{'|'.join(keys)})=[\w./*-]+", remedy)
    return [read(*shlex.split(word.rstrip("."))) for word in found]


def read(*words: str) -> dict[str, str]:
    """What prepare_latents makes of settings that are typed."""
    plain = compose("prepare_latents", preparing.PrepareSettings, words)
    return {key: plain[key] for key in by_key(words)}


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_that_is_printed_is_read_back_as_it_was(name):
    [word] = shlex.split(typed("checkpoint", f"runs/{name}"))
    assert compose("sample", SampleSettings, [word])["checkpoint"] == f"runs/{name}"
    for key, value in {"classes": [name, "b"], "scale": 1e-05, "seeds": 7, "weak": None, "cpu": True}.items():
        [word] = shlex.split(typed(key, value))
        assert compose("sample", SampleSettings, [word])[key] == value
    assert shlex.split(f"ls {for_shell(name)}") == ["ls", name]


def test_no_message_quotes_a_value_by_hand():
    from test_design import files

    by_hand = [(name, words) for name, tree in files().items() for node in ast.walk(tree)
               if isinstance(node, ast.Raise | ast.Call) and re.search("='◦'|=\"◦\"", words := words_of(node))
               and (isinstance(node, ast.Raise) or getattr(node.func, "id", "") == "print")]
    assert by_hand == []


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
def test_the_lines_of_errors_about_a_source_are_typed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = numbered("cat/0.png", "dog/1.png")
    for split in ("train", "val"):
        put_tar(Path(name) / f"{split}-0.tar", files)
        put(Path("hub") / name, {f"{split}-0.parquet": shard(0, 1)})
    for source in (name, f"hub/{name}"):
        choices = offered(lambda source=source: open_source(source), "source")
        assert [len(open_source(choice["source"])) for choice in choices] == [2, 2]
    put(Path("flat") / name, numbered("0.png", "1.png") | {"my labels.csv": "file_name,label\n0.png,a\n1.png,b\n"})
    [choice, _] = offered(lambda: open_source(f"flat/{name}"), "labels")
    assert open_source(f"flat/{name}", choice["labels"]).class_names == ["a", "b"]
    put(Path("mixed") / name, {"0.png": files["cat/0.png"]})
    put_tar(Path("mixed") / name / "x.tar", files)
    [choice] = offered(lambda: open_source(f"mixed/{name}"), "source")
    assert len(open_source(choice["source"])) == 2
    [choice] = offered(lambda: open_source(f"{glob.escape(f'{tmp_path}/mixed/{name}')}/*"), "source")
    assert Path(choice["source"]).samefile(Path("mixed") / name)


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
