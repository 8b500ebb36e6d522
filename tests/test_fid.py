"""Statistics, distances and neighbourhoods against closed forms and other people's code; fid.py against mistakes."""

import json
import shutil
import zipfile
from dataclasses import replace

import forked
import numpy as np
import pytest
import torch
from conftest import PATIENCE, one_rank, run_command, score_with
from filelock import Timeout
from PIL import Image
from scipy import optimize
from test_prepare_latents import prepare
from training_runs import write_run

import fid
from runtime import files
from scoring import image_sets, metrics, results, score
from scoring import statistics as statistics_module
from scoring.features import EXTRACTORS, Extractor, load_extractor
from scoring.results import read_results
from scoring.score import available_metrics, open_reference
from scoring.statistics import FeatureStats
from weights import checkpoint as checkpoints


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def statistics(features, batch=64):
    moments = metrics.Moments(features.shape[1])
    for part in features.split(batch):
        moments.add(part)
    return moments.mean_and_covariance()


# ---- the Fréchet distance


def test_two_gaussians_match_the_closed_form():
    mu1, mu2, a, b = (normal(50, seed=seed) for seed in range(4))
    expected = ((mu1 - mu2) ** 2).sum() + ((a.abs().sqrt() - b.abs().sqrt()) ** 2).sum()  # diagonal ones commute
    assert fid.frechet_distance(mu1, a.abs().diag(), mu2, b.abs().diag()) == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize(("count", "spread"), [(1000, 0), (30, 0), (1000, 5), (30, 5)])
def test_a_set_against_itself_is_zero(count, spread):
    features = normal(count, 300) * torch.logspace(1, 1 - spread, 300)  # up to ten orders in the variances
    assert abs(fid.frechet_distance(*statistics(features), *statistics(features))) < 1e-6


def test_small_singular_values_are_not_lost_beside_large_ones():
    spectrum = torch.logspace(0, -13, 200, dtype=torch.float64)
    u, v = (torch.linalg.qr(normal(200, 200, seed=seed))[0] for seed in (1, 2))
    found = metrics.sum_of_singular_values((u * spectrum) @ v.T).item()
    assert found == pytest.approx(spectrum.sum().item(), rel=1e-12)


def test_the_same_features_through_other_peoples_distance_agree():
    from pytorch_fid.fid_score import calculate_frechet_distance
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric

    one, two = normal(2000, 256, seed=1), normal(1500, 256, seed=2) @ normal(256, 256, seed=3) / 16 + 0.1
    found = fid.frechet_distance(*statistics(one), *statistics(two))
    theirs = [fid_features_to_statistics(features) for features in (one, two)]
    assert found == pytest.approx(fid_statistics_to_metric(*theirs, False)["frechet_inception_distance"], rel=1e-6)
    theirs = [(features.numpy().mean(0), np.cov(features.numpy(), rowvar=False)) for features in (one, two)]
    assert found == pytest.approx(calculate_frechet_distance(*theirs[0], *theirs[1]), rel=1e-6)


# ---- statistics and scores


@pytest.mark.parametrize("batch", [1, 7, 64, 500])
def test_statistics_of_batches_equal_those_of_the_full_set(batch):
    features = normal(500, 20) @ normal(20, 20, seed=1) + 3
    mu, sigma = statistics(features, batch)
    assert torch.allclose(mu, features.mean(0), rtol=1e-12) and torch.allclose(sigma, torch.cov(features.T), rtol=1e-10)


def test_a_mean_far_from_zero_costs_no_digits():
    features = normal(500, 20)
    assert torch.allclose(statistics(features + 1e7, 10)[1], torch.cov(features.T), atol=1e-8)


def inception_score(probs):
    sums = metrics.ScoreSums(len(probs), probs.shape[1])
    order = torch.randperm(len(probs), generator=torch.Generator().manual_seed(0))
    for numbers in order.split(97):  # whichever way they come
        sums.add(numbers, probs[numbers])
    return sums.score()


def test_inception_score_is_the_mean_over_splits_of_5000_in_order():
    probs = (normal(12_000, 6) * torch.linspace(0, 3, 12_000)[:, None]).softmax(1)
    scores = [(p * (p.log() - p.mean(0).log())).sum(1).mean().exp() for p in probs.split(5000)]
    assert len(scores) == 3 and inception_score(probs) == pytest.approx(sum(scores).item() / 3, rel=1e-10)


# ---- precision and recall


def counted(reference, images):
    """Precision and recall by the definition, all distances at once, in float64 from differences."""
    def balls(x):
        return torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square().sort(1).values[:, 3]

    distances = torch.cdist(images, reference, compute_mode="donot_use_mm_for_euclid_dist").square()
    return ((distances <= balls(reference) + 1e-9).any(1).double().mean().item(),
            (distances <= balls(images)[:, None] + 1e-9).any(0).double().mean().item())


