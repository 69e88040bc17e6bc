"""A small model, trained from scratch with the Trainer of Hugging Face or the SFTTrainer of TRL, on a CPU or GPUs.

    torchrun --nproc_per_node=2 examples/hugging_face.py --output-dir out/two [--resume] [--sft]

From the project's folder, once `make demo` has built corpus and tokenizer; or from anywhere, with --recipe and
--tokenizer.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainingArguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder")
    parser.add_argument("--recipe", help="by default that of the demo")
    parser.add_argument("--tokenizer", default=".zephon/demo/tokenizer", help="folder, or name on the Hub")
    parser.add_argument("--sft", action="store_true", help="conversations, with TRL's SFTTrainer")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **shape))
    settings = {
        "output_dir": options.output_dir,
        "max_steps": 6,
        "save_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        "dataloader_pin_memory": False,
    }
    data = {"global_batch": 16, "ledger": f"{options.output_dir}/ledger"}
    if options.sft:
        from trl import SFTConfig

        from zephon.integrations.trl import ZephonSFTTrainer

        config = SFTConfig(max_length=256, **settings)
        recipe = options.recipe or "recipes/chat.toml"
        trainer = ZephonSFTTrainer(model, config, processing_class=tokenizer, recipe=recipe, **data)
    else:
        from zephon.integrations.hugging_face import ZephonTrainer

        config = TrainingArguments(**settings)
        recipe = options.recipe or "recipes/hugging_face.toml"
        trainer = ZephonTrainer(model, config, processing_class=tokenizer, recipe=recipe, seq_len=256, **data)
    trainer.train(resume_from_checkpoint=options.resume)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
