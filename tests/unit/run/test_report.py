"""What a training loop got from its loader, as its log tells it."""

import pytest

from zephon.run.report import Mixture, Progress, loader_metrics


def test_metrics_are_of_the_time_since_they_were_last_taken():
    metrics = loader_metrics(
        Progress(batches=6, wait=0.5, places=600, padding=50),
        Progress(batches=2, wait=0.3, places=200, padding=10),
        cursor=12,
        mixture={"a": Mixture(target=0.5, achieved=0.75, given=300, tokens=300, rows=3, skipped=1, failed=2)},
    )
    assert metrics == {
        "zephon/data_wait(s)": pytest.approx(0.05),
        "zephon/padding(%)": 10.0,
        "zephon/cursor": 12.0,
        "zephon/tokens/a": 300.0,
        "zephon/mixture/a": 0.75,
        "zephon/mixture_target/a": 0.5,
        "zephon/skipped_rows/a": 1.0,
        "zephon/failed_rows/a": 2.0,
    }
    assert loader_metrics(Progress(), Progress(), cursor=0, mixture={})["zephon/padding(%)"] == 0
