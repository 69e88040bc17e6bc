"""Arrow as it is set up for a run."""

import os
import subprocess
import sys

import pyarrow as pa
import pytest


@pytest.mark.parametrize("chosen", [None, "system", "mimalloc"])
def test_the_allocator_is_jemalloc_unless_another_was_chosen(chosen):
    code = (
        "import pyarrow as pa; from zephon.columns.arrow import choose_allocator; before = pa.default_memory_pool()"
        ".backend_name; choose_allocator(); print(before, pa.default_memory_pool().backend_name)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "ARROW_DEFAULT_MEMORY_POOL"}
    environment |= {"ARROW_DEFAULT_MEMORY_POOL": chosen} if chosen else {}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    changes = chosen is None and before == "mimalloc" and "jemalloc" in pa.supported_memory_backends()
    assert after == ("jemalloc" if changes else before)
