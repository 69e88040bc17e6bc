"""What the examples of trainers share: a tiny model, and the options of the command line."""

import argparse
import os

import torch
from tokenizers import Tokenizer
from torch.nn import Embedding, Linear, Module
from torch.nn.functional import cross_entropy


class Tiny(Module):
    """Predicts a token from the one before it, and trains in seconds on a CPU."""

    def __init__(self, tokenizer: str) -> None:
        super().__init__()
        torch.manual_seed(1)  # the same model on every rank
        vocabulary = Tokenizer.from_file(os.path.join(tokenizer, "tokenizer.json")).get_vocab_size()
        self.embedding, self.output = Embedding(vocabulary, 32), Linear(32, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        """The loss; `labels` are shifted already."""
        return cross_entropy(self.output(self.embedding(input_ids)).flatten(0, 1), labels.flatten())


def parse_options(description: str) -> argparse.Namespace:
    """Options of the command line; defaults are what `make demo` builds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--recipe", default="recipes/pretrain.toml")
    parser.add_argument("--tokenizer", default=".zephon/demo/tokenizer")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=3, help="steps between saves")
    parser.add_argument("--out", required=True, help="folder of checkpoints and of the ledger")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    return parser.parse_args()
