"""TorchTitan's main branch, whose batches are flat, with its real Trainer on the CPU.

Runs where TORCHTITAN_MAIN names a checkout and its requirements (grain) can be imported; further folders to import from
may follow it after colons.
"""

import os

import pytest

from zephon.run.ledger import compare

pytest.importorskip("torchtitan")
from support.torchtitan import SAVED, STEPS, Titan

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.deep,
    pytest.mark.skipif(not os.environ.get("TORCHTITAN_MAIN"), reason="TORCHTITAN_MAIN names no checkout"),
]


def test_a_run_goes_on_at_another_number_of_ranks_and_validates_alike(tmp_path):
    titan = Titan(tmp_path, pythonpath=os.environ["TORCHTITAN_MAIN"], flat=True)
    try:
        base = titan.run("base", 2, "--validator.freq=6", validate=True)
        assert base.ok, base.logs[0]
        titan.copy_checkpoint("base", SAVED, "resumed")
        resumed = titan.run("resumed", 1, "--validator.freq=6", validate=True)
        assert resumed.ok, resumed.logs[0]
    finally:
        titan.close()
    assert compare(titan.ledger("base"), titan.ledger("resumed")) is None
    expected = titan.digests("base")
    assert titan.digests("resumed") == {step: expected[step] for step in range(SAVED, STEPS)}
    for step in range(SAVED + 1, STEPS + 1):
        assert resumed.losses[step] == pytest.approx(base.losses[step], rel=1e-4)
    assert resumed.validation[6] == pytest.approx(base.validation[6], rel=1e-4)
