"""Other Pythons of this machine, and environments of theirs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")


def find_uv() -> str:
    """uv of the machine or of `scripts/setup`."""
    uv = shutil.which("uv", path=f"{os.environ.get('PATH', '')}{os.pathsep}{ROOT / '.tools/bin'}")
    assert uv, "uv was not found; scripts/setup installs it into .tools"
    return uv


def find_python(version: str) -> str | None:
    """An interpreter of this version with the global lock: that of ZEPHON_PYTHON_3_14 and the like, of the path, of
    pyenv or of uv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [
        os.environ.get(f"ZEPHON_PYTHON_{version.replace('.', '_')}"),
        shutil.which(f"python{version}"),
        *sorted(map(str, pyenv.glob(f"{version}.*/bin/python3"))),
        *sorted(map(str, (Path.home() / ".local/share/uv/python").glob(f"cpython-{version}.*/bin/python3"))),
    ]
    check = "import sys, sysconfig; print('%d.%d' % sys.version_info[:2], sysconfig.get_config_var('Py_GIL_DISABLED'))"
    for candidate in filter(None, candidates):
        ran = subprocess.run([candidate, "-c", check], capture_output=True, text=True, check=False)
        if ran.returncode == 0 and ran.stdout.split()[0] == version and ran.stdout.split()[1] in ("0", "None"):
            return candidate
    return None


def alone() -> dict[str, str]:
    """The environment of this process without what would lead to this checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
