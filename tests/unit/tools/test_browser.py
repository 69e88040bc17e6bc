"""Where no Chromium is installed: tests of the page fail in CI, and are left out by name elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from browser import MISSING, Browser

ROOT = Path(__file__).parents[3]
PAGE_TESTS = "tests/integration/test_report_page.py"


@pytest.mark.parametrize("ci", [True, False])
def test_tests_of_the_page_are_left_out_by_name_where_no_browser_is_and_never_in_ci(tmp_path, ci):
    environment = {name: value for name, value in os.environ.items() if name != "CI" and "PYTEST" not in name}
    environment |= {"PATH": str(tmp_path), **({"CI": "true"} if ci else {})}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", PAGE_TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=250)
    named = f"no chromium here: {PAGE_TESTS} is deselected"
    assert (named in done.stdout) == (not ci), done.stdout
    assert ("deselected" in done.stdout.splitlines()[-1]) == (not ci)
    assert ("::test_the_page_loads_without_errors" in done.stdout) == ci


def test_a_missing_browser_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError) as refused:
        Browser()
    assert str(refused.value) == MISSING and "apt-get install -y chromium" in MISSING
