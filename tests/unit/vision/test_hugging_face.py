"""Pixels and tokens of images against transformers' own processor of Qwen models."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from support.vision_data import file_of, image_tokenizer, normalized, picture
from zephon import Pipeline
from zephon.io import Dataset
from zephon.vision.geometry import VisionSettings
from zephon.vision.headers import read_header
from zephon.vision.pixels import image_patches
from zephon.work import StaticMixtureWorkSource

transformers = pytest.importorskip("transformers")
QWEN2 = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
SIZES = [(64, 64), (300, 200), (97, 411), (640, 480), (31, 500), (1200, 900)]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize(
    "settings",
    [
        VisionSettings(patch_size=14, min_pixels=56**2, max_pixels=28**2 * 256, **QWEN2),  # Qwen2-VL, Qwen2.5-VL
        VisionSettings(patch_size=16, min_pixels=65_536, max_pixels=300_000),  # Qwen3-VL
    ],
    ids=["14", "16"],
)
def test_images_are_those_of_transformers_within_one_unit(settings, kind):
    processor = transformers.Qwen2VLImageProcessor(
        patch_size=settings.patch_size,
        merge_size=settings.merge_size,
        temporal_patch_size=settings.temporal_patch_size,
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        image_mean=list(settings.mean),
        image_std=list(settings.std),
    )
    files = [file_of(picture(*size, seed=n), kind) for n, size in enumerate(SIZES)]
    theirs = processor([Image.open(io.BytesIO(file)).convert("RGB") for file in files], return_tensors="pt")
    headers = [read_header(file) for file in files]
    grids = [settings.grid(header.width, header.height) for header in headers]
    assert theirs["image_grid_thw"].tolist() == [[1, grid.height, grid.width] for grid in grids]
    patches = [image_patches(file, grid, settings) for file, grid in zip(files, grids, strict=True)]
    ours = torch.from_numpy(normalized(np.concatenate(patches), settings))
    assert ours.shape == theirs["pixel_values"].shape
    unit = (ours - theirs["pixel_values"]).abs().reshape(len(ours), 3, -1).amax(dim=(0, 2)) * 255
    assert (unit.numpy() * settings.std <= 1 + 1e-3).all()


def test_batches_are_what_models_of_transformers_take(tmp_path):
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    settings = VisionSettings(patch_size=14, min_pixels=56**2, max_pixels=28**2 * 32, **QWEN2)
    files = [file_of(picture(*size, seed=n), "PNG") for n, size in enumerate(SIZES)]
    images = Dataset.from_dict("a", {"image": files, "text": [f"picture {n} <|image_pad|>" for n in range(6)]})
    words = Dataset.from_dict("b", {"text": ["words that spell <|image_pad|> alone"] * 20})
    tokenizer = image_tokenizer(tmp_path)
    source = StaticMixtureWorkSource(datasets=[images, words], mixture={"a": 1.0, "b": 0.2})
    pipeline = (
        Pipeline(source)
        .options(canonical_replicas=1)
        .tokenize_images(tokenizer, vision=settings, datasets=["a"])
        .tokenize(tokenizer, datasets=["b"])
        .pack_sequences(96, max_documents_per_record=1)
        .batch(4)
    )
    batch = next(iter(pipeline))
    names = {"grid_thw": "image_grid_thw", "mrope_positions": "position_ids"}
    fields = batch.to_training(shift_labels=False, position_mode=None, return_mrope_positions=True, rename_fields=names)
    ids, grids = fields["input_ids"], fields["image_grid_thw"]
    placeholder = ids == pipeline.compiled.image_id
    pipeline.close()
    assert placeholder.sum() == grids.prod(dim=1).sum() // settings.merge_size**2 > 0
    assert (fields["labels"][placeholder] == -100).all()
    assert fields["pixel_values"].shape == (grids.prod(dim=1).sum(), settings.patch_dim)
    model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen2_5_VLConfig()
    real = torch.arange(ids.shape[1]) < torch.from_numpy(batch.lengths)[:, None]
    theirs, _ = model.get_rope_index(ids, placeholder.int(), grids, attention_mask=real.int())
    assert torch.equal(fields["position_ids"][:, real], theirs[:, real])
