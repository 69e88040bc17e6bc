"""Choosing the library that encodes: the first one that is fit for the tokenizer and gives the reference's ids."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import string_array
from zephon.errors import TokenizerError
from zephon.tokenizer.backends import BACKENDS, Backend, BackendFailure, Encoded, TokenizersBackend
from zephon.tokenizer.cutting import joins_at_space
from zephon.tokenizer.definition import TokenizerDefinition, Tree
from zephon.tokenizer.guards import refusal
from zephon.tokenizer.probes import look_alikes, probe_texts

FAST = ("fastokens", "gigatoken")  # in this order, before `tokenizers` itself

_log = logging.getLogger("zephon.tokenizer")


@dataclass(frozen=True)
class Answers:
    """Texts, and the ids that the reference gives for them."""

    what: str
    texts: Sequence[str]
    column: pa.Array
    expected: Encoded

    @classmethod
    def of(cls, what: str, texts: Sequence[str], reference: TokenizersBackend) -> Answers:
        column = string_array(texts, pa.large_string())
        return cls(what, texts, column, reference.encode(column))

    def difference(self, backend: Backend) -> str | None:
        """How `backend` differs on these texts, or None."""
        actual = backend.encode(self.column)
        if all(map(np.array_equal, actual, self.expected)):
            return None
        split = [np.split(values, offsets[1:-1]) for values, offsets in (actual, self.expected)]
        bad = [text for text, ours, right in zip(self.texts, *split, strict=True) if not np.array_equal(ours, right)]
        return f"{len(bad)} of {len(self.texts)} {self.what} differ from tokenizers, the first is {bad[0][:40]!r}"


@dataclass(frozen=True)
class Choice:
    """What the reference says about a tokenizer, and the library to use, with the reason against each one before it."""

    reference: TokenizersBackend
    probes: Answers
    keeps_space: bool
    backend: Backend
    refusals: Sequence[str] = ()


# A training job builds a pipeline to train and others to validate, with one tokenizer: the checks need not run again.
@lru_cache(maxsize=2)
def choose(pid: int, definition: TokenizerDefinition, names: Sequence[str]) -> Choice:
    """The first library that is fit, else the reference; by process, since libraries do not survive a fork."""
    tree = definition.tree()
    # The reference answers the probes while the first candidate loads, most of which is outside the GIL.
    with ThreadPoolExecutor(1, thread_name_prefix="zephon-tokenizer") as helper:
        examined = helper.submit(examine, definition, tree)
        backend, refusals = first_fit(definition, tree, names, lambda: [examined.result().probes])
        choice = examined.result()
    return replace(choice, backend=backend or choice.reference, refusals=refusals)


def examine(definition: TokenizerDefinition, tree: Tree) -> Choice:
    """Load the reference, see that it and the file mean the same, and let it answer the probes."""
    try:
        reference = TokenizersBackend(definition)
        _check_ids(definition, tree, reference)
        _check_look_alikes(definition, tree, reference)
        probes = Answers.of("probe texts", probe_texts(tree), reference)
        keeps_space = joins_at_space(lambda text: reference.encode_texts([text])[0])
        return Choice(reference, probes, keeps_space, reference)
    except BackendFailure as failure:
        raise TokenizerError(
            f"the tokenizer of {definition.label!r} does not work in tokenizers ({failure}); save it again with a "
            "recent version."
        ) from None


def first_fit(
    definition: TokenizerDefinition, tree: Tree, names: Sequence[str], checks: Callable[[], Sequence[Answers]]
) -> tuple[Backend | None, list[str]]:
    """The first library that may run this tokenizer and agrees with the reference, and the reasons against others.

    `checks` gives what to compare it on, and is called when a library has loaded: the answers may still be on the way.
    """
    refusals: list[str] = []
    for name in names:
        reason = refusal(tree, name)
        if reason is not None:
            reason = f"not trusted with {reason}"
        else:
            try:
                backend: Backend = BACKENDS[name](definition)
                reason = next((r for check in checks() if (r := check.difference(backend))), None)
            except BackendFailure as failure:
                reason = str(failure)
            if reason is None:
                return backend, refusals
        refusals.append(f"{name}: {reason}")
    return None, refusals


def _check_ids(definition: TokenizerDefinition, tree: Tree, reference: TokenizersBackend) -> None:
    # `tokenizers` numbers added tokens itself, in order, whatever the file says.
    for token in tree["added_tokens"]:
        actual = reference.token_to_id(token["content"])
        if token["content"] and actual != token["id"]:
            raise TokenizerError(
                f"added token {token['content'][:40]!r} in tokenizer.json of {definition.label!r} has id {token['id']} "
                f"but tokenizers gives it {actual}, because ids have gaps or repeats; number them without gaps."
            )


def _check_look_alikes(definition: TokenizerDefinition, tree: Tree, reference: TokenizersBackend) -> None:
    """Text must not become the tokens that separate documents; other special tokens that it can become are logged."""
    unknown = tree["model"].get("unk_token")
    special = [t for t in tree["added_tokens"] if t["special"] and t["content"] not in ("", unknown)]
    ends = {definition.bos_token: definition.bos_id, definition.eos_token: definition.eos_id}
    spelled = {token["content"]: (token["id"], [token["content"]]) for token in special}
    spelled |= {t: (i, look_alikes(t)) for t, i in ends.items() if t is not None and i is not None and t != unknown}
    reached = []
    for token, (token_id, texts) in sorted(spelled.items()):
        if any(token_id in ids for ids in reference.encode_texts(texts)):
            if token in ends:
                raise TokenizerError(
                    f"text that spells {token[:40]!r} becomes that special token in {definition.label!r}, so a "
                    "document could end itself; give the tokenizer a pre_tokenizer that splits such text."
                )
            reached.append(token)
    if reached:
        _log.warning("%s: text can spell the special tokens %s", definition.label, ", ".join(reached[:5]))
