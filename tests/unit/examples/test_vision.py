"""The demo of pictures: drawn the same each time, the same batches on any topology, a contact sheet of one."""

import random

import numpy as np
import pytest
from PIL import Image

from examples import demo, pictures, vision
from zephon.vision.geometry import VisionSettings
from zephon.vision.pixels import image_patches


@pytest.mark.slow
def test_the_demo_of_pictures_gives_equal_batches_and_a_contact_sheet(tmp_path, monkeypatch, capsys):
    for name, rows in (("CAPTIONS", 30), ("STORIES", 10), ("NOTES", 12)):
        monkeypatch.setattr(pictures, name, rows)
    monkeypatch.setattr("sys.argv", ["demo", "--vision", "--folder", str(tmp_path)])
    demo.main()
    assert "all equal, tokens and pixels" in capsys.readouterr().out
    with Image.open(tmp_path / "batch.png") as sheet:
        assert sheet.width == 1840
        assert len(set(sheet.convert("RGB").resize((64, 64)).get_flattened_data())) > 100


def test_pictures_depend_on_their_seed_only():
    drawn = [pictures.draw_picture(random.Random(5), 96, 64) for _ in range(2)]
    assert drawn[0][0].tobytes() == drawn[1][0].tobytes()
    assert drawn[0][1] == drawn[1][1]


def test_a_picture_is_put_together_from_its_patches():
    settings = VisionSettings(min_pixels=1)
    picture, _ = pictures.draw_picture(random.Random(1), 96, 64)
    patches = image_patches(pictures.encode_picture(picture, "PNG"), settings.grid(96, 64), settings)
    assert np.array_equal(vision.picture_of(patches, 4, 6, settings), np.asarray(picture))
