"""Patches bit for bit as TorchTitan makes them, and pictures turned as EXIF says."""

import io
import os
import random
import threading

import numpy as np
import pytest
from PIL import Image, ImageOps

from support.vision_data import file_of, normalized, picture
from zephon.errors import PipelineError
from zephon.vision.geometry import VisionSettings
from zephon.vision.headers import BadImage, read_header
from zephon.vision.pixels import image_patches

QWEN = VisionSettings(min_pixels=4096, max_pixels=65_536)
KIMI = VisionSettings(
    patch_size=14,
    temporal_patch_size=1,
    patch_order="raster",
    budget="patches",
    max_patches=300,
    max_patches_per_side=24,
    mean=(0.48, 0.45, 0.4),
    std=(0.26, 0.26, 0.27),
)


def grid_of(data, settings):
    header = read_header(data)
    return settings.grid(header.width, header.height)


def of_torchtitan(data, settings):
    utils = pytest.importorskip("torchtitan.hf_datasets.multimodal.utils.image")
    resize = {"pixels": utils.resize_to_pixel_budget, "patches": utils.resize_to_patch_budget}[settings.budget]
    image = utils.process_image(
        data,
        patch_size=settings.patch_size,
        merge_size=settings.merge_size,
        min_pixels=settings.min_pixels,
        max_pixels=settings.max_pixels,
        max_patches=settings.max_patches,
        max_patches_per_side=settings.max_patches_per_side,
        image_mean=settings.mean,
        image_std=settings.std,
        resize_fn=resize,
    )
    assert image is not None
    return utils.vision_to_patches(
        image, settings.patch_size, settings.temporal_patch_size, settings.merge_size, settings.patch_order
    )


@pytest.mark.frameworks
@pytest.mark.parametrize("settings", [QWEN, KIMI], ids=["qwen", "kimi"])
@pytest.mark.parametrize("size", [(1, 1), (17, 9), (300, 200), (33, 700)])
@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [("JPEG", "RGB", {}), ("JPEG", "CMYK", {}), ("PNG", "RGBA", {}), ("PNG", "P", {}), ("WEBP", "RGB", {})],
)
def test_patches_are_those_of_torchtitan(settings, size, kind, mode, options):
    data = file_of(picture(*size, mode), kind, **options)
    patches, grid_thw = of_torchtitan(data, settings)
    grid = grid_of(data, settings)
    assert grid_thw.tolist() == [1, grid.height, grid.width]
    assert np.array_equal(normalized(image_patches(data, grid, settings), settings), patches.numpy())


@pytest.mark.frameworks
@pytest.mark.parametrize("budget", ["pixels", "patches"])
def test_grids_are_those_of_torchtitan(budget):
    utils = pytest.importorskip("torchtitan.hf_datasets.multimodal.utils.image")
    resize = {"pixels": utils.resize_to_pixel_budget, "patches": utils.resize_to_patch_budget}[budget]
    choose = random.Random(1)
    for _ in range(2_000):
        limits = {
            "patch_size": choose.choice([14, 16]),
            "merge_size": choose.choice([1, 2]),
            "min_pixels": choose.choice([1, 3136, 65_536]),
            "max_pixels": choose.choice([65_536, 1_003_520, 16_777_216]),
            "max_patches": choose.choice([16, 1024, 4096]),
            "max_patches_per_side": choose.choice([32, 512]),
        }
        width, height = (int(2 ** choose.uniform(0, 13)) for _ in range(2))
        settings = VisionSettings(budget=budget, **limits)
        try:
            high, wide, pad_high, pad_wide = resize(height, width, **limits)
        except (ValueError, ZeroDivisionError):
            with pytest.raises(BadImage):
                settings.grid(width, height)
            continue
        patch = settings.patch_size
        assert settings.grid(width, height) == ((high + pad_high) // patch, (wide + pad_wide) // patch, high, wide)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_as_exif_says(kind, orientation):
    settings = VisionSettings(patch_size=8, merge_size=1, min_pixels=1)
    image = picture(64, 48)
    image.getexif()[0x0112] = orientation
    data = file_of(image, kind, quality=95, exif=image.getexif())
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    patches = image_patches(data, grid_of(data, settings), settings)
    high, wide = upright.shape[0] // 8, upright.shape[1] // 8
    shown = patches.reshape(high, wide, 3, 8, 8).transpose(0, 3, 1, 4, 2).reshape(high * 8, wide * 8, 3)
    assert np.array_equal(shown, upright)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_file_that_is_cut_off_cannot_be_decoded(kind):
    data = file_of(picture(200, 100), kind)
    grid = grid_of(data, QWEN)
    with pytest.raises(BadImage, match=f"the {kind.lower()} cannot be decoded"):
        image_patches(data[: len(data) // 2], grid, QWEN)


def test_settings_say_what_they_expect():
    with pytest.raises(PipelineError, match="vision patch_size is 0; expected an integer from 1 to 65536"):
        VisionSettings(patch_size=0)
    with pytest.raises(PipelineError, match="vision min_pixels is 9; expected at most max_pixels, 4"):
        VisionSettings(min_pixels=9, max_pixels=4)


def test_workers_start_no_threads_of_torch():
    torch = pytest.importorskip("torch")
    data = file_of(picture(1300, 900))
    for settings in (QWEN, KIMI):
        image_patches(data, grid_of(data, settings), settings)
    started = []

    def work():
        before = len(os.listdir("/proc/self/task"))
        for settings in (QWEN, KIMI):
            image_patches(data, grid_of(data, settings), settings)
        started.append(len(os.listdir("/proc/self/task")) - before)

    usual = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(usual)
    assert started[0] <= 0


@pytest.mark.parametrize("settings", [QWEN, KIMI], ids=["qwen", "kimi"])
@pytest.mark.parametrize("patches", [0, 1, 128, 300])
def test_normalizing_in_parts_gives_the_same_values(settings, patches):
    values = np.random.default_rng(0).integers(0, 256, (patches, settings.pixels_per_patch), dtype=np.uint8)
    whole = normalized(values, settings)
    each = [normalized(values[n : n + 1], settings) for n in range(patches)]
    assert whole.shape == (patches, settings.patch_dim)
    assert np.array_equal(whole, np.concatenate([np.zeros((0, settings.patch_dim), dtype=np.float32), *each]))
