"""The lowest versions that zephon-core declares work: tests run with them in an environment of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = [
    *("unit/config", "unit/data/formats", "unit/data/test_columns.py", "unit/data/test_shards.py"),
    *("unit/data/test_index.py", "unit/cli/test_stream.py", "unit/cli/test_verify.py", "unit/run/test_ledger.py"),
]
# Those that need what other libraries write, matplotlib, or writers of views that old versions of Arrow lack.
NOT = "saved or split or litdata or mds or webdataset or megatron or tar_ or dp_degree or _view or barcode or speed"


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_the_lowest_versions_that_are_declared_work(tmp_path):
    uv = shutil.which("uv", path=f"{os.environ.get('PATH', '')}:{ROOT / '.tools/bin'}")
    if uv is None:
        pytest.skip("needs uv")
    python = tmp_path / "venv/bin/python"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, tmp_path / "venv"], check=True)
    tools = ["pytest>=8.2", "hypothesis>=6.100", "pytest-timeout>=2.3", "zstandard>=0.22"]
    extras = [word for name in ("lance", "vortex", "object-stores") for word in ("--extra", name)]
    lowest = ["--resolution", "lowest-direct", "--only-binary", ":all:", "-r", ROOT / "zephon-core/pyproject.toml"]
    subprocess.run([uv, "pip", "install", "-q", "--python", python, *lowest, *extras, *tools], check=True)
    subprocess.run([uv, "pip", "install", "-q", "--python", python, "--no-deps", ROOT / "zephon-core"], check=True)
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not deep and not slow",
        "-k",
        f"not ({NOT})",
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        [*command, *(ROOT / "tests" / name for name in TESTS)],
        env=environment,
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