@pytest.mark.parametrize("measure", [metrics.squared_distances, metrics.distances_in_half])
@pytest.mark.parametrize("block", [10_000, 64])
@pytest.mark.parametrize("scale", [1, 100])  # 100: the squares overflow float16, and float32 takes over
def test_precision_and_recall_match_the_definition_in_blocks_of_any_size(block, scale, measure, monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK", block)
    reference = (normal(150, 40, seed=1) * 2).round() * scale  # whole numbers, so that float16 is exact
    images = (normal(200, 40, seed=2) * 1.8).round() * scale
    found = metrics.precision_recall(reference.float(), images.float(), measure)
    assert found == counted(reference, images)
    assert 0.05 < found[0] < 0.95 or 0.05 < found[1] < 0.95  # a test of something


@pytest.mark.parametrize(("scale", "shift"),
                         [(1, 0), (1, 4096), (10, 0), (1e-3, 4096), (1e6, 0)])  # mean squares up to 1,900, and beyond
def test_precision_and_recall_of_foreign_features_are_exact_at_any_scale_and_shift(scale, shift):
    reference, images = ((normal(count, 24, seed=count) * spread + mean).mul(scale).float() + shift
                         for count, spread, mean in
                         ((300, 1, 0.1), (400, torch.logspace(0.2, -0.2, 24), -0.1)))
    found = metrics.precision_recall(reference, images)
    assert found == counted(reference.double(), images.double()) and all(0.2 < share < 0.95 for share in found)


def test_copies_lie_in_balls_of_no_radius():
    features = normal(2, 30).float().repeat_interleave(5, 0) * 100 + 1
    assert metrics.precision_recall(features, features.flip(0)) == (1, 1)


def test_pixels_are_compared_without_rounding(tmp_path):
    pale = np.random.default_rng(0).integers(236, 248, (260, 16, 16, 3), np.uint8)  # far from zero, and close together
    np.save(tmp_path / "reference.npy", pale[:120])
    np.save(tmp_path / "images.npy", pale[120:] // 2 + 122)
    found = command(tmp_path, images=tmp_path / "images.npy", reference=tmp_path / "reference.npy")["metrics"]
    pools = [load_extractor("pixels").compute(torch.from_numpy(images))["pool"]
             for images in (pale[:120], pale[120:] // 2 + 122)]
    assert (found["precision"], found["recall"]) == counted(*(pool.double() for pool in pools))
    assert metrics.precision_recall(*pools, metrics.distances_in_half) != counted(*(pool.double() for pool in pools))


def test_a_shift_of_all_features_changes_no_distance():
    one, two = normal(200, 12, seed=1), 1.5 * normal(150, 12, seed=2) + 0.3  # of KID's kernel the origin is a part

    def over_two_ranks(features):
        sums = [metrics.Moments(12) for _ in range(2)]
        for part, rank in zip(features.split(17), 1000 * [0, 1], strict=False):
            sums[rank].add(part)
        away = torch.cat(features.split(17)[1::2]) - features.mean(0)
        others = iter([sums[1].count, sums[1].sum + sums[1].count * sums[1].shift, away.T @ away])
        sums[0].merge(lambda value: value + next(others))
        return sums[0].mean_and_covariance()

    near, far = (fid.frechet_distance(*over_two_ranks(one + shift), *over_two_ranks(two + shift)) for shift in (0, 1e4))
    assert far == pytest.approx(near, rel=1e-7)
    assert near == pytest.approx(fid.frechet_distance(*statistics(one), *statistics(two)), rel=1e-9)
    assert metrics.mind_distance(one + 1e4, two + 1e4) == pytest.approx(metrics.mind_distance(one, two), rel=1e-7)


@pytest.mark.parametrize("asked", [None, "all", ["recall"]])
@pytest.mark.parametrize(("real", "count"), [(3, 40), (40, 3)])
def test_too_few_images_for_neighbours_are_refused_before_any_is_sampled(real, count, asked, tmp_path, run_folder,
                                                                         monkeypatch):
    monkeypatch.setattr(image_sets.SampledImages, "sample", lambda *_: pytest.fail("drawn"))
    np.savez(tmp_path / "reference.npz", arr_0=shapes(real).numpy())
    with pytest.raises(SystemExit,
                       match="cannot be measured, as it needs more than 3 images of both sets, and there are 3"):
        command(tmp_path, checkpoint=run_folder, reference=tmp_path / "reference.npz", num_samples=count, metrics=asked)


def test_too_few_features_for_neighbours_raise_a_one_line_error():
    with pytest.raises(ValueError, match="3 nearest neighbours: 3 reference images and 50 images to score are too few"):
        metrics.precision_recall(normal(3, 4).float(), normal(50, 4).float())


# ---- the kernel distance and MIND


def waves(count, size, step, scale=1.0):
    """Features that are the same on every machine."""
    return (torch.arange(count * size, dtype=torch.float64).view(count, size) * step).sin().mul(1.5).exp() * scale


def test_the_kernel_distance_is_torch_fidelitys(monkeypatch):
    from torch_fidelity.metric_kid import kid_features_to_metric

    images, reference = waves(150, 64, 1.7), waves(200, 64, 2.3, 1.02)
    assert (metrics.SUBSETS, metrics.SUBSET) == (100, 1000)
    monkeypatch.setattr(metrics, "SUBSETS", 7)
    monkeypatch.setattr(metrics, "SUBSET", 100)
    theirs = kid_features_to_metric(images, reference, kid_subsets=7, kid_subset_size=100, verbose=False)
    found = metrics.kernel_distance(images, reference)
    assert found == pytest.approx(theirs["kernel_inception_distance_mean"], rel=1e-10)
    # The images' subset comes first.
    assert metrics.kernel_distance(reference, images) != pytest.approx(found, rel=1e-6)


def test_mind_is_what_torch_fidelity_gives():
    images, reference = waves(1200, 64, 1.7), waves(1500, 64, 2.3, 1.02)
    # toshas/torch-fidelity 5e211a9, mind_features_to_metric, which is newer than the release 0.4.0.
    assert metrics.mind_distance(images, reference) == pytest.approx(145.21056747, rel=1e-6)
    assert metrics.mind_distance(images, reference[:1200]) == pytest.approx(143.81302643, rel=1e-6)


def test_mind_is_the_mean_over_directions_of_the_cheapest_transport(monkeypatch):
    monkeypatch.setattr(metrics, "PROJECTIONS", 5)
    images, reference = normal(80, 12, seed=1), 2 * normal(80, 12, seed=2) + 0.5
    directions = torch.randn(5, 12, generator=torch.Generator().manual_seed(2020)).double()
    costs = []
    for direction in directions / directions.norm(dim=1, keepdim=True):
        apart = ((images @ direction)[:, None] - reference @ direction).square().numpy()
        costs.append(apart[optimize.linear_sum_assignment(apart)].mean())
    assert metrics.mind_distance(images, reference) == pytest.approx(3 * 12 * np.mean(costs), rel=1e-6)


def test_kid_and_mind_are_measured_where_they_are_asked_for(reference_npz, monkeypatch):
    pixels, images = load_extractor("pixels"), shapes(60, seed=5)
    reference = open_reference(one_rank(), reference_npz, pixels)
    batches = [(torch.arange(60), images)]
    with pytest.raises(ValueError,
                       match="kd_pixels cannot be measured, as its subsets have 1000 images, and there are 60"):
        score_with(pixels, reference, batches, 60, ["kd_pixels"])
    for module in (metrics, score):
        monkeypatch.setattr(module, "SUBSET", 50)
    found = score_with(pixels, reference, batches, 60, "all")
    assert list(found) == ["fd_pixels", "precision", "recall", "kd_pixels", "mind_pixels"]
    pools = pixels.compute(images)["pool"], pixels.compute(shapes(120))["pool"]
    assert found["kd_pixels"] == pytest.approx(metrics.kernel_distance(*pools), rel=1e-6)
    assert found["mind_pixels"] == pytest.approx(metrics.mind_distance(*pools), rel=1e-6)
    assert list(score_with(pixels, reference, batches, 60)) == ["fd_pixels", "precision", "recall"]


def test_kid_is_inceptions_and_kdd_dinov2s():
    names = [(named.kid_name, named.mind_name)
             for named in (replace(load_extractor("pixels"), distance=name) for name in ("fid", "fd_dinov2", "fd_x"))]
    assert names == [("kid", "mind"), ("kdd", "mind_dinov2"), ("kd_x", "mind_x")]


# ---- evaluate, as training calls it


def shapes(count, seed=0, side=16):
    from latents.images import ShapeSource

    source = ShapeSource(count, seed)
    return torch.from_numpy(np.stack([source.pixels(i, side) for i in range(count)]))


@pytest.fixture(scope="module")
def reference_npz(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "shapes.npz"
    np.savez(path, arr_0=shapes(120).numpy())
    return path


def test_evaluate_does_not_mind_the_order_and_leaves_random_state_alone(reference_npz):
    pixels, images = load_extractor("pixels"), shapes(60, seed=5)
    reference = open_reference(one_rank(), reference_npz, pixels)
    before = torch.get_rng_state()
    straight = score_with(pixels, reference, [(torch.arange(60), images)], 60)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    parts = [(torch.cat([part, torch.tensor([-1])]), images[torch.cat([part, part[:1]])])
             for part in order.split(7)]  # a copy in each
    again = score_with(pixels, reference, parts, 60)
    assert list(straight) == ["fd_pixels", "precision", "recall"] and again == pytest.approx(straight, rel=1e-9)
    assert torch.equal(torch.get_rng_state(), before)


def test_fewer_images_than_asked_are_not_scored(reference_npz):
    pixels = load_extractor("pixels")
    with pytest.raises(AssertionError, match="10 of 60 images were measured"):
        score_with(pixels, open_reference(one_rank(), reference_npz, pixels), [(torch.arange(10), shapes(10))], 60)


def inception_like():
    """Features with the names and sizes of Inception's, from pixels."""
    pixels = load_extractor("pixels").compute

    def compute(images):
        pool = pixels(images)["pool"]
        return {"pool": pool[:, :16], "spatial": pool[:, 16:40], "probs": pool[:, :5].softmax(1)}

    return Extractor("adm", "inception-2015", "fid", {"pool": 16, "spatial": 24, "probs": 5}, "", compute, "graph.pb",
                     "a" * 64)


def test_statistics_in_the_reference_win_over_its_images_as_in_adm(tmp_path):
    adm, images = inception_like(), shapes(80, seed=3)
    tally = FeatureStats(adm, 120, "cpu")
    tally.add(torch.arange(120), adm.compute(shapes(120)))
    (mu, sigma), (mu_s, sigma_s) = (tally.moments[name].mean_and_covariance() for name in ("pool", "spatial"))
    np.savez(tmp_path / "ref.npz", mu=mu, sigma=sigma, mu_s=mu_s, sigma_s=sigma_s, arr_0=shapes(50, seed=9).numpy())
    reference = open_reference(one_rank(), tmp_path / "ref.npz", adm)
    found = score_with(adm, reference, [(torch.arange(80), images)], 80)
    features = adm.compute(images)
    assert list(found) == ["fid", "sfid", "inception_score", "precision", "recall"]
    assert found["fid"] == pytest.approx(fid.frechet_distance(*statistics(features["pool"]), mu, sigma), rel=1e-9)
    distance = fid.frechet_distance(*statistics(features["spatial"]), mu_s, sigma_s)
    assert found["sfid"] == pytest.approx(distance, rel=1e-9)
    nine = adm.compute(shapes(50, seed=9))["pool"]
    assert (found["precision"], found["recall"]) == metrics.precision_recall(nine, features["pool"])


def test_statistics_that_a_reference_lacks_are_measured_on_its_images(tmp_path):
    adm, own = inception_like(), shapes(50, seed=9)
    np.savez(tmp_path / "ref.npz", mu_s=np.zeros(24), sigma_s=np.eye(24), arr_0=own.numpy())  # no mu and sigma
    reference = open_reference(one_rank(), tmp_path / "ref.npz", adm)
    found = score_with(adm, reference, [(torch.arange(80), shapes(80, seed=3))], 80, ["fid", "sfid"])
    both = (statistics(adm.compute(images)["pool"]) for images in (shapes(80, seed=3), own))
    assert found["fid"] == pytest.approx(fid.frechet_distance(*next(both), *next(both)), rel=1e-9)
    torch.testing.assert_close(reference.statistics["spatial"][0], torch.zeros(24, dtype=torch.float64))


def test_a_reference_without_images_has_no_precision(tmp_path):
    adm = inception_like()
    np.savez(tmp_path / "ref.npz", mu=np.zeros(16), sigma=np.eye(16))
    reference = open_reference(one_rank(), tmp_path / "ref.npz", adm)
    assert available_metrics(adm, reference) == ["fid", "inception_score"]
    for name, why in (("precision", "no images under arr_0"), ("sfid", "no mu_s and sigma_s"),
                      ("vgg", "features=adm has fid, "), ("kid", "no images under arr_0")):
        with pytest.raises(ValueError, match=why):
            available_metrics(adm, reference, [name])


def no_covariances(size):
    """Returns matrices that are no covariances, by what is wrong with them."""
    return {"not symmetric": np.triu(np.ones((size, size))), "all finite": np.full((size, size), np.nan),
            "negative eigenvalues, down to -": np.diag([-0.1, *np.ones(size - 1)]), "of shape": np.eye(size)[:-1]}


@pytest.mark.parametrize(("network", "arrays", "says"), [
    *((inception_like, dict(mu=np.zeros(16), sigma=np.eye(16), mu_s=np.zeros(24), sigma_s=np.eye(24)) | {key: matrix},
       f"ref.npz has {key} .*{why}")
      for key, size in (("sigma", 16), ("sigma_s", 24)) for why, matrix in no_covariances(size).items()),
    # of another network with as many features
    (lambda: load_extractor("pixels"),
     dict(mu=np.zeros(192), sigma=np.eye(192), mu_s=np.zeros(2023), sigma_s=np.eye(2023), arr_0=shapes(5).numpy()),
     "mu_s and sigma_s, so it was measured on Inception, not on features=pixels: make a reference from images"),
    (lambda: load_extractor("pixels"), dict(mu=np.zeros(192), sigma=np.eye(192), weights_sha256="pixels:abc"),
     "weights of SHA-256 abc, but features=pixels are pixels-8x8 by weights of None"),
])
def test_statistics_that_are_none_or_of_another_network_are_refused(network, arrays, says, tmp_path):
    np.savez(tmp_path / "ref.npz", **arrays)
    with pytest.raises(ValueError, match=says):
        open_reference(one_rank(), tmp_path / "ref.npz", network())


@pytest.mark.parametrize("count", [2, 10, 500])
def test_rounded_statistics_and_those_of_few_images_are_accepted(count, tmp_path):
    x = (normal(count, 16) @ normal(16, 16, seed=1)).float().numpy() + 3
    sigma = (x.T @ x - count * np.outer(x.mean(0), x.mean(0))) / (count - 1)  # in float32, of features far from zero
    for rounded in (sigma, np.cov(x.T), np.zeros((16, 16))):
        np.savez(tmp_path / "ref.npz", mu=x.mean(0), sigma=rounded)
        assert "pool" in open_reference(one_rank(), tmp_path / "ref.npz", inception_like()).statistics


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_an_npz_is_read_in_any_order_and_damage_raises_a_one_line_error(write, tmp_path):
    images, path = shapes(40).numpy(), tmp_path / "images.npz"
    write(path, arr_0=images)
    opened = image_sets.open_array("images", str(path))
    for indices in (np.array([3, 4, 30]), np.array([39, 0])):
        assert np.array_equal(opened.read(indices).numpy(), images[indices])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    opened = image_sets.open_array("images", str(path))
    with pytest.raises(ValueError, match="images.npz is damaged before image 40"):
        opened.read(np.arange(40))
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="images.npz is not a complete npz"):
        image_sets.open_array("images", str(path))


def test_files_of_several_frames_are_counted_in_images_to_be_scored(tmp_path, capsys):
    frames = [Image.new("RGB", (8, 8), (k, 0, 0)) for k in range(3)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    frames[1].save(tmp_path / "still.png")
    opened = image_sets.open_images(one_rank(), "images", str(tmp_path))
    assert ("1 of 2 images: the file has several pages or frames, and only the first is used: "
            "moving.gif" in capsys.readouterr().out)
    assert sorted(opened.read(np.arange(2))[:, 0, 0, 0].tolist()) == [0, 1]


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_an_npy_of_any_version_is_read(tmp_path, version):
    with open(tmp_path / "images.npy", "wb") as file:
        np.lib.format.write_array(file, shapes(4).numpy(), version=version)
    opened = image_sets.open_images(one_rank(), "images", str(tmp_path / "images.npy"))
    assert np.array_equal(opened.read(np.array([2, 0])), shapes(4).numpy()[[2, 0]])


@pytest.mark.parametrize(("name", "content", "what"), [
    ("stats.pkl", b"\x80\x04K\x01.", "is a pickle, which can run code and is never loaded"),
    ("stats.pt", b"PK\x03\x04", "is a pickle"),
    ("x.h5", b"\x89HDF\r\n\x1a\n", "is an HDF5 file"), ("x.png", b"\x89PNG", "is one image"),
])
def test_a_reference_of_another_kind_is_called_what_it_is(tmp_path, name, content, what):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError,
                       match=f"reference=.*{name} {what}.*: give a folder, zip or tar of images, .*mu and sigma"):
        image_sets.open_images(one_rank(), "reference", str(tmp_path / name))


# ---- the order of the Inception Score's splits


def in_class_folders(folder, images, named):
    """Writes images of two classes, the first half and the second, into folders of these names."""
    for i, image in enumerate(images):
        place = folder / named[2 * i // len(images)] / f"{i:04d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place)
    return folder


def test_the_inception_score_of_a_folder_is_that_of_shuffled_images(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "SPLIT", 50)
    adm, rng = inception_like(), np.random.default_rng(0)
    colours = np.repeat(np.array([[230, 40, 30], [20, 60, 220]]), 150, 0)[:, None, None]
    images = (colours + rng.normal(0, 25, (300, 1, 1, 3))).clip(0, 255).astype(np.uint8).repeat(8, 1).repeat(8, 2)
    np.savez(tmp_path / "by_class.npz", arr_0=images)
    np.savez(tmp_path / "shuffled.npz", arr_0=images[rng.permutation(300)])
    np.save(tmp_path / "by_class.npy", images)
    in_class_folders(tmp_path / "folder", images, ["cat", "dog"])
    in_class_folders(tmp_path / "other", images, ["zebra", "ant"])  # the classes come in the other order
    with zipfile.ZipFile(tmp_path / "folder.zip", "w") as archive:
        for file in sorted((tmp_path / "folder").rglob("*.png"), reverse=True):
            archive.write(file, file.relative_to(tmp_path))

    def score(name, batch_size=16):
        opened = image_sets.open_images(one_rank(), "images", str(tmp_path / name))
        sums = metrics.ScoreSums(300, 5)
        for places, pictures in image_sets.read_share(one_rank(), opened, opened.choose(300), np.arange(300),
                                                      batch_size):
            sums.add(places, (adm.compute(pictures)["pool"][:, :5] * 20).softmax(1))
        return sums.score()

    by_class, shuffled, folder = score("by_class.npz"), score("shuffled.npz"), score("folder")
    assert by_class == score("by_class.npy")  # an array keeps its order, as in ADM
    assert by_class < 0.9 * shuffled and folder == pytest.approx(shuffled, rel=0.03)
    assert all(other == pytest.approx(folder, rel=1e-9)
               for other in (score("folder.zip"), score("other"), score("folder", 97)))
    halves = image_sets.open_images(one_rank(), "images", str(tmp_path / "folder")).choose(30)
    assert sorted(halves) == list(range(0, 300, 10)) and list(halves) != sorted(halves)


def colours(order):
    """Returns images of ten colours (N, 4, 4, 3), in this order."""
    return (np.asarray(order) * 25 + 5).astype(np.uint8)[:, None, None, None].repeat(4, 1).repeat(4, 2).repeat(3, 3)


def score_in_splits(images, split, monkeypatch):
    """Scores images of ten colours on a stand-in for Inception, to which each colour is a class with certainty."""
    for module in (metrics, score):
        monkeypatch.setattr(module, "SPLIT", split)
    adm = replace(inception_like(), compute=lambda x: inception_like().compute(x) | {
        "probs": torch.nn.functional.one_hot((x[:, 0, 0, 0] // 25).long(), 10).float()},
        sizes={"pool": 16, "spatial": 24, "probs": 10})
    reference = open_reference(one_rank(), images, adm)
    opened = image_sets.open_images(one_rank(), "images", str(images))
    batches = image_sets.read_share(one_rank(), opened, opened.choose(opened.count), np.arange(opened.count), 50)
    return score_with(adm, reference, batches, opened.count, ["inception_score"])["inception_score"]


def test_copies_of_images_are_spread_over_the_splits_whatever_they_are_called(tmp_path, monkeypatch):
    for name, order in (("by_class", np.arange(10).repeat(60)), ("mixed", np.tile(np.arange(10), 60))):
        write_folder(tmp_path / name, torch.from_numpy(colours(order)))
        # Sorted by content it would be 5.
        assert score_in_splits(tmp_path / name, 300, monkeypatch) == pytest.approx(10, abs=0.2), name
    opened = [image_sets.open_images(one_rank(), "images", str(tmp_path / name)) for name in ("by_class", "mixed")]
    first, second = (np.concatenate([one.read(one.choose(600))]) for one in opened)
    assert np.array_equal(first, second)


def test_a_line_says_that_a_short_last_split_or_sorted_images_lower_the_inception_score(tmp_path, monkeypatch, capsys):
    order = np.arange(100) % 10
    for images, expected, says in (
            (order, 10, ""), (np.sort(order), 5, "The images seem sorted by class, which lowers the Inception Score"),
            ([*order, 0], 7, "The Inception Score is the mean over splits of 50 images, and the last split has only 1 "
                             "of the 101, which lowers it: score a multiple of 50.\n")):    # (10 + 10 + 1) / 3
        np.save(tmp_path / "images.npy", colours(images))
        assert score_in_splits(tmp_path / "images.npy", 50, monkeypatch) == pytest.approx(expected)
        out = capsys.readouterr().out
        assert out.startswith(says) and bool(out) == bool(says)


# ---- images as a reference


def count_measured(monkeypatch):
    """Counts the images that go through the features of pixels."""
    counted, pixels = [], load_extractor("pixels")
    counting = replace(pixels, compute=lambda images: counted.append(len(images)) or pixels.compute(images))
    monkeypatch.setitem(EXTRACTORS, "pixels", lambda *_: counting)
    return lambda: [sum(counted), counted.clear()][0]


def test_a_reference_is_whatever_images_are_and_is_measured_once(tmp_path, reference_npz, monkeypatch):
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "torch/hub"))
    measured, own = count_measured(monkeypatch), shapes(120)
    folder = write_folder(tmp_path / "folder", own)
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for file in folder.glob("*.png"):
            archive.write(file, file.name)
    np.save(tmp_path / "array.npy", own.numpy())
    np.save(tmp_path / "drawn.npy", shapes(40, seed=2).numpy())
    expected = command(tmp_path, images=tmp_path / "drawn.npy", reference=reference_npz)["metrics"]
    assert measured() == 160 and [*expected] == ["fd_pixels", "precision", "recall"] and expected["fd_pixels"] > 0
    for name in ("folder", "array.npy"):
        row = command(tmp_path, images=tmp_path / "drawn.npy", reference=tmp_path / name)
        assert row["metrics"] == pytest.approx(expected, rel=1e-9), name
        assert row["reference"]["images"] == 120 and measured() == 160, name
        again = command(tmp_path, images=tmp_path / "drawn.npy", reference=tmp_path / name,
                        results=tmp_path / "elsewhere.jsonl")
        assert measured() == 40 and again["metrics"] == row["metrics"]
    moved = command(tmp_path, images=tmp_path / "drawn.npy", reference=shutil.move(folder, tmp_path / "moved"))
    assert moved["metrics"] == pytest.approx(expected, rel=1e-9) and measured() == 40
    zipped = command(tmp_path, images=tmp_path / "drawn.npy", reference=tmp_path / "images.zip")
    assert zipped["metrics"] == pytest.approx(expected, rel=1e-9) and measured() in (40, 160)  # of the same files


def test_a_kept_reference_is_never_that_of_other_images_or_another_size(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "torch/hub"))
    measured, folder = count_measured(monkeypatch), write_folder(tmp_path / "folder", shapes(20, side=32))
    np.save(tmp_path / "drawn.npy", shapes(40, seed=2).numpy())
    options = dict(images=tmp_path / "drawn.npy", reference=folder, metrics=["fd_pixels"])
    first = command(tmp_path, **options)
    assert measured() == 60 and command(tmp_path, **options)["metrics"] == first["metrics"] and measured() == 40
    small = command(tmp_path, **options, resolution=16)
    assert measured() == 60 and small["metrics"] != first["metrics"] and small["reference"]["size"] == [16, 16]
    Image.new("RGB", (32, 32), "white").save(folder / "0003.png")
    assert command(tmp_path, **options)["metrics"] != first["metrics"] and measured() == 60
    [*kept] = (tmp_path / "torch/tread_references").iterdir()
    assert len(kept) == 3
    for file in kept:
        file.write_bytes(file.read_bytes()[:100])
    command(tmp_path, **options)
    assert measured() == 60, "a damaged file is measured again"


def test_precision_and_recall_use_as_many_images_of_a_large_reference_as_adms_has(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "torch/hub"))
    monkeypatch.setattr("scoring.score.NEIGHBOURS", 30)
    np.save(tmp_path / "drawn.npy", shapes(40, seed=2).numpy())
    folder = write_folder(tmp_path / "folder", shapes(120))
    command(tmp_path, reference_from=folder, out=tmp_path / "ref.npz", reference_images=30)
    found, expected = (command(tmp_path, images=tmp_path / "drawn.npy", reference=reference)["metrics"]
                       for reference in (folder, tmp_path / "ref.npz"))
    assert found == pytest.approx(expected, rel=1e-9)


# ---- the command


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run with one checkpoint of an untrained network of three classes."""
    network = dict(input_size=16, patch_size=4, in_channels=3, hidden_size=32, depth=3, num_heads=2, num_classes=3,
                   init="xavier")
    return write_run(tmp_path_factory.mktemp("runs") / "tiny", network, step=7, class_names=["a", "b", "c"])


def command(tmp_path, **options):
    """Runs fid.py in this process and returns its row, or None where it writes a reference."""
    options = {"features": "pixels", "cpu": True, "batch_size": 16, "results": tmp_path / "results.jsonl", **options}
    run_command(fid.main, "fid.py", **options)
    results = tmp_path / "results.jsonl"
    return json.loads(results.read_text().splitlines()[-1]) if results.is_file() else None


def write_folder(folder, images):
    folder.mkdir(parents=True)
    for number, image in enumerate(images.numpy()):
        Image.fromarray(image).save(folder / f"{number:04d}.png")
    return folder


def test_a_folder_a_zip_and_an_npz_of_the_same_images_score_the_same(tmp_path, reference_npz, capsys):
    images = shapes(40, seed=2)
    folder = write_folder(tmp_path / "images", images)
    (folder / "notes.txt").write_text("not an image")
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for file in folder.glob("*.png"):
            archive.write(file, file.name)
    np.savez(tmp_path / "stored.npz", arr_0=images.numpy())
    np.savez_compressed(tmp_path / "packed.npz", arr_0=images.numpy())
    rows = [command(tmp_path, images=tmp_path / name, reference=reference_npz)
            for name in ("images", "images.zip", "stored.npz", "packed.npz")]
    assert all(row["metrics"] == pytest.approx(rows[0]["metrics"], rel=1e-9) for row in rows)
    assert rows[0]["images"] == 40 and rows[0]["source"]["not_images"] == 1
    shuffled = "shuffled by the files' SHA-256, copies apart"
    assert [row["source"]["order"] for row in rows] == [shuffled, shuffled, "as stored", "as stored"]
    out = capsys.readouterr().out
    assert "1 files do not have the name of an image and are skipped: notes.txt" in out and "fd_pixels" in out


def test_reference_statistics_are_the_same_from_images_and_from_latents_of_them(tmp_path):
    prepare("shapes", tmp_path / "latents", resolution=16, autoencoder="identity", shapes={"count": 60, "seed": 0})
    np.savez(tmp_path / "images.npz", arr_0=shapes(60).numpy())
    for source in ("latents", "images.npz"):
        command(tmp_path, reference_from=tmp_path / source, out=tmp_path / f"{source}.ref.npz", reference_images=20)
    with np.load(tmp_path / "latents.ref.npz") as one, np.load(tmp_path / "images.npz.ref.npz") as two:
        assert {"mu", "sigma", "arr_0"} <= set(one.files) == set(two.files)
        assert np.allclose(one["sigma"], two["sigma"], rtol=1e-10) and one["arr_0"].shape == (20, 16, 16, 3)
        assert np.array_equal(one["arr_0"], two["arr_0"]) and np.array_equal(one["arr_0"], shapes(60).numpy()[::3])
        x = load_extractor("pixels").compute(shapes(60))["pool"].double()
        assert np.allclose(one["mu"], x.mean(0)) and np.allclose(one["sigma"], torch.cov(x.T))
    row = command(tmp_path, images=tmp_path / "images.npz", reference=tmp_path / "latents.ref.npz",
                  metrics=["fd_pixels"])
    assert abs(row["metrics"]["fd_pixels"]) < 1e-6


def test_a_row_says_what_was_measured(tmp_path, run_folder, reference_npz):
    options = dict(checkpoint=run_folder, reference=reference_npz, num_samples=40, num_steps=3)
    row = command(tmp_path, **options, scale=2.0, seed=5)
    source = row["source"]
    assert row["images"] == 40 and source["seeds"] == "5-44" and source["step"] == 7 and source["ema"]
    assert source["evaluations"] == 2 * (2 * 3 - 1)  # Heun's, with both passes of guidance
    file = run_folder / "checkpoints/step-00000007/ema.safetensors"
    assert source["weights_sha256"] == files.sha256(file) and row["reference"]["sha256"] == files.sha256(reference_npz)
    assert row["extractor"]["name"] == "pixels" and row["versions"]["torch"] == torch.__version__ and row["seconds"] > 0
    other = command(tmp_path, **options)
    assert other["source"] != source and other["source"]["evaluations"] == 5 and other["source"]["guidance"] is None


def test_classes_without_images_are_sampled_only_if_they_are_named(tmp_path, run_folder, reference_npz, capsys):
    run = shutil.copytree(run_folder, tmp_path / "run")
    last = checkpoints.step_folder(run, 7)
    meta = checkpoints.read_meta(last)
    checkpoints.write_meta(last, meta | {"data": meta["data"] | {"classes": [0, 2]}})
    options = dict(reference=reference_npz, num_samples=6, num_steps=2)
    rows = [command(tmp_path, checkpoint=folder, **options, **given) for folder, given in (
        (run, {}), (run, {"classes": [0, 2]}), (run, {"classes": [1]}), (run, {"classes": "0-2"}), (run_folder, {}))]
    assert [row["source"]["classes"] for row in rows] == [[0, 2], [0, 2], [1], "all", "all"]
    default, named, absent, every, old = rows
    assert default["metrics"] == named["metrics"] != absent["metrics"]
    assert every["metrics"] == old["metrics"] != default["metrics"]
    assert capsys.readouterr().out.count("1 of 3 classes have no training images (1). They are only sampled") == 4


def test_mixed_sizes_are_scored_where_a_resolution_is_given(tmp_path, reference_npz):
    write_folder(tmp_path / "mixed", shapes(4))
    Image.new("RGB", (40, 30)).save(tmp_path / "mixed/x.png")
    row = command(tmp_path, images=tmp_path / "mixed", reference=reference_npz, resolution=16)
    assert row["images"] == 5 and row["resolution"] == 16 and row["source"]["size"] == [16, 16]


# ---- kept features, and many processes


def test_scores_that_could_not_be_saved_are_refused_before_anything_is_sampled(tmp_path, run_folder, reference_npz,
                                                                               monkeypatch):
    monkeypatch.setattr(image_sets.SampledImages, "sample", lambda *_: pytest.fail("drawn"))
    results = tmp_path / "results.jsonl"
    for spoil in (results.mkdir, lambda: results.symlink_to(tmp_path / "elsewhere")):
        spoil()
        with pytest.raises(SystemExit, match="reading or writing .*results.jsonl failed"):
            command(tmp_path, checkpoint=run_folder, reference=reference_npz, num_samples=4)
        files.remove(results)


def test_what_another_process_scores_meanwhile_has_one_row_and_scoring_again_has_two(tmp_path, reference_npz,
                                                                                     monkeypatch, capsys):
    np.savez(tmp_path / "images.npz", arr_0=shapes(20, seed=4).numpy())
    options, score = dict(images=tmp_path / "images.npz", reference=reference_npz), fid.score_on
    for _ in range(2):
        command(tmp_path, **options, results=tmp_path / "theirs.jsonl")
    theirs = read_results(tmp_path / "theirs.jsonl")
    assert len(theirs) == 2  # scored twice, as the second row was asked for

    def meanwhile(*arguments, **others):
        results.add_rows(tmp_path / "results.jsonl", theirs[:1], before=[])
        return score(*arguments, **others)

    monkeypatch.setattr(fid, "score_on", meanwhile)
    command(tmp_path, **options)
    command(tmp_path, **options, tag="mine")
    assert [row.get("tag") for row in rows_of(tmp_path)] == [None, "mine"]
    assert capsys.readouterr().out.count("they are not added again") == 2
    assert {file.name for file in tmp_path.glob(".*")} == {".theirs.jsonl.lock", ".results.jsonl.lock"}


def test_rows_that_many_processes_add_at_once_are_complete_and_of_each_there_is_one(tmp_path, reference_npz):
    np.savez(tmp_path / "images.npz", arr_0=shapes(20, seed=4).numpy())
    row = command(tmp_path, images=tmp_path / "images.npz", reference=reference_npz)
    several = [row | {"images": count} for count in range(30)]
    lives = [forked.Life(lambda: [results.add_rows(tmp_path / "results.jsonl", [one], before=[]) for one in several])
             for _ in range(4)]
    assert all(life.wait(PATIENCE).code == 0 for life in lives)
    assert sorted(one["images"] for one in rows_of(tmp_path)) == [*range(30)]


@pytest.mark.parametrize("error",
                         [PermissionError(13, "read-only folder"), OSError(37, "no locks on this disk"),
                          Timeout("held for a minute")])
def test_a_folder_in_which_nothing_can_be_locked_costs_no_row(tmp_path, monkeypatch, capsys, error):
    monkeypatch.setattr(files.FileLock, "acquire", lambda *_, **__: (_ for _ in ()).throw(error))
    row = {"source": {}, "metrics": {}, "images": 2, "extractor": {"name": "x"}, "reference": {"path": "x"}}
    results.add_rows(tmp_path / "results.jsonl", [row], before=[])
    assert len(rows_of(tmp_path)) == 1 and "cannot be locked" in capsys.readouterr().out


def test_scores_of_a_checkpoint_without_a_run_are_kept_in_its_folder(tmp_path, run_folder, reference_npz):
    alone = shutil.copytree(checkpoints.latest(run_folder), tmp_path / "models/hub")
    run_command(fid.main, "fid.py", checkpoint=alone, reference=reference_npz, features="pixels", num_samples=4,
                num_steps=1, cpu=True)
    assert [path.parent for path in tmp_path.rglob("results.jsonl")] == [alone]


@pytest.mark.parametrize(("given", "others"), [
    ({}, [{"seed": 1}, {"num_steps": 2}, {"scale": 2.0}, {"weights": "model"}, {"classes": "a"}]),
    ({"diffusion_name": "edm", "num_heads": 2, "autoencoder": "identity"},      # of bare weights
     [{"num_heads": 4}, {"num_classes": 4}, {"diffusion_name": "tread"}]),
])
def test_kept_features_are_never_those_of_another_evaluation(given, others, tmp_path, run_folder, reference_npz,
                                                             monkeypatch):
    bare = shutil.copy(checkpoints.latest(run_folder) / "ema.safetensors", tmp_path / "bare.safetensors")
    options = dict(checkpoint=bare if given else run_folder, reference=reference_npz, num_samples=6, num_steps=1,
                   keep_features=True, **given)
    command(tmp_path, **options)
    for other in others:
        assert command(tmp_path, **{**options, **other})["resumed_images"] == 0, other
    assert command(tmp_path, **options)["resumed_images"] == 6
    for where, version in ((statistics_module, "SCORING_VERSION"), (image_sets, "SAMPLING_VERSION")):
        monkeypatch.setattr(where, version, 0)
        assert command(tmp_path, **options)["resumed_images"] == 0, version


@pytest.mark.parametrize("what", ["checkpoint", "reference"])
def test_two_processes_give_the_numbers_of_one(what, tmp_path, run_folder, reference_npz):
    np.savez(tmp_path / "images.npz", arr_0=shapes(70, seed=4).numpy())
    if what == "checkpoint":
        options = dict(checkpoint=run_folder, num_samples=70, num_steps=3, reference=reference_npz)
    else:
        options = dict(images=tmp_path / "images.npz", reference=write_folder(tmp_path / "folder", shapes(120)))
    alone = command(tmp_path, **options)  # keeps what it measured of the reference, and the two read it
    arguments = [f"{key}={value}" for key, value in options.items()]
    arguments += ["features=pixels", "cpu=true", "batch_size=16", f"results={tmp_path}/results.jsonl"]
    done = forked.run("fid.py", *arguments, ranks=2)
    assert done.returncode == 0, done.stderr
    both = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[-1])
    assert both["processes"] == 2 and both["images"] == 70
    assert both["metrics"] == pytest.approx(alone["metrics"], rel=1e-9)


# ---- several networks, a floor, and the table of a paper


@pytest.fixture
def networks(tmp_path):
    """The settings of three networks: pixels, and two TorchScript ones that stand in for any others."""
    class Coarse(torch.nn.Module):
        def forward(self, images):
            return torch.nn.functional.adaptive_avg_pool2d(images.float() / 255, 4).flatten(1)

    class Rows(torch.nn.Module):
        def forward(self, images):
            return torch.nn.functional.adaptive_avg_pool2d(images.float() / 9, [5, 1]).flatten(1)

    for name, network in (("coarse", Coarse()), ("rows", Rows())):
        torch.jit.script(network).save(tmp_path / f"{name}.pt")
    return dict(features=["pixels", "torchscript", "torchscript"],
                features_weights=[None, f"{tmp_path}/coarse.pt", f"{tmp_path}/rows.pt"])


def rows_of(tmp_path):
    return read_results(tmp_path / "results.jsonl")


def test_several_networks_score_images_that_are_sampled_once(tmp_path, run_folder, reference_npz, networks,
                                                             monkeypatch):
    drawn, draw = [], image_sets.SampledImages.sample

    def counted(self, todo):
        for indices, images in draw(self, todo):
            drawn.extend(indices[indices >= 0].tolist())  # without copies
            yield indices, images

    monkeypatch.setattr(image_sets.SampledImages, "sample", counted)
    options = dict(checkpoint=run_folder, reference=reference_npz, num_samples=20, num_steps=2, keep_features=True)
    alone = command(tmp_path, **options)["metrics"]  # pixels, whose features are kept
    command(tmp_path, **options, **networks)
    assert sorted(drawn) == sorted(2 * [*range(20)])
    _, *rows = rows_of(tmp_path)
    assert [row["resumed_images"] for row in rows] == [20, 0, 0]
    assert rows[0]["metrics"] == pytest.approx(alone, rel=1e-9)
    for row, weights in zip(rows, networks["features_weights"], strict=True):
        one = command(tmp_path, **options, features=row["extractor"]["name"],
                      **({"features_weights": weights} if weights else {}))
        assert one["resumed_images"] == 20 and one["metrics"] == pytest.approx(row["metrics"], rel=1e-9)
    command(tmp_path, **options, **networks)
    assert len(drawn) == 40  # all is kept


def test_fdr_is_the_mean_over_networks_of_the_distance_over_that_of_two_real_sets(tmp_path, reference_npz, networks,
                                                                                  capsys):
    np.save(tmp_path / "drawn.npy", shapes(70, seed=4).numpy() // 2)
    np.save(tmp_path / "floor.npy", shapes(90, seed=8).numpy())
    options = dict(images=tmp_path / "drawn.npy", reference=reference_npz, floor=tmp_path / "floor.npy",
                   metrics=["fd_pixels", "fd_torchscript", "recall"])
    command(tmp_path, **options, **networks)
    ratios = []
    for row, name, weights in zip(rows_of(tmp_path), networks["features"], networks["features_weights"], strict=True):
        network = load_extractor(name, weights)
        own, real, floor = (statistics(network.compute(images)["pool"].double()) for images in (
            shapes(70, seed=4) // 2, shapes(120), shapes(90, seed=8)))
        unit = fid.frechet_distance(*floor, *real)
        ratios.append(fid.frechet_distance(*own, *real) / unit)
        assert list(row["metrics"]) == [network.distance, "recall", "floor", "fdr"]
        assert row["floor"]["path"].endswith("floor.npy")
        assert (row["metrics"]["floor"], row["metrics"]["fdr"]) == pytest.approx((unit, ratios[-1]), rel=1e-6)
    out = capsys.readouterr().out
    assert all(f"{metric} {network}" in out for metric in ("recall", "fdr")
               for network in ("coarse", "rows"))  # and none takes another's place
    [line] = [line.split() for line in out.splitlines() if line.split()[:1] == ["none"]]
    assert float(line[-1]) == pytest.approx(np.mean(ratios), rel=1e-4) and len({*ratios}) == 3
    for floor, why in ((reference_npz, "between them is 0"), (tmp_path / "none.npy", "none.npy failed: No such file")):
        with pytest.raises(SystemExit, match=why):
            command(tmp_path, **{**options, "floor": floor})


def test_one_command_scores_unguided_and_guided_and_prints_a_papers_table(tmp_path, run_folder, reference_npz, capsys):
    options = dict(checkpoint=run_folder, reference=reference_npz, num_samples=12, num_steps=3,
                   guidance_scales=[None, 2.0])
    command(tmp_path, **options, table="markdown")
    unguided, guided = rows_of(tmp_path)
    assert unguided["source"]["guidance"] is None and guided["source"]["guidance"]["scale"] == 2
    summary = ("12 images; EDM, heun sampler, 3 steps, NFE {}, fp32; weights ema at step 7; labels balanced; seeds "
               "100000-100011")
    assert [row["summary"] for row in (unguided, guided)] == [summary.format(5), summary.format(10)]
    written = capsys.readouterr().out.split("| guidance |")[1].splitlines()
    assert written[0] == " fd_pixels | P | R |" and written[1] == "| --- | ---: | ---: | ---: |"
    assert written[2].split(" | ")[:2] == ["| none", f"{unguided['metrics']['fd_pixels']:.5g}"]
    assert f"| {guided['metrics']['fd_pixels']:.5g} |" in written[3] and "scale 2" in written[3]
    assert written[5:7] == [unguided["summary"], guided["summary"]]
    command(tmp_path, **options, table="latex")  # reads the rows
    latex = capsys.readouterr().out
    assert len(rows_of(tmp_path)) == 2 and r"guidance & fd\_pixels & P & R \\" in latex
    assert rf"none & {unguided['metrics']['fd_pixels']:.5g} &" in latex and latex.count(r"\\") == 3
