"""import_weights.py writes a whole checkpoint or nothing, and touches no folder that it did not write."""

import os
import shutil
import signal
import time

import forked
import pytest
import torch
from conftest import run_command
from safetensors.torch import load_file
from test_foreign import KNOWN_PAIR, SIT_ARGS, under, weights_of
from test_hostile_files import everything

import sample
from dit import DiT_models
from runtime.files import sha256
from scripts import import_weights
from weights import checkpoint as checkpoints

TYPED = ["format=sit", "num_heads=4"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({**KNOWN_PAIR, "args": SIT_ARGS}, "sit.pt")
    return tmp_path


def test_an_import_records_its_source_and_a_second_one_changes_nothing(here, capsys):
    import_weights.main("source=sit.pt", "out=weights/sit", *TYPED)
    said = capsys.readouterr().out
    assert said.startswith("sit.pt: weights=ema (not model), read as sit (willisma/SiT: a velocity with data at t = 1)")
    assert said.endswith("without the second half of the last layer. weights/sit takes 1.03 MB. next: python sample.py "
                         "checkpoint=weights/sit\n")
    meta = checkpoints.check(here / "weights/sit")
    assert meta["imported"] == {"file": "sit.pt", "sha256": sha256(here / "sit.pt"), "format": "sit", "weights": "ema",
                                "num_heads": 4, "dropped": ["the second half of the last layer"]}
    assert {value.dtype for value in load_file("weights/sit/ema.safetensors").values()} == {torch.float32}
    before = everything(here)
    import_weights.main("source=sit.pt", "out=weights/sit", *TYPED)
    assert "holds it already: nothing to do" in capsys.readouterr().out and everything(here) == before
    for changed in (["num_heads=2"], ["autoencoder=sd_vae_mse"], ["weights=model"]):
        with pytest.raises(ValueError, match="exists and does not hold this import"):
            import_weights.main("source=sit.pt", "out=weights/sit", "format=sit", *{*TYPED[1:], *changed}
                                if changed != ["num_heads=2"] else changed)
    assert everything(here) == before


def test_two_readings_of_one_file_are_two_sets_of_pictures(here):
    pixels = {key: value[:12] if "final_layer.linear" in key else value[:, :3] if key.startswith("x_embedder.proj.w")
              else value for key, value in weights_of("tread").items()}
    torch.save({f"ema_{decay}": under("", pixels) for decay in (0.9, 0.99)}, "x.pt")
    for heads in (2, 4):
        import_weights.main("source=x.pt", f"out=of{heads}", "format=tread", f"num_heads={heads}",
                            "autoencoder=identity", "weights=ema_0.9")
    draw = ["cpu=true", "num_steps=1", "seeds=0-1", "out=pictures"]
    run_command(sample.main, "sample.py", "checkpoint=of2", *draw)
    with pytest.raises(SystemExit, match="pictures of another set"):
        run_command(sample.main, "sample.py", "checkpoint=of4", *draw)


@pytest.mark.parametrize("name", ["run", "data", "file"])
def test_a_folder_or_file_that_it_did_not_write_is_left_as_it_is(name, here):
    (here / "data").mkdir(), (here / "data/x.txt").write_text("mine"), (here / "file").write_text("mine")
    checkpoints.save(here / "run", {"ema": {"a": torch.ones(1)}}, {"step": 3})
    before = everything(here)
    with pytest.raises(ValueError, match=f"out={name} exists and does not hold this import"):
        import_weights.main("source=sit.pt", f"out={name}", *TYPED)
    assert everything(here) == before
    (here / "empty").mkdir()
    import_weights.main("source=sit.pt", "out=empty", *TYPED)
    assert checkpoints.problem(here / "empty") is None


def test_a_kill_at_any_time_leaves_no_half_import_and_the_next_one_cleans_up(here):
    with torch.device("meta"):
        net = DiT_models["DiT-S/2"]()
    torch.save({"ema": {key: torch.zeros(value.shape) for key, value in net.state_dict().items()}}, "b.pt")
    typed = ["scripts/import_weights.py", f"source={here}/b.pt", f"out={here}/weights/b", "format=sit"]
    killed = 0
    for _ in range(20):
        process = forked.Command(*typed)
        while process.poll() is None and not list(here.glob("weights/.b.*.tmp/*.safetensors")):
            time.sleep(0.0005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        killed += bool(list(here.glob("weights/.b.*.tmp")))
        assert not (here / "weights/b").exists() or checkpoints.problem(here / "weights/b") is None
        if killed:
            break
        shutil.rmtree(here / "weights/b", ignore_errors=True)
    assert killed
    import_weights.main(*typed[1:])
    assert [path.name for path in (here / "weights").iterdir()] == ["b"] and not checkpoints.problem(here / "weights/b")
