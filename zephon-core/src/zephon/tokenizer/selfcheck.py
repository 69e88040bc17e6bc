"""Choosing the library that encodes: the first one that is fit for the tokenizer and gives the reference's ids."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import string_array
from zephon.errors import TokenizerError
from zephon.tokenizer.backends import BACKENDS, REFUSALS, Backend, BackendFailure, Encoded, TokenizersBackend
from zephon.tokenizer.cutting import joins_at_space
from zephon.tokenizer.definition import TokenizerDefinition, Tree
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
        values, offsets = backend.encode(self.column)
        if np.array_equal(offsets, self.expected[1]) and np.array_equal(values, self.expected[0]):
            return None
        rows = range(len(self.texts))
        bad = [i for i in rows if not np.array_equal(_row(values, offsets, i), _row(*self.expected, i))]
        first = self.texts[bad[0]][:40]
        return f"{len(bad)} of {len(self.texts)} {self.what} differ from tokenizers, the first is {first!r}"


def load_reference(definition: TokenizerDefinition) -> TokenizersBackend:
    """The reference for `definition`.

    Raises:
        TokenizerError: `tokenizers` does not accept it.
    """
    try:
        return TokenizersBackend(definition)
    except BackendFailure as failure:
        raise _unusable(definition, failure) from None


@dataclass(frozen=True)
class Examined:
    """What the reference says about a tokenizer.

    Attributes:
        reference: ready to encode and decode.
        probes: its answers to the probe texts.
        keep_space: whether the second piece of a cut document keeps the space at which it was cut.
    """

    reference: TokenizersBackend
    probes: Answers
    keep_space: bool


def examine(definition: TokenizerDefinition, tree: Tree) -> Examined:
    """Load the reference, see that it and the file mean the same, and let it answer the probes.

    Raises:
        TokenizerError: `tokenizers` refuses the file or gives its tokens other ids, or text can become BOS or EOS.
    """
    reference = load_reference(definition)
    try:
        _check_ids(definition, tree, reference)
        _check_look_alikes(definition, tree, reference)
        probes = Answers.of("probe texts", probe_texts(tree), reference)
        return Examined(reference, probes, keep_space=joins_at_space(lambda text: reference.encode_texts([text])[0]))
    except BackendFailure as failure:
        raise _unusable(definition, failure) from None


def first_fit(
    definition: TokenizerDefinition,
    tree: Tree,
    names: Sequence[str],
    checks: Callable[[], Sequence[Answers]],
) -> tuple[Backend | None, list[str]]:
    """The first library among `names` that may run this tokenizer and agrees with the reference.

    Args:
        checks: gives what to compare it on; called when a library has loaded, so the answers may still be on the way.

    Returns:
        (the backend or None, why each one before it was passed over).
    """
    refusals: list[str] = []
    for name in names:
        refused = REFUSALS[name](tree)
        reason = f"not trusted with {refused}" if refused else None
        if reason is None:
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
        given = reference.token_to_id(token["content"])
        if token["content"] and given != token["id"]:
            raise TokenizerError(
                f"added token {token['content'][:40]!r} in tokenizer.json of {definition.label!r} has id {token['id']} "
                f"but tokenizers gives it {given}, because ids have gaps or repeats; number them without gaps"
            )


def _check_look_alikes(definition: TokenizerDefinition, tree: Tree, reference: TokenizersBackend) -> None:
    """Text must not become the tokens that separate documents; other special tokens that it can become are logged."""
    unknown = tree["model"].get("unk_token")
    special = [t for t in tree["added_tokens"] if t["special"] and t["content"] not in ("", unknown)]
    spelled = reference.encode_texts([token["content"] for token in special])
    reached = {t["content"] for t, ids in zip(special, spelled, strict=True) if t["id"] in ids}
    ends = {definition.bos_token: definition.bos_id, definition.eos_token: definition.eos_id}
    for token, token_id in ends.items():
        if token is not None and token != unknown:
            texts = reference.encode_texts(look_alikes(token))
            reached.update({token} if any(token_id in ids for ids in texts) else ())
    for token in sorted(reached):
        if token in ends:
            raise TokenizerError(
                f"text that spells {token[:40]!r} becomes that special token in {definition.label!r}, so a "
                "document could end itself; give the tokenizer a pre_tokenizer that splits such text"
            )
    if reached:
        _log.warning("%s: text can spell the special tokens %s", definition.label, ", ".join(sorted(reached)[:5]))


def _row(values: np.ndarray, offsets: np.ndarray, i: int) -> np.ndarray:
    return values[offsets[i] : offsets[i + 1]]


def _unusable(definition: TokenizerDefinition, failure: BackendFailure) -> TokenizerError:
    return TokenizerError(
        f"the tokenizer of {definition.label!r} does not work in tokenizers ({failure}); save it again with a "
        "recent version"
    )
