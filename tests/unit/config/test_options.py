"""Options that no recipe has."""

import shutil

from zephon.config.options import CacheOptions
from zephon.data import node_cache
from zephon.data.fetch import open_spans


def test_the_cache_takes_32_gb_of_the_users_folder_or_a_folder_of_its_own_up_to_the_last_gib(tmp_path, monkeypatch):
    monkeypatch.delenv("ZEPHON_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    default = CacheOptions()
    assert default.data_dir == tmp_path / "zephon/data" and default.data_limit_bytes == 32 * 10**9
    assert CacheOptions(dir=str(tmp_path / "own")).data_limit_bytes is None
    assert CacheOptions(dir=str(tmp_path / "own"), limit_bytes=5).data_limit_bytes == 5
    spans = open_spans(CacheOptions(dir=str(tmp_path / "own")))
    usage = shutil.disk_usage(tmp_path)._replace(total=100 << 30, free=(1 << 30) + 100)
    monkeypatch.setattr(node_cache.shutil, "disk_usage", lambda path: usage)
    for length, kept in ((50, 1), (1 << 20, 0)):  # what does not fit drives out what is there
        assert spans.node.fetch("file", length, length, lambda length=length: bytes(length)) == bytes(length)
        assert len(list((tmp_path / "own").rglob("*.range"))) == kept
