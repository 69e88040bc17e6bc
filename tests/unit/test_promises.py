"""Every promise of the documentation is of a page and of tests that exist; tools/promises.py lists those without."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from promises import missing_pages, missing_tests, read_promises


def test_promises_are_of_pages_and_tests_that_exist():
    promises = read_promises()
    assert not missing_pages(promises)
    assert all(promise.says and isinstance(promise.tests, list) for promise in promises)
    assert not missing_tests(promises)
