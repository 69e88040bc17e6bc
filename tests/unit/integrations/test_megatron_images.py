"""Batches with images in the form of Megatron-Bridge's vlm step."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megatron_zephon.vlm import vlm_batch
from support.vision_data import file_of, image_tokenizer, picture
from zephon import Pipeline
from zephon.loader import VisionSettings

VISION = VisionSettings(patch_size=14, min_pixels=784, max_pixels=7840)
SEQ, LOCAL = 96, 2


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    files = [file_of(picture(30 + 7 * n, 90 - 6 * n, seed=n)) for n in range(9)]
    pq.write_table(pa.table({"image": files, "text": [f"picture {n}" for n in range(9)]}), folder / "a.parquet")
    pq.write_table(pa.table({"text": ["words alone"] * 9}), folder / "b.parquet")
    made = []
    for name, documents in (("a", "images"), ("b", "text")):
        recipe = folder / f"{name}.toml"
        recipe.write_text(
            f'documents = "{documents}"\ncanonical_replicas = 1\npack_algorithm = "best_fit"\n'
            f'sources = [{{ name = "{name}", path = "{name}.parquet" }}]\n'
        )
        pipeline = Pipeline.from_recipe(
            recipe,
            tokenizer=image_tokenizer(folder / f"tokenizer-{name}"),
            seq_len=SEQ,
            microbatch_size=LOCAL,
            vision=VISION,
        )
        made.append(next(iter(pipeline)))
        pipeline.close()
    return made


@pytest.mark.parametrize("mrope", [False, True])
def test_a_batch_is_one_packed_sequence_with_its_visual_inputs(batches, mrope):
    batch = batches[0]
    fields, plain = vlm_batch(batch, mrope=mrope), batch.to_training(boundary_mask_loss=True, return_loss_mask=True)
    size = LOCAL * SEQ
    for name in ("input_ids", "loss_mask"):
        assert torch.equal(fields[name], plain[name].reshape(1, size))
    trained = fields["loss_mask"] > 0
    assert torch.equal(fields["labels"][trained], plain["labels"].reshape(1, size)[trained])
    assert fields["labels"].min() >= 0 and 0 < trained.sum() < size
    bounds = fields["cu_seqlens_q"]
    assert torch.equal(bounds, fields["cu_seqlens_kv"]) and bounds.dtype == torch.int32
    assert bounds[0] == 0 and bounds[-1] == size and len(bounds) > LOCAL + 1
    assert fields["max_seqlen_q"] == fields["max_seqlen_kv"] == bounds.diff().max()
    assert fields["position_ids"].shape == ((3, 1, size) if mrope else (1, size))
    assert (fields["position_ids"][..., bounds[:-1].long()] == 0).all()
    images = fields["visual_inputs"].normalized_for_model()
    grids = images["image_grid_thw"]
    assert torch.equal(grids, plain["grid_thw"]) and grids.shape[1] == 3
    assert torch.equal(images["pixel_values"], plain["pixel_values"])
    assert images["pixel_values"].shape == (grids.prod(dim=1).sum(), VISION.patch_dim)


def test_a_batch_of_text_has_no_visual_inputs(batches):
    fields = vlm_batch(batches[1])
    assert fields["visual_inputs"] is None and fields["input_ids"].shape == (1, LOCAL * SEQ)
