"""Fingerprints of user code: every way to change what a function does that is known is seen, and nothing else is."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from support import code_cases
from zephon.ops.identity import identity_of
from zephon.ops.rows import MapTransform

CASES = pathlib.Path(code_cases.__file__)


@pytest.mark.parametrize("name", code_cases.CHANGES)
def test_changed_code_is_another_function_and_the_same_code_the_same(name, tmp_path):
    source, one, other = code_cases.CHANGES[name]
    found = [
        identity_of(code_cases.load(source.replace("@@", text), tmp_path / f"module{n}.py"))
        for n, text in enumerate((one, other, one))
    ]
    assert found[0] == found[2] and found[0].text != found[1].text
    assert not found[0].unseen and bool(found[0].unsourced) == ("typed in" in name)


@pytest.mark.parametrize("name", code_cases.SAME)
def test_what_does_not_change_a_function_leaves_its_fingerprint(name, tmp_path):
    source, one, other = code_cases.SAME[name]
    first = identity_of(code_cases.load(source.replace("@@", one), tmp_path / "one.py"))
    assert first == identity_of(code_cases.load(source.replace("@@", other), tmp_path / "other.py"))


def test_identities_are_the_same_in_every_process(tmp_path):
    here = {name: each.text for name, each in code_cases.identities(tmp_path).items()}
    for seed, flags in (("1", ["-O"]), ("2", [])):
        told = subprocess.run(
            [sys.executable, *flags, CASES, "all"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(told.stdout) == here


def test_what_a_class_holds_and_nobody_can_describe_is_named(tmp_path, caplog):
    source = "import threading\nclass C:\n    lock = threading.Lock()\n    def __call__(self, row): return row\nF = C()"
    MapTransform(code_cases.load(source, tmp_path / "module.py")).identity()
    assert "a lock in attribute lock of class C" in caplog.text and "attribute version" in caplog.text


def test_code_without_a_source_is_told_to_be_of_one_python_unless_it_has_a_version(tmp_path, caplog):
    source, one, other = code_cases.CHANGES["code typed in"]
    functions = [code_cases.load(source.replace("@@", text), tmp_path / "module.py") for text in (one, other)]
    MapTransform(functions[0]).identity()
    assert "bytecode counts" in caplog.text and f"Python 3.{sys.version_info.minor}" in caplog.text
    caplog.clear()
    for each in functions:
        each.version = "2"
    assert len({MapTransform(each).identity() for each in functions}) == 1 and not caplog.records


def test_a_source_file_that_was_changed_after_its_import_is_not_taken_for_the_code(tmp_path):
    path = tmp_path / "module.py"
    function = code_cases.load("def F(row): return row + 1", path)
    path.write_text("x = 1\n\n\n" + path.read_text())
    os.utime(path, (1, 1))
    assert identity_of(function).unsourced == ("F",)
