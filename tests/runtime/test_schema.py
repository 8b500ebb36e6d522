"""Settings and records are declared: a value of a wrong type or range raises a one-line error."""

from typing import Annotated, Literal

import pytest
from pydantic import Field

from runtime import schema


class Part(schema.Settings):
    start: int
    share: Annotated[float, Field(ge=0, lt=1)]


class Everything(schema.Settings):
    count: schema.Count
    number: schema.Number
    pick: schema.Selection | None
    mode: bool | Literal["fast", "small"]
    names: list[str]
    betas: Annotated[tuple[schema.Fraction, schema.Fraction], Field(strict=False)]
    part: Part
    parts: list[Part]
    mixed: float | list[int]


GOOD = {"count": 1, "number": -1, "pick": [1, "0-3"], "mode": "fast", "names": [], "betas": [0.9, 0.5],
        "part": {"start": 1, "share": 0}, "parts": [], "mixed": 0.5}
QUOTES = "Text that reads as a number needs two kinds of quotes, as \"'007'\"."


@pytest.mark.parametrize(("key", "value", "sentence"), [
    ("count", 0, "count=0: it should be greater than or equal to 1."),
    ("count", None, "count=null: it should be a valid integer."),
    ("number", float("nan"), "number=NaN: it should be a finite number."),
    ("names", ["a", 1e3], f"names.1=1000.0: it should be a valid string. {QUOTES}"),
    ("mode", "slow", "mode=slow: it should be a valid boolean; or it should be 'fast' or 'small'."),
    ("mixed", [1, 0.5], "mixed=[1, 0.5]: it should be a valid number; or it should be a valid integer."),
    ("betas", [0.9, 2], "betas.1=2: it should be less than or equal to 1."),
    ("betas", [0.9], "betas.1 is missing."), ("part", {"start": 1}, "part.share is missing."),
    ("part", 5, "part=5: it should be set by its parts, as part.<name>=…."),
    ("part", {"strat": 1, "share": 0, "start": 1}, "There is no setting part.strat: did you mean part.start? --help "
                                                   "lists all."),
    ("parts", [{"start": 1, "share": 1}], "parts.0.share=1: it should be less than 1."),
    ("pick", 1.5, "pick=1.5: it should be a valid integer; or it should be a valid string; or it should be a list, "
                  f"typed as pick=[…]. {QUOTES}"),
])  # fmt: skip
def test_a_value_of_another_type_or_range_raises_a_one_line_error(key, value, sentence):
    with pytest.raises(ValueError) as error:
        schema.read(Everything, {**GOOD, key: value})
    assert str(error.value) == sentence


def test_what_is_allowed_is_read():
    assert schema.read(Everything, GOOD).model_dump() == {**GOOD, "betas": (0.9, 0.5)}


class Note(schema.Record):
    count: schema.Count


@pytest.mark.parametrize(("text", "words"), [
    ("{", "is not JSON"), ("ÿþ", "is not JSON"), ("3", "note.json holds no JSON object"),
    ("{}", "note.json: count is missing."), ("[" * 10**5, "is not JSON"),
])  # fmt: skip
def test_a_damaged_record_raises_a_one_line_error_with_the_remedy(tmp_path, text, words):
    (tmp_path / "note.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError) as error:
        schema.read_record(Note, tmp_path / "note.json", "Write it again.")
    assert words in str(error.value) and str(error.value).endswith(" Write it again.")
