"""Files of token ids."""

import shutil

import numpy as np
import pyarrow as pa
import pytest

from peers.rows import TOKENS
from support.io_data import check_rows, opened
from zephon.errors import DataError


@pytest.mark.parametrize("folder", ["uint16", "int32", "sentences"])
def test_megatron_gives_documents_as_token_ids(peer_data, folder):
    dataset = opened(peer_data / "megatron" / folder, ["tokens"], is_text=False)
    assert dataset.catalog.fmt == "megatron" and dataset.catalog.n_shards == 1
    check_rows(dataset, {"tokens": [ids.tolist() for ids in TOKENS]})
    assert dataset.take(np.array([3])).schema.field("tokens").type == pa.large_list(pa.uint32())
    with pytest.raises(DataError, match="pretokenized"):
        opened(peer_data / "megatron" / folder, ["tokens"])


def test_megatron_without_its_index_is_explained(peer_data, tmp_path):
    shutil.copy(peer_data / "megatron/uint16/web_text_document.bin", tmp_path)
    with pytest.raises(DataError, match=r"a .bin file needs its .idx file \(Megatron\) or index.json \(LitData\)"):
        opened(tmp_path, ["tokens"], is_text=False)
    with pytest.raises(DataError, match=r"web_text_document.idx"):
        opened(tmp_path, ["tokens"], is_text=False, fmt="megatron")
