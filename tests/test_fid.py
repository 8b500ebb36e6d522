"""Statistics, distances and neighbourhoods against closed forms and other people's code; fid.py against mistakes."""

import json
import shutil
import zipfile
from contextlib import nullcontext
from dataclasses import replace

import forked
import numpy as np
import pytest
import torch
import training_runs
from conftest import one_rank, run_command, score_with
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from test_prepare_latents import prepare
from training_runs import write_run

import fid
from latents.images import open_shapes
from runtime import files
from scoring import image_sets, metrics, score
from scoring.features import EXTRACTORS, load_extractor
from scoring.score import available_metrics, open_reference
from weights import checkpoints


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moments_of(features, batch=64):
    moments = metrics.Moments(features.shape[1])
    for part in features.split(batch) if len(features) else ():
        moments.add(part)
    return moments


def statistics(features):
    return moments_of(features).mean_and_covariance()


# ---- the Fréchet distance


@pytest.mark.parametrize(("count", "spread"), [(1000, 0), (30, 0), (1000, 5), (30, 5)])
def test_a_set_against_itself_is_zero(count, spread):
    features = normal(count, 300) * torch.logspace(1, 1 - spread, 300)  # up to ten orders in the variances
    assert abs(fid.frechet_distance(*statistics(features), *statistics(features))) < 1e-6


def test_small_singular_values_are_not_lost_beside_large_ones():
    spectrum = torch.logspace(0, -13, 200, dtype=torch.float64)
    u, v = (torch.linalg.qr(normal(200, 200, seed=seed))[0] for seed in (1, 2))
    total = metrics.sum_of_singular_values((u * spectrum) @ v.T).item()
    assert total == pytest.approx(spectrum.sum().item(), rel=1e-12)


def test_the_same_features_through_other_peoples_distance_agree():
    from pytorch_fid.fid_score import calculate_frechet_distance
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric

    one, two = normal(2000, 256, seed=1), normal(1500, 256, seed=2) @ normal(256, 256, seed=3) / 16 + 0.1
    ours = fid.frechet_distance(*statistics(one), *statistics(two))
    fidelity = fid_statistics_to_metric(*(fid_features_to_statistics(features) for features in (one, two)), False)
    assert ours == pytest.approx(fidelity["frechet_inception_distance"], rel=1e-6)
    by_numpy = [(features.numpy().mean(0), np.cov(features.numpy(), rowvar=False)) for features in (one, two)]
    assert ours == pytest.approx(calculate_frechet_distance(*by_numpy[0], *by_numpy[1]), rel=1e-6)


# ---- statistics and scores


def merged(parts):
    """Merges moments as ranks do: each sees the sums over all of them."""
    count = torch.tensor(sum(part.count for part in parts), dtype=torch.float64)
    total = sum(part.sum + part.count * part.shift for part in parts)
    for part in parts:
        sums = iter([count, total])
        part.merge(lambda value, sums=sums: next(sums, value))
    parts[0].outer = sum(part.outer for part in parts)
    return parts[0].mean_and_covariance()


@settings(max_examples=60, deadline=None)
@given(ranks=st.lists(st.integers(0, 9), min_size=2, max_size=500), batch=st.integers(1, 100),
       shift=st.sampled_from([0, 3, 1e4, 1e7]))
def test_moments_of_any_split_over_ranks_and_batches_equal_those_of_the_full_set(ranks, batch, shift):
    features, rank_of = normal(len(ranks), 5) @ normal(5, 5, seed=1) + shift, torch.tensor(ranks)
    parts = [moments_of(features[rank_of == rank], batch) for rank in range(10)]  # some ranks have no image
    mu, sigma = merged(parts)
    assert torch.allclose(mu, features.mean(0), rtol=1e-12, atol=1e-12)
    assert torch.allclose(sigma, torch.cov(features.T), rtol=1e-12, atol=1e-12 * max(1, shift) * sigma.abs().max())


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
    shares = metrics.precision_recall(reference.float(), images.float(), measure)
    assert shares == counted(reference, images)
    assert 0.05 < shares[0] < 0.95 or 0.05 < shares[1] < 0.95  # a test of something


@pytest.mark.parametrize(("scale", "shift"),
                         [(1, 0), (1, 4096), (10, 0), (1e-3, 4096), (1e6, 0)])  # mean squares up to 1,900, and beyond
