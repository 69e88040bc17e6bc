"""TorchTitan's main branch, whose batches are flat, with its real Trainer on the CPU.

Runs where TORCHTITAN_MAIN names a checkout and its requirements (grain) can be imported; further folders to import from
may follow it after colons.
"""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zephon.run.ledger import compare

pytest.importorskip("torchtitan")
from support.torchtitan import SAVED, STEPS, Titan
from support.vision_data import file_of, image_tokenizer, picture

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.deep,
    pytest.mark.skipif(not os.environ.get("TORCHTITAN_MAIN"), reason="TORCHTITAN_MAIN names no checkout"),
]


def test_a_run_goes_on_at_another_number_of_ranks_and_validates_alike(tmp_path):
    titan = Titan(tmp_path, pythonpath=os.environ["TORCHTITAN_MAIN"], flat=True)
    try:
        base = titan.run("base", 2, "--validator.freq=6", validate=True)
        assert base.ok, base.logs[0]
        titan.copy_checkpoint("base", SAVED, "resumed")
        resumed = titan.run("resumed", 1, "--validator.freq=6", validate=True)
        assert resumed.ok, resumed.logs[0]
    finally:
        titan.close()
    assert compare(titan.ledger("base"), titan.ledger("resumed")) is None
    expected = titan.digests("base")
    assert titan.digests("resumed") == {step: expected[step] for step in range(SAVED, STEPS)}
    for step in range(SAVED + 1, STEPS + 1):
        assert resumed.losses[step] == pytest.approx(base.losses[step], rel=1e-4)
    assert resumed.validation[6] == pytest.approx(base.validation[6], rel=1e-4)


IMAGES = """
import sys
import torch
from dataclasses import replace
from torchtitan.components.data.dataset import SingleDatasetConfig
from torchtitan.components.data.loader import GrainDataLoader
from torchtitan.components.data.types import DatasetBuildContext
from torchtitan.components.tokenizer import MultiModalTokenizer
from torchtitan.hf_datasets.multimodal import mm_datasets
from torchtitan.hf_datasets.multimodal.mm_collator import MultiModalCollator
from torchtitan.hf_datasets.multimodal.utils.image import resize_to_patch_budget
from torchtitan_zephon import ZephonDataLoader

folder, case = sys.argv[1:]
SEQ = 96
names = {f"{name}_token": f"<|{name}|>" for name in ("vision_start", "vision_end")}
names |= {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "pad_token": "<|endoftext|>"}
tokenizer = MultiModalTokenizer.Config(**names).build(tokenizer_path=f"{folder}/tokenizer")
sizes = {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}
settings = sizes | {"min_pixels": 784, "max_pixels": 7840, "image_mean": (0.5, 0.4, 0.3), "image_std": (0.5, 0.3, 0.2)}
form = {"build_mrope_positions": True}
if case == "kimi":
    sizes["temporal_patch_size"] = settings["temporal_patch_size"] = 1
    settings |= {"resize_fn": resize_to_patch_budget, "max_patches": 20}
    form = {"patch_order": "raster"}
processor = replace(mm_datasets.MM_DATASETS["cc12m"].processor, **settings)
collator = MultiModalCollator.Config(max_images_per_batch=99, **sizes, **form)
vision = GrainDataLoader.Config(
    dataset=mm_datasets.MMSamplePackingConfig(dataset=replace(mm_datasets.MM_DATASETS["cc12m"], processor=processor)),
    collator=collator,
)
loader = ZephonDataLoader.Config.from_toml(f"{folder}/recipe.toml", vision=vision).build(
    dp_world_size=1, dp_rank=0, tokenizer=tokenizer, max_context_length=SEQ, num_tokens_per_batch=SEQ,
)
context = DatasetBuildContext(
    tokenizer=tokenizer, max_context_length=SEQ, num_tokens_per_batch=SEQ, read_options=None,
)
theirs_of, process = collator.build(context=context), processor.build(context=context)
compared = 0
for batch, _ in zip(loader._pipeline, range(6)):
    fields, labels = loader._form.shape(batch)
    (row,) = batch.provenance()["row"].to_pylist()
    (file,) = batch.block.images.files.to_pylist()
    theirs, their_labels = theirs_of([process({"txt": f"picture {row} of things", "jpg": file}, None)])
    assert fields.keys() == theirs.keys(), (fields.keys(), theirs.keys())
    assert torch.equal(labels, their_labels)
    real = int(batch.lengths[0]) - 1  # the last token of a sample is no input of theirs
    for name, value in theirs.items():
        ours = fields[name]
        if name in ("pixel_values", "grid_thw"):
            assert ours.dtype == value.dtype and torch.equal(ours, value), name
        elif isinstance(value, torch.Tensor):
            assert ours.dtype == value.dtype and ours.shape == value.shape, (name, ours.shape, value.shape)
            assert torch.equal(ours[:real], value[:real]), name
        else:
            assert ours == value, name
    compared += len(fields["grid_thw"])
loader.close()
print("compared", compared)
"""


@pytest.mark.parametrize("case", ["qwen", "kimi"])
def test_flat_batches_with_images_are_those_of_its_collator(tmp_path, case):
    files = [file_of(picture(30 + 7 * n, 90 - 6 * n, seed=n)) for n in range(9)]
    texts = [f"picture {n} of things" for n in range(9)]
    pq.write_table(pa.table({"image": files, "text": texts}), tmp_path / "pairs.parquet")
    image_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "recipe.toml").write_text(
        'documents = "images"\nspecial_tokens = "eos"\ncanonical_replicas = 1\nmax_documents_per_record = 1\n'
        'sources = [{ name = "pairs", path = "pairs.parquet" }]\n'
    )
    paths = os.pathsep.join([os.environ["TORCHTITAN_MAIN"].replace(":", os.pathsep), *filter(None, sys.path)])
    done = subprocess.run(  # noqa: PLW1510
        [sys.executable, "-c", IMAGES, str(tmp_path), case],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compared 6" in done.stdout
