"""Text columns in, token-id columns out.

    tokenizer = load_tokenizer("path/to/folder")      # or a tokenizer.json, a hub name, or a tokenizer object
    ids, offsets = tokenizer.encode(column)           # uint32[n_tokens], int64[n_docs + 1]

One definition (a tokenizer.json), three libraries that can run it. The fastest one that reproduces the ids of
`tokenizers`, the reference, is used; see `guards` for what it has to prove first.
"""

from zephon.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
