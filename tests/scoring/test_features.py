"""Feature extractors: their inputs, the weights that they accept, and what they refuse."""

import json
import re
import runpy
import shutil
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, one_rank, run_command

import fid
from latents.images import open_source
from runtime.files import sha256
from scoring import features
from scoring.features import Extractor, extract


def load(name, *arguments):
    return features.load_extractor(one_rank(), name, *arguments)


def pictures(count, side=32, seed=0):
    return torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(seed))


# ---- what all share


def test_pixels_are_the_means_of_boxes():
    images, pixels = pictures(3), load("pixels")
    boxes = images.view(3, 8, 4, 8, 4, 3).double().mean((2, 4)) / 255
    pool = pixels.compute(images)["pool"]
    assert pool.shape == (3, pixels.sizes["pool"]) and torch.allclose(pool.double(), boxes.flatten(1), atol=1e-6)


def test_copies_are_dropped_and_the_rest_keep_their_indices():
    images, pixels = pictures(4), load("pixels")
    (indices, values), = extract(pixels, [(torch.tensor([7, -1, 3, -1]), images), (torch.tensor([-1]), images[:1])])
    assert indices.tolist() == [7, 3] and torch.equal(values["pool"], pixels.compute(images[[0, 2]])["pool"])


def test_a_feature_that_is_not_finite_is_named_with_its_image():
    broken = Extractor("mine", "mine", "fd_mine", {"pool": 1}, "",
                       lambda x: {"pool": torch.tensor([[1.0], [torch.nan]])})
    with pytest.raises(ValueError, match=r"mine features \(pool\) of 1 of 2 images are not finite, first of image 9"):
        list(extract(broken, [(torch.tensor([4, 9]), pictures(2))]))


def test_extraction_runs_without_tf32_and_puts_the_setting_back(monkeypatch):
    def setting():
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    seen, before = [], torch.get_float32_matmul_precision()
    mine = Extractor("mine", "mine", "fd_mine", {"pool": 1}, "",
                     lambda x: seen.append(setting()) or {"pool": torch.zeros(len(x), 1)})
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.set_float32_matmul_precision("high")
    list(extract(mine, [(torch.tensor([0]), pictures(1))]))
    assert seen == [("highest", False)] and setting() == ("high", True)
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", ["adm", "inception", "dinov2"])
def test_weights_that_cannot_be_downloaded_raise_a_one_line_error(name, tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(ValueError, match="could not be downloaded .*features_weights=path/to/"):
        load(name)


def test_an_empty_file_in_a_cache_is_downloaded_again_and_a_damaged_one_is_to_be_deleted(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = tmp_path / "hub/checkpoints/weights-inception-2015-12-05-6726825d.pth"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda url, path, *_: Path(path).write_text("half"))
    with pytest.raises(ValueError, match="6726825d.pth is not .* Delete it, and the same command"):
        load("inception")
    (tmp_path / "model.safetensors").touch()
    asked = []

    def download(repo, name, local_files_only, force_download):
        asked.append((local_files_only, force_download))
        if not local_files_only:
            raise urllib.error.URLError("no network")
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(ValueError, match="model.safetensors is empty, and model.safetensors of .* could not be downl"):
        load("dinov2")
    assert asked == [(True, False), (False, True)]


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
    values, one = extractor.compute(images), extractor.compute(images[2:])
    assert {feature: len(value[0]) for feature, value in values.items()} == extractor.sizes
    assert torch.allclose(values["probs"].sum(1), torch.ones(3), atol=1e-5)
    assert all(torch.allclose(values[feature][2:], one[feature], rtol=1e-4, atol=1e-4) for feature in values)
    if name == "adm":
        import tensorflow as tf

        assert not tf.config.get_visible_devices("GPU")
    else:
        assert (values["spatial"] >= 0).all()  # after the ReLU


def test_a_wrong_hash_is_refused_with_both_hashes_and_a_file_that_is_no_graph(graph, tmp_path):
    with pytest.raises(ValueError, match=f"{sha256(graph)}.*sha256={'0' * 64}"):
        load("adm", graph, "0" * 64)
    assert load("adm", graph, sha256(graph).upper()).sha256 == sha256(graph)
    (tmp_path / "graph.pb").write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match="not the Inception graph"):
        load("adm", tmp_path / "graph.pb")


# ---- DINOv2 and code of one's own


