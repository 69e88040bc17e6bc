"""The account that a run gives of itself."""

from zephon.run.report import Packing


def test_before_the_first_batch_packing_is_full():
    assert Packing(0, 0, 0, 0, 0, 0, 0, 0).efficiency == 1.0
