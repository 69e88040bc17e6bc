"""The SFTTrainer of TRL with the data of a recipe; see `zephon.integrations.hugging_face`.

trainer = ZephonSFTTrainer(
    model, SFTConfig("out", max_steps=1000, max_length=1024, per_device_train_batch_size=4),
    processing_class=tokenizer, recipe="chat.toml", global_batch=64,
)

The recipe takes the place of SFTTrainer's preparation of datasets: chat templates, loss on the assistant's tokens and
packing are keys of it.
"""

from __future__ import annotations

from trl import SFTTrainer

from zephon.integrations.hugging_face import ZephonMixin

__all__ = ["ZephonSFTTrainer"]


class ZephonSFTTrainer(ZephonMixin, SFTTrainer):
    """`SFTTrainer` of TRL with the data of a recipe; see `ZephonMixin`."""
