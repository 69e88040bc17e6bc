"""A recipe that both integrations are tested with."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture
def recipe(tmp_path):
    for name, count in (("a", 60), ("b", 30)):
        (tmp_path / name).mkdir()
        texts = [f"{name} {i} " + "some words to fill the document " * (1 + i % 7) for i in range(count)]
        pq.write_table(pa.table({"text": texts}), tmp_path / name / "0.parquet")
    path = tmp_path / "recipe.toml"
    path.write_text(
        'seed = 5\nchunk_size = 40\nshuffle_buffer_size = 16\n[[sources]]\nname = "a"\npath = "a"\nweight = 2.0\n'
        '[[sources]]\nname = "b"\npath = "b"\n'
    )
    return path