def test_precision_and_recall_of_foreign_features_are_exact_at_any_scale_and_shift(scale, shift):
    reference, images = ((normal(count, 24, seed=count) * spread + mean).mul(scale).float() + shift
                         for count, spread, mean in
                         ((300, 1, 0.1), (400, torch.logspace(0.2, -0.2, 24), -0.1)))
    shares = metrics.precision_recall(reference, images)
    assert shares == counted(reference.double(), images.double()) and all(0.2 < share < 0.95 for share in shares)


# ---- scores, as training measures them


def shapes(count, seed=0, side=16):
    source = open_shapes(count, seed, side)
    return torch.from_numpy(np.stack([source.pixels(i) for i in range(count)]))


def write_folder(folder, images, places=("",)):
    """Writes images, equally many into each of the places below a folder."""
    for i, image in enumerate(images):
        file = folder / places[i * len(places) // len(images)] / f"{i:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.array(image)).save(file)
    return folder


def zipped(folder):
    """Writes the files of a folder, the last first, into <folder>.zip."""
    with zipfile.ZipFile(f"{folder}.zip", "w") as archive:
        for file in sorted(folder.rglob("*"), reverse=True):
            archive.write(file, file.relative_to(folder))
    return archive.filename


@pytest.fixture(scope="module")
def reference_npz(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "shapes.npz"
    np.savez(path, arr_0=shapes(120).numpy())
    return path


def test_the_order_of_images_changes_no_score_and_random_state_is_left_alone(reference_npz):
    pixels, images = load_extractor(one_rank(), "pixels"), shapes(60, seed=5)
    reference, before = open_reference(one_rank(), reference_npz, pixels), torch.get_rng_state()
    straight = score_with(pixels, reference, [(torch.arange(60), images)], 60)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    parts = [(torch.cat([part, torch.tensor([-1])]), images[torch.cat([part, part[:1]])])
             for part in order.split(7)]  # a copy in each
    again = score_with(pixels, reference, parts, 60)
    assert list(straight) == ["fd_pixels", "precision", "recall"] and again == pytest.approx(straight, rel=1e-9)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(AssertionError, match="10 of 60 images were measured"):
        score_with(pixels, reference, [(torch.arange(10), images[:10])], 60)


def inception_like():
    """Features with the names and sizes of Inception's, from pixels."""
    pixels = load_extractor(one_rank(), "pixels").compute

    def compute(images):
        pool = pixels(images)["pool"]
        return {"pool": pool[:, :16], "spatial": pool[:, 16:40], "probs": pool[:, :5].softmax(1)}

    return replace(load_extractor(one_rank(), "pixels"), name="adm", space="inception-2015", distance="fid",
                   compute=compute, sizes={"pool": 16, "spatial": 24, "probs": 5})


# ---- references


def test_statistics_in_the_reference_win_over_its_images_as_in_adm(tmp_path):
    adm, images, nine = inception_like(), shapes(80, seed=3), shapes(50, seed=9)
    (mu, sigma), (mu_s, sigma_s) = (statistics(adm.compute(shapes(120))[name]) for name in ("pool", "spatial"))
    np.savez(tmp_path / "ref.npz", mu=mu, sigma=sigma, mu_s=mu_s, sigma_s=sigma_s, arr_0=nine.numpy())
    scores = score_with(adm, open_reference(one_rank(), tmp_path / "ref.npz", adm), [(torch.arange(80), images)], 80)
    features = adm.compute(images)
    assert list(scores) == ["fid", "sfid", "inception_score", "precision", "recall"]
    assert scores["fid"] == pytest.approx(fid.frechet_distance(*statistics(features["pool"]), mu, sigma), rel=1e-9)
    assert scores["sfid"] == pytest.approx(
        fid.frechet_distance(*statistics(features["spatial"]), mu_s, sigma_s), rel=1e-9)
    assert (scores["precision"], scores["recall"]) == metrics.precision_recall(
        adm.compute(nine)["pool"], features["pool"])

    np.savez(tmp_path / "ref.npz", mu_s=np.zeros(24), sigma_s=np.eye(24), arr_0=nine.numpy())  # no mu and sigma
    reference = open_reference(one_rank(), tmp_path / "ref.npz", adm)
    lacking = score_with(adm, reference, [(torch.arange(80), images)], 80, ["fid", "sfid"])
    both = (statistics(adm.compute(some)["pool"]) for some in (images, nine))
    assert lacking["fid"] == pytest.approx(fid.frechet_distance(*next(both), *next(both)), rel=1e-9)
    assert not reference.statistics["spatial"][0].any()

    np.savez(tmp_path / "ref.npz", mu=np.zeros(16), sigma=np.eye(16))
    reference = open_reference(one_rank(), tmp_path / "ref.npz", adm)
    with pytest.raises(ValueError, match="sfid cannot be measured .* but fid, inception_score can"):
        available_metrics(adm, reference, ["sfid"])


PIXELS = dict(mu=np.zeros(192), sigma=np.eye(192))
NO_COVARIANCES = {"not symmetric": np.triu(np.ones((192, 192))), "not all finite": np.full((192, 192), np.nan),
                  "negative eigenvalues": np.diag([-0.1, *np.ones(191)]), "of shape": np.eye(192)[:-1]}


@pytest.mark.parametrize(("arrays", "size", "message"), [
    *((PIXELS | {"sigma": matrix}, None, f"ref.npz is not a reference for .*it has sigma .*{why}")
      for why, matrix in NO_COVARIANCES.items()),
    # of another network with as many features
    (PIXELS | dict(mu_s=np.zeros(2023), sigma_s=np.eye(2023), arr_0=shapes(5).numpy()), None,
     "mu_s and sigma_s are Inception's, so make one from images, such as an npy of its arr_0"),
    (PIXELS | dict(weights_sha256="pixels:abc"), None, "features by pixels:abc, not on pixels-8x8 by pixels:None"),
    # of another resolution
    (PIXELS | dict(size=[32, 32]), [16, 16], "is of 32x32 images, but the images are 16x16: name"),
    (dict(arr_0=shapes(5).numpy()), [32, 32], "is of 16x16 images, but the images are 32x32"),
    (PIXELS | dict(size=[32, 32]), [32, 32], None), (PIXELS, [16, 16], None),
])
def test_statistics_that_are_none_or_of_other_features_or_sizes_are_refused(arrays, size, message, tmp_path):
    np.savez(tmp_path / "ref.npz", **arrays)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        open_reference(one_rank(), tmp_path / "ref.npz", load_extractor(one_rank(), "pixels"), images_size=size)


@pytest.mark.parametrize("count", [2, 10, 500])
def test_rounded_statistics_and_those_of_few_images_are_accepted(count, tmp_path):
    x = (normal(count, 16) @ normal(16, 16, seed=1)).float().numpy() + 3
    sigma = (x.T @ x - count * np.outer(x.mean(0), x.mean(0))) / (count - 1)  # in float32, of features far from zero
    for rounded in (sigma, np.cov(x.T), np.zeros((16, 16))):
        np.savez(tmp_path / "ref.npz", mu=x.mean(0), sigma=rounded, size=[16, 16])
        assert "pool" in open_reference(one_rank(), tmp_path / "ref.npz", inception_like()).statistics


# ---- the order of the Inception Score's splits


def score_in_splits(images, monkeypatch):
    """Scores images of ten colours on a stand-in for Inception, to which each colour is a class with certainty."""
    monkeypatch.setattr(metrics, "SPLIT", 300)
    adm = replace(inception_like(), sizes={"pool": 3, "probs": 10}, compute=lambda x: {
        "pool": x[:, 0, 0], "probs": torch.nn.functional.one_hot((x[:, 0, 0, 0] // 25).long(), 10).float()})
    stored = image_sets.open_images(one_rank(), "images", str(images))
    batches = stored.share(one_rank(), stored.choose(stored.count), 50)
    reference = open_reference(one_rank(), images, adm)
    return score_with(adm, reference, batches, stored.count, ["inception_score"])["inception_score"]


def test_the_inception_score_of_files_is_that_of_shuffled_images_and_an_array_keeps_its_order(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (600, 4, 4, 3), dtype=np.uint8)  # no two are equal
    images[:, 0] = (np.arange(10).repeat(60) * 25 + 5).astype(np.uint8)[:, None, None]
    np.savez(tmp_path / "by_class.npz", arr_0=images)
    np.savez(tmp_path / "shuffled.npz", arr_0=images[rng.permutation(600)])
    zipped(write_folder(tmp_path / "folder", images, "abcdefghij"))
    write_folder(tmp_path / "other", images, "jihgfedcba")  # the classes come in the other order
    scores = {path.name: score_in_splits(path, monkeypatch) for path in tmp_path.iterdir()}
    assert scores["by_class.npz"] == pytest.approx(5) and scores["shuffled.npz"] == pytest.approx(10, rel=0.03)
    assert scores["folder"] == scores["folder.zip"] == scores["other"] == pytest.approx(10, rel=0.03)
    chosen = image_sets.open_images(one_rank(), "images", str(tmp_path / "folder")).choose(30)
    assert sorted(chosen) == list(range(0, 600, 20)) and list(chosen) != sorted(chosen)


# ---- the command


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    network = dict(input_size=16, patch_size=4, in_channels=3, hidden_size=32, depth=3, num_heads=2, num_classes=3,
                   init="xavier")
    return write_run(tmp_path_factory.mktemp("runs") / "tiny", network, step=7, class_names=["a", "b", "c"])


def command(tmp_path, **options):
    """Runs fid.py in this process and returns its row, or None where it writes a reference."""
    results = tmp_path / "results.jsonl"
    options = {"features": "pixels", "cpu": True, "batch_size": 16} | options
    run_command(fid.main, "fid.py", **options, **({} if "out" in options else {"results": results}))
    return json.loads(results.read_text().splitlines()[-1]) if results.is_file() else None


def test_a_folder_a_zip_an_npy_and_an_npz_of_the_same_images_score_the_same_on_either_side(tmp_path, reference_npz):
    images = shapes(40, seed=2)
    folder = write_folder(tmp_path / "folder", images)
    (folder / "notes.txt").write_text("not an image")
    zipped(folder)
    np.save(tmp_path / "array.npy", images.numpy())
    np.savez(tmp_path / "stored.npz", arr_0=images.numpy())
    np.savez_compressed(tmp_path / "packed.npz", arr_0=images.numpy())
    names = ("folder", "folder.zip", "array.npy", "stored.npz", "packed.npz")
    rows = [command(tmp_path, images=tmp_path / name, reference=reference_npz) for name in names]
    assert all(row["metrics"] == pytest.approx(rows[0]["metrics"], rel=1e-9) for row in rows)
    assert rows[0]["images"] == 40 and rows[0]["metrics"]["fd_pixels"] > 0
    shuffled = "shuffled by the files' SHA-256"
    assert [row["source"]["order"] for row in rows] == [shuffled, shuffled, *["as stored"] * 3]
    as_reference = [command(tmp_path, images=reference_npz, reference=tmp_path / name) for name in names]
    assert all(row["metrics"] == pytest.approx(as_reference[0]["metrics"], rel=1e-9) for row in as_reference)
    assert {row["reference"]["images"] for row in as_reference} == {40}


def test_precision_and_recall_use_as_many_images_of_a_large_reference_as_adms_has(tmp_path, monkeypatch):
    monkeypatch.setattr(score, "NEIGHBOURS", 30)
    np.save(tmp_path / "images.npy", shapes(40, seed=2).numpy())
    folder = write_folder(tmp_path / "folder", shapes(120))
    command(tmp_path, reference_from=folder, out=tmp_path / "ref.npz", reference_images=30)
    of_folder, of_npz = (command(tmp_path, images=tmp_path / "images.npy", reference=reference)["metrics"]
                         for reference in (folder, tmp_path / "ref.npz"))
    assert of_folder == pytest.approx(of_npz, rel=1e-9)


def test_a_shuffled_set_is_read_in_the_order_in_which_it_is_stored():
    read, shuffled = [], np.random.RandomState(0).permutation(100)
    images = image_sets.StoredImages(100, lambda indices: read.extend(indices), {}, shuffled)
    chosen = images.choose(40)
    places = torch.cat([places for places, _ in images.share(one_rank(), chosen, 7)])
    assert read == sorted(chosen) and chosen[places].tolist() == read


def test_reference_statistics_are_the_same_from_images_and_from_latents_of_them(tmp_path):
    prepare("shapes", tmp_path / "latents", resolution=16, autoencoder="identity", shapes={"count": 60, "seed": 0})
    np.savez_compressed(tmp_path / "images.npz", arr_0=shapes(60).numpy())      # which is read twice
    for source in ("latents", "images.npz"):
        command(tmp_path, reference_from=tmp_path / source, out=tmp_path / f"{source}.ref.npz", reference_images=20)
    with np.load(tmp_path / "latents.ref.npz") as one, np.load(tmp_path / "images.npz.ref.npz") as two:
        assert {"mu", "sigma", "arr_0"} <= set(one.files) == set(two.files) and one["size"].tolist() == [16, 16]
        assert np.allclose(one["sigma"], two["sigma"], rtol=1e-10) and one["arr_0"].shape == (20, 16, 16, 3)
        assert np.array_equal(one["arr_0"], two["arr_0"]) and np.array_equal(one["arr_0"], shapes(60).numpy()[::3])
        x = load_extractor(one_rank(), "pixels").compute(shapes(60))["pool"].double()
        assert np.allclose(one["mu"], x.mean(0)) and np.allclose(one["sigma"], torch.cov(x.T))
    decoded = image_sets.open_decoded(str(tmp_path / "latents"), torch.device("cpu"), "sd_vae_ema")
    assert decoded.record["autoencoder"] == "identity"      # whatever decodes what is scored against it
    row = command(tmp_path, images=tmp_path / "latents", reference=tmp_path / "images.npz.ref.npz")
    assert abs(row["metrics"]["fd_pixels"]) < 1e-6 and row["reference"]["size"] == [16, 16]
    assert row["image_rule"] == image_sets.SAMPLED_RULE


def test_a_row_has_what_was_measured(tmp_path, run_folder, reference_npz):
    options = dict(checkpoint=run_folder, reference=reference_npz, num_samples=40, num_steps=3)
    row = command(tmp_path, **options, scale=2.0, seed=5, tag="mine")
    source, file = row["source"], run_folder / "checkpoints/step-00000007/ema.safetensors"
    assert (row["images"], source["seeds"], source["step"], row["tag"]) == (40, "5-44", 7, "mine")
    assert source["evaluations"] == 2 * (2 * 3 - 1)  # Heun's, with both passes of guidance
    assert source["size"] == row["reference"]["size"] == [16, 16]
    assert source["weights_sha256"] == files.sha256(file) and row["reference"]["sha256"] == files.sha256(reference_npz)
    assert row["summary"] == ("40 images; EDM, heun sampler, 3 steps, NFE 10, scale 2.0, drop_label True, fp32; "
                              "weights ema at step 7; labels balanced; seeds 5-44")
    other = command(tmp_path, **options, weights="model")
    assert other["source"] != source and other["source"]["evaluations"] == 5 and other["source"]["guidance"] is None


def test_classes_without_images_are_sampled_only_if_they_are_named(tmp_path, run_folder, reference_npz):
    last = checkpoints.latest(shutil.copytree(run_folder, tmp_path / "run"))
    meta = checkpoints.read_meta(last)
    checkpoints.write_meta(last, meta | {"data": meta["data"] | {"classes": [0, 2]}})
    for named, classes in (({}, [0, 2]), ({"classes": [1]}, [1])):
        row = command(tmp_path, checkpoint=last, reference=reference_npz, num_samples=6, num_steps=2, **named)
        assert row["source"]["classes"] == classes


@pytest.mark.parametrize("what", ["checkpoint", "reference"])
def test_two_processes_give_the_numbers_of_one(what, tmp_path, run_folder, reference_npz):
    np.savez(tmp_path / "images.npz", arr_0=shapes(70, seed=4).numpy())
    options = (dict(checkpoint=run_folder, num_samples=70, num_steps=3, reference=reference_npz)
               if what == "checkpoint" else
               dict(images=tmp_path / "images.npz", reference=write_folder(tmp_path / "folder", shapes(120))))
    alone = command(tmp_path, **options)
    arguments = [f"{key}={value}" for key, value in options.items()]
    arguments += ["features=pixels", "cpu=true", "batch_size=16", f"results={tmp_path}/results.jsonl"]
    done = forked.run("fid.py", *arguments, ranks=2)
    assert done.returncode == 0, done.stderr
    both = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[-1])
    assert both["processes"] == 2 and both["images"] == 70
    assert both["metrics"] == pytest.approx(alone["metrics"], rel=1e-9)


def test_a_score_that_a_kill_prevented_is_made_up_and_the_others_are_not_made_again(
        tmp_path, shapes, pixel_reference):     # kills: tests/rigs/test_kills.py
    run, results = tmp_path / "run", tmp_path / "run/results.jsonl"
    training = ("steps=2", "model.depth=3", "model.routes=[]", "ema.decay=[0.99,0.9]", "evaluate.every=2",
                f"evaluate.reference={pixel_reference}", "evaluate.num_samples=6", "evaluate.num_steps=1",
                "evaluate.guidance_scales=[1.5]")
    training_runs.trained(run, shapes, *training)
    *others, last = files.read_rows(results)
    results.write_text("".join(results.read_text().splitlines(keepends=True)[:-1]))
    training_runs.trained(run, shapes, *training)
    *kept, made_up = files.read_rows(results)
    assert kept == others and made_up["metrics"] == last["metrics"] and len(kept) == 3


# ---- public reports


def distance(*sets):
    """The distance between the pixels of two sets of images."""
    pixels = EXTRACTORS["pixels"](None, "cpu")
    moments = [part for images in sets for part in statistics(pixels.compute(images)["pool"].double())]
    return pytest.approx(fid.frechet_distance(*moments), rel=1e-6, abs=1e-6)


REAL, OTHER = shapes(60), shapes(37, seed=3)
BITS = torch.arange(30, dtype=torch.uint8).view(30, 1, 1, 1) % 2


@pytest.mark.parametrize(("images", "reference", "expected"), [
    # all features of both sets are equal: clovaai/generative-evaluation-prdc#7, photosynthesis-team/piq#285
    (REAL[:1].repeat(9, 1, 1, 1), REAL[:1].repeat(7, 1, 1, 1),
     {"fd_pixels": pytest.approx(0, abs=1e-6), "precision": 1, "recall": 1}),
    # copies of one image, whose covariance is 0, against others: GaParmar/clean-fid#61, toshas/torch-fidelity#54
    (REAL[:1].repeat(9, 1, 1, 1), REAL, {"fd_pixels": distance(REAL[:1].repeat(9, 1, 1, 1), REAL)}),
    # a collapsed model: precision is its quality, recall its variety, and not the reverse: toshas/torch-fidelity#58
    (REAL[:1].repeat(30, 1, 1, 1) ^ BITS, REAL, {"precision": 1, "recall": pytest.approx(0, abs=0.04)}),
])
def test_what_people_reported_is_right(images, reference, expected, tmp_path):    # refusals: tests/test_mistakes.py
    for name, array in (("images", images), ("reference", reference)):
        np.savez(tmp_path / f"{name}.npz", arr_0=array)
    # A batch size above the number of images: mseitzer/pytorch-fid#42, GaParmar/clean-fid#32.
    row = command(tmp_path, images=tmp_path / "images.npz", reference=tmp_path / "reference.npz", batch_size=500)
    assert {name: row["metrics"][name] for name in expected} == expected and row["images"] == len(images)


def test_copies_among_files_are_counted_in_a_line_and_a_resolution_makes_their_sizes_one(
        tmp_path, capsys, reference_npz):
    folder = write_folder(tmp_path / "folder", [*OTHER[torch.arange(37) % 30].numpy(), np.zeros((30, 40, 3), np.uint8)])
    for images in (folder, zipped(folder)):
        assert command(tmp_path, images=images, reference=reference_npz, resolution=16)["images"] == 38
        assert f"{images}: 7 of 38 files are copies of others, as if seeds were used twice." in capsys.readouterr().out


def test_partly_transparent_files_are_scored_only_as_typed(tmp_path, reference_npz):
    """ADM, pytorch-fid and clean-fid drop alpha by convert("RGB"); over white the same files give another score."""
    rgba = np.random.default_rng(0).integers(0, 256, (10, 16, 16, 4), np.uint8)
    folder = write_folder(tmp_path / "rgba", rgba)
    np.save(tmp_path / "rgb.npy", rgba[..., :3])
    with pytest.raises(SystemExit, match="10 of 10 files are partly transparent, such as .*: set alpha=drop to keep"):
        command(tmp_path, images=folder, reference=reference_npz)
    plain, drop, white = (command(tmp_path, reference=reference_npz, metrics=["fd_pixels"], **options) for options in (
        dict(images=tmp_path / "rgb.npy"), dict(images=folder, alpha="drop"), dict(images=folder, alpha="white")))
    values = [row["metrics"]["fd_pixels"] for row in (plain, drop, white)]
    assert values[0] == pytest.approx(values[1], rel=1e-9) != pytest.approx(values[2], rel=1e-2)
    assert [row["source"].get("alpha") for row in (plain, drop, white)] == [None, "drop", "white"]
