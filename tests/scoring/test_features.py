"""Feature extractors: their inputs, the weights that they accept, and what they refuse."""

import json
import os
import re
import runpy
import shutil
import urllib.error
from pathlib import Path
from unittest.mock import Mock

import pytest
import timm
import torch
from conftest import ROOT, one_rank, run_command
from safetensors.torch import save_file

import fid
from examples import own_features
from runtime.files import sha256
from scoring import features
from scoring.features import Extractor, extract
from scoring.metrics import distances_in_half, squared_distances
from scoring.score import measure


def load(name, *arguments):
    return features.load_extractor(one_rank(), name, *arguments)


def pictures(count, side=32, seed=0):
    return torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(seed))


# ---- what all share


def test_copies_are_dropped_and_the_rest_keep_their_indices():
    images, pixels = pictures(4), load("pixels")
    (indices, values), = extract(pixels, [(torch.tensor([7, -1, 3, -1]), images), (torch.tensor([-1]), images[:1])])
    assert indices.tolist() == [7, 3] and torch.equal(values["pool"], pixels.compute(images[[0, 2]])["pool"])


def test_features_that_are_not_finite_have_no_score():
    broken = Extractor("mine", "mine", "fd_mine", {"pool": 1}, "",
                       lambda x: {"pool": torch.tensor([[1.0], [torch.nan]])})
    with pytest.raises(ValueError, match=r"mine features \(pool\) of some of the 2 images are not finite"):
        measure(one_rank(), broken, 2, [(torch.arange(2), pictures(2))])


def test_extraction_runs_without_tf32_and_puts_the_setting_back(float32_restored):
    def setting():
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    seen = []
    mine = Extractor("mine", "mine", "fd_mine", {"pool": 1}, "",
                     lambda x: seen.append(setting()) or {"pool": torch.zeros(len(x), 1)})
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    list(extract(mine, [(torch.tensor([0]), pictures(1))]))
    assert seen == [("highest", False)] and setting() == ("high", True)


def test_weights_that_cannot_be_downloaded_raise_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", Mock(side_effect=urllib.error.URLError("no network")))
    with pytest.raises(ValueError, match="could not be downloaded .*features_weights=path/to/"):
        load("inception")


# ---- Inception: ADM's graph, and its port


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """A graph with the nodes of the Inception graph, of a few operations: image means -> 2048, 192 and 5 values."""
    import tensorflow as tf

    path = tmp_path_factory.mktemp("graph") / "graph.pb"
    rng = torch.Generator().manual_seed(0)
    with tf.Graph().as_default() as made:
        image = tf.compat.v1.placeholder(tf.float32, [1, None, None, 3], name="ExpandDims")
        x = tf.compat.v1.image.resize_bilinear(image, [17, 17])
        spatial = tf.nn.conv2d(x, torch.randn(1, 1, 3, 192, generator=rng).numpy(), 1, "SAME", name="mixed_6/conv")
        pool = tf.reduce_mean(tf.nn.conv2d(spatial, torch.randn(1, 1, 192, 2048, generator=rng).numpy(), 1, "SAME"),
                              [1, 2], True)
        pool = tf.identity(pool, name="pool_3")
        tf.matmul(tf.reshape(pool, [-1, 2048]), torch.randn(2048, 5, generator=rng).numpy() / 1e5,
                  name="softmax/logits/MatMul")
        path.write_bytes(made.as_graph_def().SerializeToString())
    return path


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """Random weights in the layout of torch-fidelity's file."""
    from torch_fidelity import feature_extractor_inceptionv3 as module

    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_state_dict_from_url", lambda *args, **kwargs: {})
        patch.setattr(module.FeatureExtractorInceptionV3, "load_state_dict", lambda self, state: None)
        torch.manual_seed(0)
        torch.save(module.FeatureExtractorInceptionV3("random", ["2048"]).state_dict(), path)
    return path


@pytest.mark.parametrize(("name", "weights", "classes"), [("adm", "graph", 5), ("inception", "port", 1008)])
def test_inception_returns_pool_spatial_and_probabilities_of_any_batch(name, weights, classes, request):
    file, before = request.getfixturevalue(weights), torch.get_rng_state()
    extractor, images = load(name, file), pictures(3)
    assert torch.equal(torch.get_rng_state(), before), "loading takes no number from the caller's generator"
    assert extractor.sizes == {"pool": 2048, "spatial": 2023, "probs": classes} and extractor.distance == "fid"
    assert extractor.space == "inception-2015" and extractor.sha256 == sha256(file)
    assert (extractor.neighbours, load("pixels").neighbours) == (distances_in_half, squared_distances)
    values, one = extractor.compute(images), extractor.compute(images[2:])
    assert {feature: len(value[0]) for feature, value in values.items()} == extractor.sizes
    assert torch.allclose(values["probs"].sum(1), torch.ones(3), atol=1e-5)
    assert all(torch.allclose(values[feature][2:], one[feature], rtol=1e-4, atol=1e-4) for feature in values)
    if name == "adm":
        import tensorflow as tf

        assert not tf.config.get_visible_devices("GPU")
    else:
        assert (values["spatial"] >= 0).all()  # after the ReLU


