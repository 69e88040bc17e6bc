"""Batches with images in the form of Megatron-Bridge's vlm step."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessor

from megatron_zephon.vlm import vlm_batch
from support.vision_data import file_of, image_tokenizer, picture
from zephon import Pipeline
from zephon.loader import VisionSettings

VISION = VisionSettings(patch_size=14, min_pixels=784, max_pixels=7840)
SEQ, LOCAL = 96, 2
FILES = [file_of(picture(30 + 7 * n, 90 - 6 * n, seed=n)) for n in range(9)]


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    pq.write_table(pa.table({"image": FILES, "text": [f"picture {n}" for n in range(9)]}), folder / "a.parquet")
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
    named = {VISION.image_token, VISION.vision_start_token, VISION.vision_end_token}
    return [*made, {token.id for token in pipeline.compiled.tokenizer.special_tokens if token.content in named}]


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


def test_values_are_those_of_the_rows_and_of_the_processor_of_transformers(batches):
    """Place by place from what the batch says of its origin, and pixels from the files of its rows."""
    batch, _, vision = batches
    fields, lines = vlm_batch(batch, fill=7), batch.provenance().to_pylist()
    assert len(vision) == 3  # the token for an image, and those before and after it
    ids, labels, losses, bounds = [], [], [], []
    first = lines[0]["sequence_number"]
    starts = {(line["sequence_number"] - first, line["start"]) for line in lines}
    for record, tokens in enumerate(batch.tokens.tolist()):
        begun = {place for number, place in starts if number == record} | {int(batch.lengths[record])}  # and padding
        bounds += [record * SEQ + place for place in sorted(begun) if place < SEQ]
        for place in range(SEQ):
            follows = place + 1 < batch.lengths[record] and (record, place + 1) not in starts
            trained = follows and tokens[place + 1] not in vision
            ids.append(tokens[place])
            losses.append(float(trained))
            labels.append(tokens[place + 1] if trained else 7)
    assert fields["input_ids"].tolist() == [ids]
    assert fields["loss_mask"].tolist() == [losses] and 0 < sum(losses) < len(losses)
    assert fields["labels"].tolist() == [labels]
    assert fields["cu_seqlens_q"].tolist() == fields["cu_seqlens_kv"].tolist() == [*bounds, LOCAL * SEQ]
    size = {"shortest_edge": VISION.min_pixels, "longest_edge": VISION.max_pixels}
    processor = Qwen2VLImageProcessor(
        patch_size=14, size=size, image_mean=list(VISION.mean), image_std=list(VISION.std)
    )
    theirs = processor([Image.open(io.BytesIO(FILES[line["row"]])) for line in lines], return_tensors="pt")
    shown = fields["visual_inputs"]
    assert torch.equal(shown.image_grid_thw, theirs["image_grid_thw"]) and len(lines) > LOCAL
    unit = (shown.pixel_values - theirs["pixel_values"]).abs().max() * 255 * VISION.std[0]
    assert unit <= 1 + 1e-3 and shown.pixel_values.dtype == torch.float32
    assert np.ptp(shown.pixel_values.numpy()) > 1


def test_a_batch_of_text_has_no_visual_inputs(batches):
    fields = vlm_batch(batches[1])
    assert fields["visual_inputs"] is None and fields["input_ids"].shape == (1, LOCAL * SEQ)
