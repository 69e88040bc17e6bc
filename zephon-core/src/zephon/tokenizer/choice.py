"""Choosing the library that encodes: the first one that is fit for the tokenizer and gives the reference's ids."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import string_array
from zephon.columns.progress import progress_of
from zephon.data.index import kept_result
from zephon.errors import TokenizerError
from zephon.tokenizer.backends import (
    BACKENDS,
    Backend,
    BackendFailure,
    Encoded,
    TokenizersBackend,
    load_library,
    version_of,
)
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
    """The library to use, and what the reference says about a tokenizer.

    Attributes:
        name: of the library.
        keeps_space: as for `cut_documents`.
        spelled: special tokens that text can spell.
        refusals: the reason against each library before this one.
    """

    name: str
    keeps_space: bool
    spelled: Sequence[str]
    refusals: Sequence[str] = ()


# A training job builds a pipeline to train and others to validate, with one tokenizer: the checks need not run again.
@lru_cache(maxsize=2)
def choose(_pid: int, definition: TokenizerDefinition, names: Sequence[str], index_dir: Path | None = None) -> Choice:
    """The first library that is fit, else the reference.

    Kept in `index_dir` for the same tokenizer and versions, unless an installed library failed to load, which may be
    mended.
    """
    choices: list[Choice] = []

    def compute() -> dict[str, Any] | None:
        with progress_of(lambda: f"checking {definition.label}"):
            choice, is_lasting = _choose(definition, names)
        choices.append(choice)
        return asdict(choice) if is_lasting else None

    digest = hashlib.sha256(definition.json.encode())
    digest.update(definition.encoder_json.encode())
    ends = definition.bos_token, definition.eos_token, definition.bos_id, definition.eos_id
    versions = {name: version_of(name) for name in ("zephon-core", *BACKENDS)}
    kept = kept_result(
        index_dir, ["tokenizer", platform.machine(), versions, list(names), ends, digest.hexdigest()], compute
    )
    choice = choices[0] if choices else Choice(**kept)
    if choice.spelled:
        some = ", ".join(choice.spelled[:5])
        _log.warning("%s: text can spell the special tokens %s", definition.label, some)
    return choice


def _choose(definition: TokenizerDefinition, names: Sequence[str]) -> tuple[Choice, bool]:
    tree = definition.tree()
    # The reference answers the probes while the first candidate loads, most of which is outside the GIL.
    with ThreadPoolExecutor(1, thread_name_prefix="zephon-tokenizer") as helper:
        examined = helper.submit(_examine, definition, tree)
        name, refusals, is_lasting = first_fit(definition, tree, names, lambda: [examined.result()[0]])
        _, choice = examined.result()
    return replace(choice, name=name, refusals=refusals), is_lasting


def _examine(definition: TokenizerDefinition, tree: Tree) -> tuple[Answers, Choice]:
    """Load the reference, see that it and the file mean the same, and let it answer the probes."""
    try:
        reference = cast(TokenizersBackend, load_library(definition, "tokenizers"))
        _check_ids(definition, tree, reference)
        spelled = _check_look_alikes(definition, tree, reference)
        keeps_space = joins_at_space(lambda text: reference.encode_texts([text])[0])
        return probe_answers(tree, reference), Choice(reference.name, keeps_space, spelled)
    except BackendFailure as failure:
        raise TokenizerError(
            f"the tokenizer of {definition.label!r} does not work in tokenizers ({failure}); save it again with a "
            "recent version."
        ) from None


def probe_answers(tree: Tree, reference: TokenizersBackend) -> Answers:
    """The probes for a tokenizer, with the reference's answers."""
    return Answers.of("probe texts", probe_texts(tree), reference)


def first_fit(
    definition: TokenizerDefinition, tree: Tree, names: Sequence[str], checks: Callable[[], Sequence[Answers]]
) -> tuple[str, list[str], bool]:
    """The first library that may run this tokenizer and agrees with the reference, or that itself; the reasons against
    others; whether all of them hold as long as versions do.

    `checks` gives what to compare it on, and is called when a library has loaded: the answers may still be on the way.
    """
    refusals: list[str] = []
    is_lasting = True
    for name in names:
        reason = refusal(tree, name)
        if reason is not None:
            reason = f"not trusted with {reason}"
        else:
            try:
                backend = load_library(definition, name)
                reason = next((r for check in checks() if (r := check.difference(backend))), None)
            except BackendFailure as failure:
                # One that is not installed stays away until its version changes, which is part of the key.
                reason, is_lasting = str(failure), is_lasting and not version_of(name)
            if reason is None:
                return name, refusals, is_lasting
        refusals.append(f"{name}: {reason}")
    return "tokenizers", refusals, is_lasting


def _check_ids(definition: TokenizerDefinition, tree: Tree, reference: TokenizersBackend) -> None:
    # `tokenizers` numbers added tokens itself, in order, whatever the file says.
    for token in tree["added_tokens"]:
        actual = reference.token_to_id(token["content"])
        if token["content"] and actual != token["id"]:
            raise TokenizerError(
                f"added token {token['content'][:40]!r} in tokenizer.json of {definition.label!r} has id {token['id']} "
                f"but tokenizers gives it {actual}, because ids have gaps or repeats; number them without gaps."
            )


def _check_look_alikes(definition: TokenizerDefinition, tree: Tree, reference: TokenizersBackend) -> list[str]:
    """Text must not become the tokens that separate documents; gives the other special tokens that it can become."""
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
    return reached
