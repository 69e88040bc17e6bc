"""Pictures made at run time, and a tokenizer with the tokens of images."""

import io

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from support import train_tiny_tokenizer
from zephon.vision.pixels import normalize

IMAGE_TOKENS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<|endoftext|>"]


def picture(width, height, mode="RGB", seed=0):
    """A picture with gradients and noise."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([127 + 127 * np.sin(x / 13 + y / 7), 127 + 127 * np.cos(x / 5), (x * y) % 256], axis=-1)
    noisy = waves + np.random.default_rng(seed).normal(0, 20, waves.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).convert(mode)


def file_of(image, kind="JPEG", **options):
    """An image file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def normalized(patches, settings):
    """Patches as a model takes them, float32[patches, patch_dim]."""
    out = np.empty((len(patches), settings.patch_dim), dtype=np.float32)
    normalize(patches, settings, out)
    return out


def image_tokenizer(folder, *tokens, **options):
    """A tiny tokenizer that has image, vision start and vision end tokens."""
    train_tiny_tokenizer(folder, **options)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens([*IMAGE_TOKENS, *tokens])
    tokenizer.save(path)
    return folder
