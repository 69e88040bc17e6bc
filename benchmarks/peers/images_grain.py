"""Grain on photographs with captions: its Parquet reader, maps, first-fit packing and workers. Options: workers.

Decoding, resizing and cutting are what Zephon does too, with the same functions of torchvision and torch. Patches go
through packing and between processes as uint8, and become float32 in the training process, which is the cheapest way.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
import torch

from benchmarks.peers.protocol import Peer, parquet_files, serve

SIDE, MERGE, FRAMES = 16, 2, 2
LEAST, MOST = 65_536, 16_777_216  # pixels
VALUES = 3 * SIDE * SIDE


def sides(high: int, wide: int) -> tuple[int, int]:
    """Qwen's budget of pixels."""
    unit = SIDE * MERGE
    to_high, to_wide = max(round(high / unit), 1) * unit, max(round(wide / unit), 1) * unit
    if to_high * to_wide < LEAST:
        scale = (LEAST / (high * wide)) ** 0.5
        to_high, to_wide = (int(-(-side * scale // unit)) * unit for side in (high, wide))
    assert to_high * to_wide <= MOST
    return to_high, to_wide


class Encode(grain.transforms.Map):
    """Tokens and patches of a row. Made where it runs: the tokenizer need not travel to the workers."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.tokenizer: Any = None

    def map(self, row: dict[str, Any]) -> dict[str, np.ndarray]:
        from torchvision import io

        if self.tokenizer is None:
            from tokenizers import Tokenizer

            torch.set_num_threads(1)
            warnings.filterwarnings("ignore")
            self.tokenizer = Tokenizer.from_file(f"{self.folder}/tokenizer.json")
            names = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|eos|>")
            self.ids = [self.tokenizer.token_to_id(name) for name in names]
        data = torch.frombuffer(bytearray(row["image"]), dtype=torch.uint8)
        picture = io.decode_image(data, mode=io.ImageReadMode.RGB)
        high, wide = sides(*picture.shape[1:])
        if (high, wide) != tuple(picture.shape[1:]):
            picture = torch.nn.functional.interpolate(picture[None], [high, wide], mode="bicubic", antialias=True)[0]
        unit = SIDE * MERGE
        cut = picture.numpy().reshape(3, high // unit, MERGE, SIDE, wide // unit, MERGE, SIDE)
        patches = np.ascontiguousarray(cut.transpose(1, 4, 2, 5, 0, 3, 6)).reshape(-1, VALUES)
        start, image, end, eos = self.ids
        text = self.tokenizer.encode(str(row["text"]), add_special_tokens=False).ids
        tokens = np.array([start, *[image] * (len(patches) // MERGE**2), end, *text, eos], dtype=np.int64)
        return {"tokens": tokens, "patches": patches}


class ImagesGrain(Peer):
    def open(self, rank: int = 0, world: int = 1, states: list[Any] | None = None) -> Iterator[Any]:
        job = self.job
        torch.set_num_threads(1)
        files = grain.MapDataset.source(parquet_files(job["data"])).map(grain.experimental.ParquetIterDataset)
        rows = grain.experimental.InterleaveIterDataset(files, cycle_length=1)
        documents = grain.experimental.RepeatIterDataset(rows).map(Encode(job["tokenizer"]))
        length = job["seq_len"] + 1
        packed = grain.experimental.FirstFitPackIterDataset(
            documents, length_struct={"tokens": length, "patches": length * MERGE**2}, num_packing_bins=16
        )
        batches = packed.batch(job["microbatch"], drop_remainder=True)
        options = grain.MultiprocessingOptions(num_workers=job["workers"], per_worker_buffer_size=2)
        return (self.fields(batch) for batch in batches.mp_prefetch(options))

    @staticmethod
    def fields(batch: dict[str, np.ndarray]) -> tuple[int, dict[str, Any]]:
        """Usable tokens, and what a model takes."""
        patches = torch.from_numpy(batch["patches"][batch["patches_segment_ids"] > 0])
        # In parts and in huge pages, as Zephon does it.
        values = torch.from_numpy(np.empty((len(patches), 3, FRAMES, SIDE**2), dtype=np.float32))
        for start in range(0, len(patches), 128):
            part = patches[start : start + 128].view(-1, 3, 1, SIDE**2)
            values[start : start + 128] = part.to(torch.float32).mul_(1 / 255).sub_(0.5).div_(0.5)
        return int((batch["tokens_segment_ids"] > 0).sum()), {
            "input_ids": torch.from_numpy(batch["tokens"][:, :-1]),
            "labels": torch.from_numpy(batch["tokens"][:, 1:]),
            "position_ids": torch.from_numpy(batch["tokens_positions"][:, :-1]),
            "pixel_values": values.view(len(patches), -1),
        }

    def tokens(self, batch: Any) -> int:
        return batch[0]


if __name__ == "__main__":
    serve(ImagesGrain)
