"""Feature extractors: their inputs, the weights that they accept, and what they refuse."""

import json
import runpy
import shutil
import urllib.error

import pytest
import torch
from conftest import one_rank, run_command

import fid
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


# ---- DINOv2 and TorchScript


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


class Returns(torch.nn.Module):
    """Returns means, one number, probabilities or, as in training mode, means that depend on the batch.

    As NVIDIA's Inception does, it returns features instead of probabilities only on demand.
    """

    def __init__(self, what: str):
        super().__init__()
        self.what = what

    def forward(self, images, return_features: bool = False):
        means = images.float().mean((2, 3))
        if self.what == "a number":
            return means.mean()
        if self.what == "batch":
            return (means - means.mean(0)) / (means.std(0) + 1)
        return means if return_features or self.what == "means" else (means / 255).softmax(1)


def test_a_torchscript_file_is_fed_channels_first(tmp_path):
    torch.jit.script(Returns("means")).save(tmp_path / "mean.pt")
    mine, images = load("torchscript", tmp_path / "mean.pt"), pictures(2)
    assert torch.allclose(mine.compute(images)["pool"], images.float().mean((1, 2)))
    assert mine.sizes == {"pool": 3} and mine.distance == "fd_torchscript"
    assert mine.space == f"torchscript {sha256(tmp_path / 'mean.pt')}"


@pytest.mark.parametrize(("returns", "message"), [
    (None, r"net.pt is not TorchScript from uint8 images .* to \(B, D\)"),
    ("a number", r"net.pt is not TorchScript from uint8 images .* to \(B, D\)"),
    ("probabilities", "each row is not negative and sums to 1, as probabilities do .* return_features=True"),
    ("batch", "the features of an image depend on the others in its batch, as in training mode"),
])
def test_a_torchscript_file_of_another_kind_is_refused(returns, message, tmp_path):
    file = tmp_path / "net.pt"
    torch.jit.script(Returns(returns)).save(file) if returns else file.write_text("no")
    with pytest.raises(ValueError, match=message):
        load("torchscript", file)
    with pytest.raises(ValueError, match="features=torchscript needs features_weights=path/to/file.pt"):
        load("torchscript", None)


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
