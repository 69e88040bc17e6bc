"""What takes long is said in the log, and what does not is not."""

import logging
import time

import pytest

from zephon.columns import progress


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, 0), (0.5, 2)])
def test_what_takes_long_is_said_again_and_again(monkeypatch, caplog, seconds, lines):
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.1)
    monkeypatch.setattr(progress, "NEXT_SECONDS", 0.2)
    done = []
    with caplog.at_level(logging.INFO, "zephon"), progress.progress_of(lambda: f"filling lanes: {len(done)} of 2"):
        time.sleep(seconds / 2)
        done.append(1)
        time.sleep(seconds / 2)
    time.sleep(0.3)
    assert caplog.messages == ["filling lanes: 0 of 2 ...", "filling lanes: 1 of 2 ..."][:lines]
