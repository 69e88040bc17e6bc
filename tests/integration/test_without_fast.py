"""The core where neither fastokens nor gigatoken is installed: `tokenizers` does the work, with the same tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

TEXTS = [f"Page {n}. " + "Some words, häufig and 漢字, go on. " * (n % 9) for n in range(300)]

# As an environment without the extra is: neither modules nor distributions of these names.
PROGRAM = """
import importlib.metadata, json, logging, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fastokens", "gigatoken", "awkward"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

version = importlib.metadata.version

def without(name):
    if name in ("fastokens", "gigatoken", "awkward"):
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

sys.meta_path.insert(0, Blocked())
importlib.metadata.version = without
logging.basicConfig(level=logging.WARNING, format="%(message)s")
from test_without_fast import stream
if sys.argv[2:]:
    from zephon.tokenizer.tokenizer import load_tokenizer
    load_tokenizer(sys.argv[1], backend=sys.argv[2])
pipeline, digests = stream(sys.argv[1])
print(json.dumps([pipeline.compiled.tokenizer.backend, pipeline.fingerprint()["tokenizer_backend"], digests]))
"""


def stream(tokenizer):
    """A pipeline, and the digests of its first 40 records."""
    source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("pages", {"text": TEXTS})], seed=3, chunk_size=50)
    pipeline = Pipeline(source).options(canonical_replicas=4).tokenize(tokenizer).pack_flat(64).batch(4)
    batches = iter(pipeline)
    digests = [digest.hex() for _ in range(10) for digest in next(batches).digests]
    pipeline.close()
    return pipeline, digests


def run(*arguments):
    return subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{PROGRAM}",
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_fast_libraries_the_batches_are_the_same_and_the_log_says_what_is_missing(tiny_tokenizer):
    process = run(str(tiny_tokenizer))
    assert process.returncode == 0, process.stderr
    backend, fingerprint, digests = json.loads(process.stdout)
    assert backend == "tokenizers" and fingerprint.startswith("tokenizers ")
    pipeline, expected = stream(str(tiny_tokenizer))
    assert pipeline.compiled.tokenizer.backend in ("fastokens", "gigatoken")
    assert digests == expected
    (line,) = (line for line in process.stderr.splitlines() if "tokenizing with tokenizers" in line)
    assert line.count("pip install 'zephon-core[fast]'") == 1
    # The second start finds the choice of the first: nothing is installed that could be mended.
    assert run(str(tiny_tokenizer)).returncode == 0


@pytest.mark.parametrize("backend", ["fastokens", "gigatoken"])
def test_a_fast_library_that_is_asked_for_and_not_installed_is_refused_with_what_to_install(tiny_tokenizer, backend):
    process = run(str(tiny_tokenizer), backend)
    assert process.returncode == 1
    assert f"TokenizerError: tokenizer backend is {backend!r}; expected an installed library. " in process.stderr
    assert process.stderr.rstrip().endswith("Install it with: pip install 'zephon-core[fast]'.")
