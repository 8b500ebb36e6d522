"""import_weights.py writes a whole checkpoint and its record, and touches nothing that exists."""

import pytest
import torch
from safetensors.torch import load_file
from test_foreign import KNOWN_PAIR, SIT_ARGS
from test_hostile_files import everything

from runtime.files import sha256
from scripts import import_weights
from weights import checkpoints

TYPED = ["source=sit.pt", "format=sit", "num_heads=4"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({**KNOWN_PAIR, "args": SIT_ARGS}, "sit.pt")
    return tmp_path


def test_an_import_is_printed_and_records_its_source(here, capsys):
    import_weights.main("out=weights/sit", *TYPED)
    said = capsys.readouterr().out
    assert said.startswith("sit.pt: weights=ema (not model), read as sit (willisma/SiT: a velocity with data at t = 1)")
    assert said.endswith(" next: python sample.py checkpoint=weights/sit\n")
    assert checkpoints.check(here / "weights/sit")["imported"] == {
        "file": "sit.pt", "sha256": sha256(here / "sit.pt"), "format": "sit", "weights": "ema", "num_heads": 4,
        "dropped": ["the second half of the last layer"]}
    assert {value.dtype for value in load_file("weights/sit/ema.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize("name", ["data", "sit.pt"])
def test_a_folder_or_file_that_exists_is_left_as_it_is(name, here):
    (here / "data").mkdir(), (here / "data/x.txt").write_text("mine")
    before = everything(here)
    with pytest.raises(ValueError, match=f"out={name} exists: name another folder, or remove it"):
        import_weights.main(f"out={name}", *TYPED)
    assert everything(here) == before
