"""Every promise of the documentation is of a page and of tests that exist; tools/promises.py lists those without."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from promises import Promise, missing_pages, missing_tests, off_page, read_promises


def test_promises_are_of_pages_and_tests_that_exist():
    promises = read_promises()
    assert not missing_pages(promises)
    assert [f"{promise.page}: {promise.says}" for promise in off_page(promises)] == []
    assert all(promise.says and isinstance(promise.tests, list) for promise in promises)
    assert not missing_tests(promises)


def test_a_promise_that_its_page_does_not_make_is_found():
    page = "docs/mixtures.md"
    promises = [Promise(page, says, []) for says in ("Weights are shares of tokens.", "Passwords are never printed.")]
    assert off_page(promises) == promises[1:]
