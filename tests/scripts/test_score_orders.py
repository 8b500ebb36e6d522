"""scripts/studies/score_orders.py: which scores order networks by few images as by many."""

import json

import pytest
import torch
from safetensors.torch import save_file

from scripts.studies.score_orders import agreement, main


def test_agreement_is_kendalls_tau_of_each_fifth_and_the_noise_between_them():
    same = [[(1.0, 10.0), (2.0, 10.0)], [(3.0, 20.0), (4.0, 20.0)], [(5.0, 30.0), (6.0, 30.0)]]
    assert agreement(same) == {"tau": pytest.approx(1), "lowest": pytest.approx(1),
                               "noise": pytest.approx(0.5**0.5 / 2)}
    swapped = [[(1.0, 10.0), (4.0, 10.0)], [(3.0, 20.0), (3.0, 20.0)], [(5.0, 30.0), (5.0, 30.0)]]
    assert agreement(swapped)["tau"] == pytest.approx((1 + 1 / 3) / 2)  # of three pairs one is swapped in the second


def test_networks_are_ordered_by_their_distance_from_the_reference_whatever_order_their_features_were_kept_in(
        tmp_path, monkeypatch):
    def keep(name: str, images: dict, pool: torch.Tensor) -> None:
        (tmp_path / "features" / name).mkdir(parents=True)
        record = {"images": images, "count": 100, "extractor": {"weights": "data/net.pt", "sha256": "5e"}}
        (tmp_path / "features" / name / "record.json").write_text(json.dumps(record))
        for part in torch.randperm(len(pool), generator=rng).split(30):
            save_file({"indices": part, "pool": pool[part]},
                      tmp_path / "features" / name / f"{int(part[0]):08d}.safetensors")

    rng = torch.Generator().manual_seed(0)
    keep("0", {"path": "real.zip"}, torch.randn(100, 300, generator=rng))
    for shift in range(3):
        keep(f"{3 - shift}", {"checkpoint": f"runs/{shift}"}, torch.randn(100, 300, generator=rng) + shift)
    monkeypatch.setattr("sys.argv",
                        ["score_orders.py", str(tmp_path / "features"), "--out", str(tmp_path / "out.json")])
    main()
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["agreement"].keys() == {"FD on net"}
    assert found["agreement"]["FD on net"]["tau"] == found["agreement"]["FD on net"]["lowest"] == 1
    few, many = found["scores"]["FD on net"]["runs/2"][0]
    assert 1000 < many < few  # 300 dimensions, each 2 away, and more for fewer images
    assert (tmp_path / "out.png").stat().st_size > 5000

    next((tmp_path / "features/1").glob("*.safetensors")).unlink()
    with pytest.raises(SystemExit, match="features/1 has not the features of all 100 images: rerun its fid.py"):
        main()
