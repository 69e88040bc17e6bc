"""Text files, one document each."""

import pytest

from support.io_data import rows_of
from zephon.data.formats import text
from zephon.errors import DataError


def test_a_text_file_is_one_document_of_bounded_size(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo")
    (tmp_path / "b.md").write_text("zwölf")
    assert rows_of(tmp_path) == ["one\ntwo", "zwölf"]
    monkeypatch.setattr(text, "_MAX_BYTES", 9)
    with pytest.raises(DataError, match=r"a\.txt' has 10 bytes, and a text file is one document"):
        rows_of(tmp_path)
    (tmp_path / "a.txt").write_bytes("one".encode("utf-16"))
    with pytest.raises(DataError, match=r"is text in UTF-16.*convert it to UTF-8"):
        rows_of(tmp_path)
