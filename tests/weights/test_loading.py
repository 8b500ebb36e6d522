"""One door opens a run, a checkpoint or a repository of the Hugging Face Hub, and says what to type for the rest."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from training_runs import write_run

from runtime import files
from weights import checkpoints
from weights.loading import find_checkpoint, load_trained

NETWORK = dict(input_size=4, patch_size=2, in_channels=3, hidden_size=8, depth=2, num_heads=2, num_classes=3)
STEP = Path("run/checkpoints/step-00000002")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with a run of two checkpoints, its weights alone, and an empty cache of the Hub without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    write_run(Path("run"), NETWORK, 1), write_run(Path("run"), NETWORK, 2)
    shutil.copytree(STEP, "alone")
    return tmp_path


def cached(repo: str, folder: Path) -> Path:
    """Puts a folder into the Hub's cache as a download does, with links to blobs; returns its snapshot."""
    place = Path("cache") / f"models--{repo.replace('/', '--')}"
    for name in ("refs", "blobs", "snapshots/0123abcd"):
        (place / name).mkdir(parents=True)
    (place / "refs/main").write_text("0123abcd")
    for file in folder.iterdir():
        blob = shutil.copy(file, place / "blobs" / f"{file.name}-blob")
        (place / "snapshots/0123abcd" / file.name).symlink_to(Path("../../blobs") / blob.name)
    return place / "snapshots/0123abcd"


# ---- local paths ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path, weights, file", [
    ("run", None, STEP / "ema.safetensors"), ("run", "model", STEP / "model.safetensors"),
    (STEP, None, STEP / "ema.safetensors"), ("alone", "model", Path("alone/model.safetensors")),
])
def test_each_kind_of_path_names_one_file(path, weights, file, here, monkeypatch):
    hashed = []
    monkeypatch.setattr(checkpoints, "sha256", lambda path: hashed.append(path) or files.sha256(path))
    checkpoint = find_checkpoint(path, weights)
    assert checkpoint.file == file and (checkpoint.run == Path("run")) == ("run" in str(file))
    assert checkpoint.sha256 and hashed == [file], "a file is hashed once"


@pytest.mark.parametrize("path, which, says", [
    ("nowhere", None, "no run and no checkpoint folder at nowhere"), ("", "best", "weights=best is neither"),
    ("run", "ema-0.5", "step-00000002 holds no ema-0.5.safetensors: set weights= to one of ema, model"),
    ("average", None, "average holds no ema.safetensors: set weights= to one of ema-0.99"),
    (STEP / "model.safetensors", None, "is one file of a checkpoint: name run/.*-00000002, with weights=model"),
    ("empty", None, "empty holds no checkpoint yet"), ("damaged", None, "is damaged.*ema.safetensors is"),
    ("theirs", None, "Import it once: python scripts/import_weights.py source=theirs/0400000.pt out=weights/theirs "
     "format=repa num_heads=<heads> .*Then name weights/theirs"),
    ("a/b/c", None, "hf download a/b --include 'c/.' --local-dir b`, then name ./b/c"),
    ("a/b@v1", None, "hf download a/b --revision v1 --local-dir b`, then name ./b"),
    ("https://huggingface.co/me/x", None, "`hf download me/x --local-dir x`, then name ./x"),
    ("https://huggingface.co/me/x/resolve/main/x.pt?download=true", None,
     "`hf download me/x --include 'x.pt' --revision main --local-dir x`, then name ./x/x.pt"),
    ("me/x", None, "^meta.json and ema.safetensors of me/x could not be downloaded .*`hf download me/x --local-dir x`"),
])
def test_what_is_not_there_is_a_line_with_what_to_type(path, which, says, here):
    checkpoints.save(Path("average"), {"ema-0.99": {"a": torch.ones(1)}, "training": {}}, {"step": 3})
    Path("empty/checkpoints").mkdir(parents=True), Path("theirs").mkdir()
    weights = load_file(STEP / "ema.safetensors")
    torch.save({"ema": weights, "model": weights, "args": {"prediction": "v", "vae": "ema"}}, "theirs/0400000.pt")
    shutil.copytree(STEP, "damaged")
    Path("damaged/ema.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=says) as refused:
        find_checkpoint(path or "run", which)
    assert "\n" not in str(refused.value)


# ---- the Hugging Face Hub -------------------------------------------------------------------------------------------


def test_an_uploaded_checkpoint_is_read_from_the_hub_by_its_name(here, monkeypatch):
    """Of any other file, such as a pickle, not even the name is asked for."""
    snapshot = cached("me/x", STEP)
    look_up, asked = huggingface_hub.try_to_load_from_cache, []
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache",
                        lambda *names: asked.append(names) or look_up(*names))
    trained, local = load_trained("me/x"), load_trained("run")
    assert trained.checkpoint.folder.samefile(snapshot) and trained.checkpoint.run is None
    assert asked == [("me/x", "meta.json"), ("me/x", "ema.safetensors")]
    assert trained.checkpoint.sha256 == local.checkpoint.sha256
    assert all(torch.equal(trained.net.state_dict()[key], value) for key, value in local.net.state_dict().items())


@pytest.mark.parametrize("status, says", [
    (401, "`hf auth login`"), (403, "`hf auth login`"),
    (404, "meta.json and ema.safetensors of me/x .*`hf download me/x --local-dir x`, then .*source=./x out=weights/x`"),
])
def test_a_repository_that_one_may_not_read_or_of_other_code_says_what_to_type(status, says, here, monkeypatch):
    refused = OSError(status)  # as huggingface_hub's, whose response has a status
    refused.response = SimpleNamespace(status_code=status)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", Mock(side_effect=refused))
    with pytest.raises(ValueError, match=says):
        find_checkpoint("me/x")


def test_an_empty_file_in_the_hubs_cache_is_named_with_the_advice_to_delete_it(here):
    Path("alone/ema.safetensors").write_bytes(b"")
    cached("me/x", Path("alone"))
    with pytest.raises(ValueError, match="blobs/ema.safetensors-blob is empty: delete it"):
        find_checkpoint("me/x")


def test_half_precision_is_made_as_on_the_page_of_the_example(here):
    page = (Path(__file__).parents[2] / "examples/emoji/README.md").read_text(encoding="utf-8")
    exec(page.partition("```python\n")[2].partition("```")[0].replace("runs/emoji_example", "run"), {})
    half = load_trained("emoji").net.state_dict()
    for key, value in load_trained("run").net.state_dict().items():
        assert torch.equal(half[key], value.half().float())
