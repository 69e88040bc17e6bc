"""Streams do not change unless the stream version does: not by accident, not by Python version, not by hash seed."""

import json
import os
import subprocess
import sys

import pytest

from support.interpreters import ROOT, find_python, find_uv

SCRIPT = ROOT / "tests" / "golden" / "streams.py"
IDENTITIES = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from support import operator_data as data
from zephon.ops.identity import identity_of
made = [data.shout, data.valued, data.Joined(), data.Suffix("!"), data.reversed_texts, *data.LAMBDAS]
print([identity_of(each)[0] for each in made])
"""
EXPECTED = json.loads(SCRIPT.with_name("streams.json").read_text())


def run(python, **environment):
    done = subprocess.run(
        [python, SCRIPT], capture_output=True, text=True, check=True, env={**os.environ, **environment}, timeout=120
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_streams_are_the_expected_ones_whatever_the_hash_seed(seed):
    found = run(sys.executable, PYTHONHASHSEED=seed)
    assert found["stream_version"] == EXPECTED["stream_version"]
    changed = [name for name, digests in EXPECTED["digests"].items() if found["digests"].get(name) != digests]
    assert not changed, (
        f"the streams {changed} have changed: raise STREAM_VERSION in zephon/run/fingerprint.py, or undo it"
    )


@pytest.mark.slow
@pytest.mark.parametrize("minor", [11, 13, 14])
def test_streams_are_the_same_on_other_pythons(minor, tmp_path):
    python = find_python(f"3.{minor}")
    if python is None or minor == sys.version_info.minor:
        pytest.skip(f"there is no Python 3.{minor} on this machine")
    uv, environment = find_uv(), tmp_path / "venv"
    subprocess.run([uv, "venv", "--quiet", "--python", python, environment], check=True, timeout=120)
    # By the ranges that users get, since some of the versions pinned for 3.12 do not exist for older Pythons; and
    # without the fast libraries, since `tokenizers` gives the same ids.
    install = [uv, "pip", "install", "--quiet", "--python", environment / "bin" / "python"]
    subprocess.run([*install, ROOT / "zephon-core"], check=True, timeout=280, cwd=tmp_path)
    names = [environment / "bin" / "python", sys.executable]
    of_code = [subprocess.run([each, "-c", IDENTITIES], capture_output=True, check=True).stdout for each in names]
    assert of_code[0] == of_code[1] != b""
    assert run(environment / "bin" / "python") == EXPECTED
