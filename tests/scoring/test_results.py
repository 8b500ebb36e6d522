"""A recorded score is found again by all that it depends on, wherever files lie."""

import json

import pytest

from scoring import results

ROW = {
    "metrics": {"fid": 3.2, "recall": 0.5}, "images": 50_000, "image_rule": "floor", "resolution": None,
    "source": {"checkpoint": "runs/a", "weights_sha256": "1", "step": 4, "sampling_version": 2, "num_steps": 40,
               "guidance": {"scale": 1.5, "weak": {"checkpoint": "runs/b", "weights_sha256": "2"}}},
    "extractor": {"name": "adm", "weights": "graph.pb", "sha256": "3"},
    "reference": {"path": "ref.npz", "sha256": "4"}, "versions": {"torch": "2.15"}, "scoring_version": 2,
    "processes": 1, "device": "cpu", "batch_size": 64, "seconds": 9.0,
}


def with_change(path: str, value: object) -> dict:
    """ROW, whose `part.key` has another value, or none where that is `...`."""
    row = json.loads(json.dumps(ROW))
    *parts, key = path.split(".")
    place = row
    for part in parts:
        place = place[part]
    place[key] = value
    if value is ...:
        del place[key]
    return row


@pytest.mark.parametrize(("path", "value", "is_found", "by_any_version"), [
    ("seconds", 1.0, True, True), ("batch_size", 8, True, True), ("processes", 2, True, True),
    ("device", "H100", True, True), ("source.size", [256, 256], True, True),
    # where a file lies, and what it holds
    ("source.checkpoint", "moved", True, True), ("source.weights_sha256", "0", False, False),
    ("source.guidance.weak.checkpoint", "moved", True, True),
    ("source.guidance.weak.weights_sha256", "0", False, False),
    ("extractor.weights", "moved.pb", True, True), ("extractor.sha256", "0", False, False),
    ("reference.path", "moved.npz", True, True), ("reference.sha256", "0", False, False),
    # how images were made and scored
    ("source.step", 3, False, False), ("source.num_steps", 50, False, False), ("source.guidance", None, False, False),
    ("images", 10_000, False, False), ("resolution", 64, False, False), ("image_rule", "round", False, False),
    ("floor", {"path": "x", "sha256": "5"}, False, False), ("tag", "mine", False, False),
    ("metrics.sfid", None, False, False), ("metrics.recall", ..., True, True),
    # the code
    ("versions.torch", "2.16", False, True), ("source.sampling_version", 3, False, True),
    ("scoring_version", 3, False, True),
])  # fmt: skip
def test_a_row_is_found_by_all_that_its_scores_depend_on(path, value, is_found, by_any_version, tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps(ROW) + "\n")
    wanted = with_change(path, value)
    wanted["metrics"] = dict.fromkeys(wanted["metrics"])  # not measured yet
    if path == "floor":
        wanted["metrics"]["floor"] = None
    assert [results.scored_before(wanted, file, any_version=any_version) == ROW
            for any_version in (False, True)] == [is_found, by_any_version]


@pytest.mark.parametrize(("path", "value"), [("versions", ...), ("scoring_version", ...), ("source.step", 3)])
def test_a_run_that_trains_is_found_wherever_it_lies_and_at_its_step_alone(path, value, tmp_path):
    file = tmp_path / "results.jsonl"
    source = {"in_training": True, "checkpoint": "runs/a", "step": 4}
    file.write_text(json.dumps(with_change("source", source)) + "\n")
    moved = with_change("source", source | {"checkpoint": "moved"})
    assert results.scored_before(moved, file) is not None
    old = json.loads(file.read_text())
    if value is ...:  # a row that does not record the version of the code
        del old[path]
    else:
        old["source"]["step"] = value
    file.write_text(json.dumps(old) + "\n")
    assert results.scored_before(moved, file) is None
