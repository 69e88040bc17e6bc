"""The lowest versions that the packages declare work: tests run with them in an environment of their own."""

import os
import subprocess
import sys

import pytest

from support.interpreters import ROOT, find_uv

TESTS = [
    *("unit/config", "unit/data/formats", "unit/data/test_columns.py", "unit/data/test_shards.py"),
    *("unit/data/test_index.py", "unit/cli/test_stream.py", "unit/cli/test_verify.py", "unit/run/test_ledger.py"),
]
# Those that need what other libraries write, matplotlib, or writers of views that old versions of Arrow lack.
NOT = "saved or split or litdata or mds or webdataset or megatron or tar_ or dp_degree or _view or barcode or speed"


@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "package, more, tests",
    [
        ("zephon-core", [], TESTS),
        # torchtitan has no bound, since a main checkout calls itself 0.2.2; the import checks it.
        ("torchtitan-zephon", ["torchtitan==0.3.0"], ["unit/integrations/test_torchtitan_loader.py"]),
        ("megatron-zephon", [], ["unit/integrations/test_megatron_loader.py"]),
    ],
)
def test_the_lowest_versions_that_are_declared_work(tmp_path, package, more, tests):
    if package != "zephon-core" and sys.version_info < (3, 12):
        pytest.skip("the frameworks need Python 3.12")
    uv = find_uv()
    python, packages = tmp_path / "venv/bin/python", dict.fromkeys(["zephon-core", package])
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, tmp_path / "venv"], check=True)
    tools = ["pytest>=8.2", "hypothesis>=6.100", "pytest-timeout>=2.3", "zstandard>=0.22", *more]
    extras = [word for name in ("fast", "lance", "vortex", "object-stores") for word in ("--extra", name)]
    here = tmp_path / "here.txt"
    here.write_text(f"zephon-core @ {(ROOT / 'zephon-core').as_uri()}\n")  # which no index has
    lowest = [
        "--resolution",
        "lowest-direct",
        "--only-binary",
        ":all:",
        "--no-binary",
        "zephon-core",
        "--override",
        here,
    ]
    for name in packages:
        lowest += ["-r", ROOT / name / "pyproject.toml"]
    lowest += extras if package == "zephon-core" else []
    subprocess.run([uv, "pip", "install", "-q", "--python", python, *lowest, *tools], check=True)
    for name in packages:
        subprocess.run([uv, "pip", "install", "-q", "--python", python, "--no-deps", ROOT / name], check=True)
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
        f"not ({NOT})" if package == "zephon-core" else "not TestIndexedDatasets",
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        [*command, *(ROOT / "tests" / name for name in tests)],
        env=environment,
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
