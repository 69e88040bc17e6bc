"""Tokens per row of each dataset, measured on a sample, so that mixture weights are shares of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import byte_lengths, int64_array
from zephon.columns.damage import split_damaged
from zephon.config.keys import Size, check_keys, key
from zephon.curriculum.permute import derive_key, shuffled_indices
from zephon.data.reader import OpenDataset
from zephon.errors import DataError

_GROUPS_SAMPLED = 16
_GROUP_BYTES_LIMIT = 64 << 20


@dataclass(frozen=True, slots=True)
class TokenEstimation:
    """Measure tokens per byte on a seeded sample of each dataset before the run starts.

    Rows are sampled from several places of the dataset, tokenized as the run will tokenize them, and the ratio is
    applied to the bytes that the catalog has for the whole dataset. The result depends on the catalogs, the tokenizer
    and the seed alone, so every rank comes to the same figures.

    Attributes:
        sample_bytes: text to tokenize per dataset, in bytes.
    """

    sample_bytes: Size = key(16 << 20, "Text to tokenize per dataset.")

    def __post_init__(self) -> None:
        check_keys(self)

    def tokens_per_row(
        self,
        dataset: OpenDataset,
        text_field: str,
        count_tokens: Callable[[pa.Table], int],
        *,
        seed: int,
        failures: Sequence[tuple[int, str, str]] = (),
    ) -> float:
        """Mean tokens per row of `dataset`, rows without text counted as rows.

        Args:
            dataset: an open dataset.
            text_field: the column whose bytes the ratio refers to.
            count_tokens: tokens that the pipeline makes of some rows, special tokens included.
            seed: seed of the run.
            failures: rows that cannot be used, as `count_tokens` finds them: place, operator and reason.
        """
        catalog = dataset.catalog
        order = shuffled_indices(derive_key("token-estimation", seed, dataset.name), len(catalog.group_rows))
        share = self.sample_bytes // min(_GROUPS_SAMPLED, len(order))
        if dataset.remote:  # all at once, for each is a round trip or two
            first = order[:_GROUPS_SAMPLED]
            sizes = np.cumsum(catalog.group_bytes[first]) - catalog.group_bytes[first]
            dataset.announce(catalog.row_starts[first[sizes < _GROUP_BYTES_LIMIT]])
        tokens, text_bytes, group_text_bytes, catalog_bytes = 0, 0, 0, 0
        for nth, group in enumerate(order.tolist()):
            # Groups without any text are no reason to stop before one with text is found.
            if tokens and (nth >= _GROUPS_SAMPLED or catalog_bytes >= _GROUP_BYTES_LIMIT):
                break
            table, _, _ = split_damaged(dataset.read_group(group))
            if not table.num_rows:
                continue
            lengths = byte_lengths(table.column(text_field))
            group_text_bytes += int(lengths.sum())
            catalog_bytes += int(catalog.group_bytes[group])
            # A run of rows from a random place, wrapping round, up to this group's share of the sample.
            start = derive_key("token-estimation-row", seed, dataset.name, nth) % len(lengths)
            rows = np.roll(np.arange(len(lengths)), -start)
            taken = int(np.searchsorted(np.cumsum(lengths[rows]), share)) + 1
            tokens += count_tokens(table.take(int64_array(rows[:taken])))
            text_bytes += int(lengths[rows[:taken]].sum())
        if not tokens:
            why = "".join(f" ({operator}: {reason})" for _, operator, reason in failures[:1])
            raise DataError(
                f'dataset "{dataset.name}": no row gives tokens from column "{text_field}"{why}; expected some from '
                "every dataset of a mixture."
            )
        ratio = tokens / text_bytes * group_text_bytes / catalog_bytes
        return ratio * catalog.bytes / catalog.rows
