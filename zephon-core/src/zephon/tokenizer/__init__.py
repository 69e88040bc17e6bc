"""Text columns in, token-id columns out.

    tokenizer = load_tokenizer("path/to/folder")      # or a tokenizer.json, or a hub name
    ids, offsets = tokenizer.encode(column)           # uint32[n_tokens], int64[n_docs + 1]

One definition (a tokenizer.json), three libraries that can run it. The fastest one that reproduces the ids of
`tokenizers`, the reference, is used; see `guards` for what it has to prove first.

    load        where the files come from: folder, file, hub or object; chat templates
    declared    the tokens that the files beside tokenizer.json declare
    definition  tokenizer.json, checked before any library sees it
    specials    which tokens are BOS and EOS, and which of them a policy adds
    guards      which configurations a fast library may be trusted with
    probes      the texts on which it is compared with the reference
    backends    one class per library
    choice      choosing the library
    cutting     very long documents
    tokenizer   `load_tokenizer` and `Tokenizer`
"""

from zephon.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