# ---- DINOv2 and code of one's own


def test_the_example_of_dinov2_returns_a_class_token_of_images_of_any_size(tmp_path):   # right values: test_versions.py
    network = timm.create_model("vit_small_patch14_dinov2", num_classes=0)
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    dinov2 = own_features.dinov2(tmp_path / "model.safetensors", "cpu", "vit_small_patch14_dinov2")
    with torch.no_grad():
        assert dinov2(pictures(2, side=64).permute(0, 3, 1, 2)).shape == (2, 384)


def test_a_function_of_ones_own_is_fed_channels_first_and_told_apart_by_its_module_and_weights(tmp_path):
    torch.save(torch.tensor(2.0), tmp_path / "two.pt")
    mine, doubled = load("python:own_code.means"), load("python:own_code.means", tmp_path / "two.pt")
    images = pictures(2)
    assert torch.allclose(mine.compute(images)["pool"], images.float().mean((1, 2)))
    assert torch.allclose(doubled.compute(images)["pool"], 2 * images.float().mean((1, 2)))
    assert mine.sizes == {"pool": 3} and mine.distance == doubled.distance == "fd_means"
    assert mine.space == f"python:own_code.means {sha256(ROOT / 'tests/own_code.py')} None"
    assert doubled.space == mine.space.replace("None", sha256(tmp_path / "two.pt")) and doubled.sha256 in doubled.space


@pytest.mark.parametrize(("name", "message"), [
    ("number", r"maps images \(3, 3, 256, 256\) to \(\): return \(3, D\)"),
    ("probabilities", "each row is not negative and sums to 1, as probabilities do: .* return_features=True"),
    ("training", "the features of an image depend on the others in its batch, .* call the network's .eval"),
    ("missing", "own_code.missing is not python:module.function with a module that Python can import"),
])
def test_a_function_that_returns_no_features_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        load(f"python:own_code.{name}")


def test_the_lines_of_the_page_load_stylegans_inception(tmp_path, monkeypatch):
    class Inception(torch.nn.Module):
        def forward(self, images, return_features: bool = False):   # as NVIDIA's file
            means = images.float().mean((2, 3))
            return means if return_features else means.softmax(1)

    [lines] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/evaluation.md").read_text(), flags=re.S)
    (tmp_path / "nvidia.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    torch.jit.script(Inception()).save(tmp_path / "inception-2015-12-05.pt")
    theirs, images = load("python:nvidia.stylegan", tmp_path / "inception-2015-12-05.pt"), pictures(2)
    assert torch.allclose(theirs.compute(images)["pool"], images.float().mean((1, 2)))


# ---- the numbers of OpenAI's evaluator on the cross-check's graph and batches


@pytest.fixture
def crosscheck(tmp_path):
    """A folder with the cross-check's graph and its two batches; the test is skipped where they are absent."""
    real_data = Path(os.environ.get("TREAD_REAL_DATA", ROOT.parent / "shared" / "data"))
    source = real_data.parent / "adm_crosscheck"
    if not (real_data.is_dir() and source.is_dir()):
        pytest.skip("no real data beside the checkout, or no ADM cross-check beside them")
    runpy.run_path(str(source / "make_batches.py"))["main"](real_data, tmp_path)
    shutil.copyfile(source / "graph.pb", tmp_path / "graph.pb")  # its hash is recorded beside it
    return tmp_path, json.loads((source / "expected.json").read_text())


def test_all_five_numbers_agree_with_openais_evaluator(crosscheck):
    folder, expected = crosscheck
    run_command(fid.main, "fid.py", images=folder / "sample.npz", reference=folder / "reference.npz", cpu=True,
                features_weights=folder / "graph.pb", results=folder / "results.jsonl")
    row = json.loads((folder / "results.jsonl").read_text())
    # CPUs round the features differently: OpenAI's own counts differ by an image, and noise of 1e-6 moves up to 4.
    assert row["metrics"] == {
        **{name: pytest.approx(expected[name], rel=1e-3) for name in ("fid", "sfid", "inception_score")},
        **{name: pytest.approx(expected[name], abs=2e-3) for name in ("precision", "recall")}}
    assert row["extractor"]["name"] == "adm" and row["reference"]["images"] == 4000 and row["images"] == 3000