def test_dinov2_is_fed_224_and_returns_its_class_token(tmp_path):
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(0)
    network = timm.create_model("vit_small_patch14_dinov2", num_classes=0)
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    dinov2 = features.dinov2(tmp_path / "model.safetensors", None, "cpu", "vit_small_patch14_dinov2")
    images = pictures(2, side=224)
    pool = dinov2.compute(images)["pool"]
    assert pool.shape == (2, 384) and dinov2.distance == "fd_dinov2"
    assert torch.allclose(dinov2.compute(images[1:])["pool"], pool[1:], atol=1e-4)
    small, large = (dinov2.compute(torch.full((1, side, side, 3), 9, dtype=torch.uint8))["pool"] for side in (64, 224))
    assert torch.allclose(small, large, atol=1e-4)


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
    ("pixels", "its distance would be called fd_pixels, as that of features=pixels: give the function another name"),
    ("missing", "own_code.missing is not python:module.function with a module that Python can import"),
])
def test_a_function_that_returns_no_features_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        load(f"python:own_code.{name}")


def test_weights_of_ones_own_features_are_checked_as_others_are(tmp_path):
    torch.save(torch.tensor(2.0), tmp_path / "two.pt")
    with pytest.raises(ValueError, match=f"has SHA-256 {sha256(tmp_path / 'two.pt')}, but the setting is sha256=00"):
        load("python:own_code.means", tmp_path / "two.pt", "00")
    with pytest.raises(ValueError, match="sha256= is that of features_weights=, which is not set"):
        load("python:own_code.means", None, "00")
    (tmp_path / "no.pt").write_text("no")
    with pytest.raises(ValueError, match="no.pt is not what python:own_code.means reads"):
        load("python:own_code.means", tmp_path / "no.pt")
    with pytest.raises(ValueError, match="features=inceptoin is none of adm, inception, .* and python:module.function"):
        features.features_name("inceptoin")


def test_the_example_of_features_is_timms_network(tmp_path):
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(0)
    network = timm.create_model("resnet18").eval()
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    mine = load("python:examples.own_features.resnet18", tmp_path / "model.safetensors")
    images = pictures(2, side=224)
    x = images.permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(network.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        expected = network.global_pool(network.forward_features((x - mean) / std))
        assert torch.allclose(mine.compute(images)["pool"], expected, atol=1e-4) and mine.distance == "fd_resnet18"


def test_the_lines_of_the_page_load_stylegans_inception(tmp_path, monkeypatch):
    """A program of one's own, which returns probabilities unless it is asked for features, as that of NVIDIA does."""
    class Inception(torch.nn.Module):
        def forward(self, images, return_features: bool = False):
            means = images.float().mean((2, 3))
            return means if return_features else (means / 255).softmax(1)

    [lines] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/evaluation.md").read_text(), flags=re.S)
    assert len(lines.splitlines()) == 3
    (tmp_path / "nvidia.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    torch.jit.script(Inception()).save(tmp_path / "inception-2015-12-05.pt")
    theirs, images = load("python:nvidia.stylegan", tmp_path / "inception-2015-12-05.pt"), pictures(2)
    assert torch.allclose(theirs.compute(images)["pool"], images.float().mean((1, 2)))


def test_resnet56s_features_are_those_of_its_published_file(real_data):
    """Its last layer finds the classes of test images, whose order is that of their names, in the features."""
    file = real_data / "resnet56-cifar10/resnet56-4bfd9763.th"
    if not file.is_file():
        pytest.skip("no ResNet-56 beside the real data")
    mine = load("python:scripts.studies.resnet56.resnet56", file)
    assert mine.distance == "fd_resnet56" and mine.sizes == {"pool": 64} and mine.sha256.startswith("4bfd9763")
    source = open_source(str(real_data / "cifar10-test.zip/test"))
    indices = np.arange(0, len(source), len(source) // 200)
    images = torch.from_numpy(np.stack([source.pixels(i, 32) for i in indices]))
    last = torch.load(file, weights_only=True, map_location="cpu")["state_dict"]
    with torch.no_grad():
        logits = mine.compute(images)["pool"] @ last["module.linear.weight"].T + last["module.linear.bias"]
    assert (logits.argmax(1).numpy() == source.labels[indices]).mean() > 0.75


# ---- the numbers of OpenAI's evaluator on the cross-check's graph and batches


@pytest.fixture
def crosscheck(real_data, tmp_path):
    """A folder with the cross-check's graph and its two batches; the test is skipped where they are absent."""
    source = real_data.parent / "adm_crosscheck"
    if not source.is_dir():
        pytest.skip("no ADM cross-check beside the real data")
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
