"""A recipe that both integrations are tested with."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture(scope="session")
def write_recipe():
    return _write_recipe


@pytest.fixture
def recipe(tmp_path):
    return _write_recipe(tmp_path)


def _write_recipe(folder):
    for name, count in (("a", 60), ("b", 30)):
        (folder / name).mkdir()
        texts = [f"{name} {i} " + "some words to fill the document " * (1 + i % 7) for i in range(count)]
        pq.write_table(pa.table({"text": texts}), folder / name / "0.parquet")
    path = folder / "recipe.toml"
    path.write_text(
        'seed = 5\nchunk_size = 40\nshuffle_buffer_size = 16\n[[sources]]\nname = "a"\npath = "a"\nweight = 2.0\n'
        '[[sources]]\nname = "b"\npath = "b"\n'
    )
    return path


@pytest.fixture
def faulty_recipe(tmp_path):
    """A pass over 200 rows, of which 20 are blank and 10 damaged, beside sound ones; the damaged are left out."""
    lines = ['{"text": "cut off' if i % 20 == 7 else f'{{"text": "{"words " * (i % 10)}"}}' for i in range(200)]
    (tmp_path / "faulty.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "sound.jsonl").write_text('{"text": "some words"}\n' * 60)
    path = tmp_path / "faulty.toml"
    sources = "".join(f'[[sources]]\nname = "{name}"\npath = "{name}.jsonl"\n' for name in ("faulty", "sound"))
    path.write_text(f'repeat = false\nchunk_size = 40\non_error = "skip"\nerror_budget = 0.5\n{sources}')
    return path
