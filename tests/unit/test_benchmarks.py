"""The benchmarks: each can be run by its name."""

import importlib

import pytest

from benchmarks.run import BENCHMARKS


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_benchmark_has_something_to_run(name):
    assert callable(importlib.import_module(f"benchmarks.{name}").bench)
