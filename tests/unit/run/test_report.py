"""The account that a run gives of itself."""

import numpy as np
import pytest

from zephon.run.report import Mixture, Packing, Progress, loader_metrics


def test_metrics_are_of_the_time_since_they_were_last_taken():
    mixture = {"a": Mixture(target=0.5, achieved=0.75, given=300, tokens=320, rows=3, skipped=1, failed=2)}
    now = Progress(batches=6, wait=0.5, places=600, padding=50, tokens=np.array([300]))
    counts = now.counts(Progress(batches=2, wait=0.3, places=200, padding=10), mixture)
    assert loader_metrics(counts, {"a": 0.5}, cursor=12) == {
        "zephon/data_wait(s)": pytest.approx(0.05),
        "zephon/padding(%)": 10.0,
        "zephon/cursor": 12.0,
        "zephon/tokens/a": 300.0,
        "zephon/mixture/a": 1.0,
        "zephon/mixture_target/a": 0.5,
        "zephon/skipped_rows/a": 1.0,
        "zephon/failed_rows/a": 2.0,
    }


def test_before_the_first_batch_metrics_are_zero_and_packing_is_full():
    assert set(loader_metrics(Progress().counts(Progress(), {}), {}, cursor=0).values()) == {0.0}
    assert Packing(0, 0, 0, 0, 0, 0, 0, 0).efficiency == 1.0
