"""Positions in three dimensions, against the models and loaders that take them."""

import itertools
import random

import numpy as np
import pytest
import torch

from zephon.vision.mrope import mrope_positions

IMAGE, MERGE = 7, 2


def documents(seed, count):
    """Documents of text and images, as token lists, and the grids of their images in patches."""
    choose = random.Random(seed)
    made, grids = [], []
    for _ in range(count):
        tokens = [1] * choose.randint(0, 5)
        for _ in range(choose.randint(0, 3)):
            high, wide = choose.randint(1, 4), choose.randint(1, 4)
            grids.append((1, high * MERGE, wide * MERGE))
            tokens += [5] + [IMAGE] * (high * wide) + [6] + [1] * choose.randint(0, 4)
        made.append([*tokens, 2, 3])
    return made, torch.tensor(grids).reshape(-1, 3)


def ours(records, grids):
    """The positions of records that are lists of documents."""
    starts = [(n, sum(map(len, record[:d]))) for n, record in enumerate(records) for d in range(len(record))]
    tokens = np.array([[*itertools.chain(*record)] for record in records], dtype=np.uint32)
    begin = tuple(np.array(starts, dtype=np.int64).T)
    return torch.from_numpy(mrope_positions(tokens, begin, IMAGE, grids.numpy()[:, 1:] // MERGE))


@pytest.mark.parametrize("seed", range(20))
def test_a_document_has_the_positions_that_transformers_gives_it(seed):
    pytest.importorskip("transformers")
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    ((document,), grids) = documents(seed, 1)
    ids = torch.tensor([document])
    model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen2_5_VLConfig(vision_config={"spatial_merge_size": MERGE})
    theirs, _ = model.get_rope_index(ids, (ids == IMAGE).int(), grids)
    assert torch.equal(ours([[document]], grids), theirs)


@pytest.mark.parametrize("seed", range(20))
def test_packed_records_have_the_positions_of_torchtitans_collator(seed):
    collator = pytest.importorskip("torchtitan.hf_datasets.multimodal.mm_collator")

    made, grids = documents(seed, 6)
    records, width = [made[:3], made[3:]], max(sum(map(len, made[:3])), sum(map(len, made[3:])))
    for record in records:
        if short := width - sum(map(len, record)):
            record.append([0] * short)
    positions = torch.tensor([[place for document in record for place in range(len(document))] for record in records])
    stock = collator.MultiModalCollator(2, width, 99, 14, 2, MERGE, None, True)
    tokens = torch.tensor([[*itertools.chain(*record)] for record in records])
    theirs = stock._build_mrope_positions(tokens, grids, None, positions, image_token_id=IMAGE, video_token_id=99)
    assert torch.equal(ours(records, grids), theirs.movedim(-1, 0))


def test_text_alone_counts_from_its_start():
    assert ours([[[1, 1, 1], [1, 2]]], torch.zeros(0, 3, dtype=torch.int64))[1].tolist() == [[0, 1, 2, 0, 1]]
