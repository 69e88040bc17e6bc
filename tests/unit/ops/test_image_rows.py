"""The forms in which rows have text and images."""

import pytest

from zephon.ops.image_rows import Shown, from_json, pieces_of
from zephon.ops.media import BadRow

A, B = Shown("a"), Shown("b")


@pytest.mark.parametrize(
    ("text", "images", "expected"),
    [
        ("words", "a", [A, "words"]),
        ("words", ["a", None, "b"], [A, B, "words"]),
        ("words", None, ["words"]),
        (None, "a", [A]),
        ("", [], []),
        ("<image>\nwhat is it?", "a", [A, "\nwhat is it?"]),
        ("one <image> two <image>", ["a", "b"], ["one ", A, " two ", B]),
        (["one", None, "two"], [None, "a", None], ["one", A, "two"]),
        (["one", "two"], ["a", None], [A, "one", "two"]),
        (["one", "<image>"], None, ["one", "<image>"]),
    ],
)
def test_pieces_are_in_the_order_of_the_document(text, images, expected):
    assert pieces_of(text, images) == expected


def test_images_of_mmc4_come_before_the_text_that_they_are_matched_with():
    images = [{"image_name": name, "matched_text_index": at} for name, at in [("x", 1), ("y", 0.0), ("z", 1)]]
    x, y, z = map(Shown, images)
    assert pieces_of(["one", "two", "three"], images) == [y, "one", x, z, "two", "three"]
    for at in (3, -1, None, 0.5, float("nan"), float("inf")):
        with pytest.raises(BadRow, match=f"an image has the matched_text_index {at!r}; expected the place of one of 1"):
            pieces_of(["one"], [{"image_name": "x", "matched_text_index": 0}, {"matched_text_index": at}])


@pytest.mark.parametrize(
    ("text", "images", "message"),
    [
        (["one", "two"], "a", "2 texts and 1 images; expected lists of the same length"),
        (["one"], ["a", "b"], "1 texts and 2 images; expected lists of the same length"),
        ("<image> and <image>", ["a"], "2 <image> in the text and 1 images"),
        ("<image>", None, "1 <image> in the text and 0 images"),
        ([1], ["a"], "a text is int; expected text"),
        (7, "a", "a text is int; expected text"),
        ("one", [{"matched_text_index": 0}], "images have matched_text_index, and the texts are no list"),
    ],
)
def test_rows_whose_texts_and_images_do_not_fit(text, images, message):
    with pytest.raises(BadRow, match=message):
        pieces_of(text, images)


def test_json_is_read_where_it_is_json():
    assert from_json('["a", null]', always=False) == ["a", None]
    assert from_json("[sic] a caption", always=False) == "[sic] a caption"
    assert from_json('"a"', always=False) == '"a"'
    assert from_json('"a"', always=True) == "a"
    with pytest.raises(BadRow, match="'a' is no JSON"):
        from_json("a", always=True)
