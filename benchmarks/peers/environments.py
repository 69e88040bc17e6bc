"""An environment of its own for every peer, made with uv where it is missing or its requirements changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH, ARROW, TOKENIZERS = "torch==2.15.0", "pyarrow==26.0.1", "tokenizers==0.23.3"

REQUIREMENTS: dict[str, list[str]] = {
    "zephon-0.2.0": ["zephon[parquet]==0.2.0", "transformers==5.24.0", TORCH, ARROW, TOKENIZERS],
    "grain": ["grain==0.2.18", "gigatoken==0.10.0", "awkward==2.14.0", ARROW, TOKENIZERS],
    "grain-images": ["grain==0.2.18", "torchvision==0.29.2", TORCH, ARROW, TOKENIZERS],
    "torchtitan": ["torchtitan==0.3.0", "datasets==4.7.0", TORCH, ARROW, TOKENIZERS],
    "datasets": ["datasets==4.7.0", "torchdata==0.11.0", TORCH, ARROW, TOKENIZERS],
    "mosaicml-streaming": ["mosaicml-streaming==0.13.0", "tokenizers==0.22.2", TORCH, ARROW],
    "litdata": ["litdata==0.2.76", "polars==1.36.1", TORCH, ARROW, TOKENIZERS],
    "lancedb": ["lancedb==0.40.0", "pylance==14.0.2", TORCH, ARROW, TOKENIZERS],
    "megatron": ["megatron-core==0.19.2", "transformers==5.24.0", TORCH, ARROW, TOKENIZERS],
    "plot": ["matplotlib==3.11.2"],
}


class NotInstalled(Exception):
    """An environment cannot be made; the message is what uv says."""


def python(folder: Path, name: str) -> str:
    """The interpreter of an environment in `folder`, which is made if it has to be.

    Raises: `NotInstalled`.
    """
    place = folder / name
    stamp, wanted = place / "requirements.txt", "\n".join([sys.version, *REQUIREMENTS[name]]) + "\n"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {name} ...", flush=True)
        shutil.rmtree(place, ignore_errors=True)
        uv = shutil.which("uv") or str(ROOT / ".tools/bin/uv")
        for command in (
            [uv, "venv", "--quiet", "--no-project", "--python", sys.executable, str(place)],
            [uv, "pip", "install", "--quiet", "--python", str(place / "bin/python"), *REQUIREMENTS[name]],
        ):
            try:
                done = subprocess.run(command, check=False, capture_output=True, text=True)
            except OSError as error:
                raise NotInstalled(f"uv does not run: {error}") from None
            if done.returncode:
                raise NotInstalled(" ".join(done.stderr.split())[:300])
        stamp.write_text(wanted)
    return str(place / "bin/python")


def variables(name: str) -> dict[str, str]:
    """The environment variables of a peer: it imports the benchmarks of this tree, and nothing else of it."""
    found = dict(os.environ)
    if name:
        found["PYTHONPATH"] = str(ROOT)
    else:
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), found.get("PYTHONPATH", "")]))
    return found | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
