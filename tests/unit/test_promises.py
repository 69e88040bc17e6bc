"""Every promise of the documentation is of a page that exists; tools/promises.py lists those without a test."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from promises import missing_pages, read_promises


def test_promises_are_of_pages_that_exist():
    promises = read_promises()
    assert not missing_pages(promises)
    assert all(promise.says and isinstance(promise.tests, list) for promise in promises)
    # While tests are being renamed, `tools/promises.py --check` alone says which tests do not exist.
