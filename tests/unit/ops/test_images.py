"""Rows of text and images as tokens."""

import errno
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from support.vision_data import file_of, image_tokenizer, picture
from zephon.errors import DataError, PipelineError
from zephon.ops.images import TokenizeImages
from zephon.ops.rows import RowFailure, Rows
from zephon.tokenizer.tokenizer import load_tokenizer
from zephon.vision.geometry import VisionSettings

FILE = file_of(picture(64, 32))  # 2 x 1 tokens of 32 pixels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def encoded(folder, texts, images, skips=False, **options):
    spec = TokenizeImages(tokenizer_id=str(folder), vision=VisionSettings(min_pixels=1), **options)
    spec = spec.found({"text": None, "image": None})
    tokenizer = load_tokenizer(str(folder))
    rows = Rows(pa.table({"text": texts, "image": images}), np.arange(len(texts)), skips)
    documents = spec.encoder(tokenizer, None, tokenizer.eos_id).encode(rows)
    shown = np.split(documents.tokens, documents.offsets[1:-1])
    return [tokenizer.decode(each) for each in shown], documents, rows


IMAGE = "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>"


@pytest.mark.parametrize(
    ("text", "image", "expected"),
    [
        ("a cat", FILE, f"{IMAGE}a cat<|eos|>"),
        ("a cat", {"bytes": FILE, "path": "cat.jpg"}, f"{IMAGE}a cat<|eos|>"),
        ("a cat", None, "a cat<|eos|>"),
        (None, FILE, f"{IMAGE}<|eos|>"),
        (["one", None, "two"], [None, FILE, None], f"one{IMAGE}two<|eos|>"),
        (["one"], [FILE], f"{IMAGE}one<|eos|>"),
        ("both", [FILE, FILE], f"{IMAGE}{IMAGE}both<|eos|>"),
    ],
)
def test_the_forms_of_rows(folder, text, image, expected):
    (shown,), documents, _ = encoded(folder, [text], [image])
    assert shown == expected
    trained = documents.tokens[documents.loss]
    assert not np.isin(trained, documents.tokens[~documents.loss]).any()


def test_text_that_spells_a_placeholder_stays_text(folder):
    (shown,), documents, _ = encoded(folder, ["<|image_pad|> x"], [FILE])
    assert shown == f"{IMAGE}<|image_pad|> x<|eos|>"
    assert documents.loss.sum() > 3  # the spelling is several tokens
    assert len(documents.images.grids) == 1


def test_rows_that_cannot_be_used(folder, tmp_path, monkeypatch):
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.jpg").write_bytes(FILE)
    (tmp_path / "secret.jpg").write_bytes(FILE)
    paths = ["a.jpg", "../secret.jpg", "none.jpg", ""]
    shown, _, rows = encoded(folder, list("wxyz"), paths, skips=True, media_root=str(tmp_path / "media"))
    assert shown == [f"{IMAGE}w<|eos|>"]
    reasons = [reason for _, _, reason in rows.failed]
    assert "leads out of media_root" in reasons[0]
    assert "cannot be read (No such file or directory)" in reasons[1]
    assert "expected bytes, a struct with bytes or path, or a path" in reasons[2]
    for root in (tmp_path / "none", tmp_path / "secret.jpg"):
        with pytest.raises(PipelineError, match=f"media_root is {root}; expected an existing folder, a tar archive"):
            encoded(folder, ["x"], ["a.jpg"], media_root=str(root))
    with pytest.raises(RowFailure):
        encoded(folder, ["x"], [b"no image"])

    def failing(_):
        raise OSError(errno.EIO, "Input/output error")

    # A row is left out because of its content; what a machine cannot do at the moment is none of it.
    monkeypatch.setattr(Path, "read_bytes", failing)
    with pytest.raises(DataError, match=r"cannot read 'a.jpg' below media_root .*: Input/output error"):
        encoded(folder, ["x"], ["a.jpg"], skips=True, media_root=str(tmp_path / "media"))
    _, _, rows = encoded(folder, [["a", "b"]], [[FILE]], skips=True)
    assert "2 texts and 1 images; expected lists of the same length" in rows.failed[0][2]
