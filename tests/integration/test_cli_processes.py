"""The command `zephon` as people call it: real processes, killed, interrupted and resumed."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from examples.corpus import train_tokenizer, write_recipe
from support import step_digests
from support.vision_data import file_of, image_tokenizer, picture
from zephon import Pipeline, ZephonError
from zephon.cli.matrix import Leg, Matrix, Run, Setup
from zephon.cli.options import vision_settings
from zephon.run.ledger import compare, read_ledger

ROOT = Path(__file__).parents[2]
WORDS = ["lane", "shard", "record", "round", "step", "token", "cursor", "window", "chunk", "rank", "group", "epoch"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    sources = {}
    for name, rows in (("a", 300), ("b", 120)):
        texts = [f"{name}{i} " + " ".join(WORDS[(i * k) % 12] for k in range(i % 60 + 3)) for i in range(rows)]
        sources[name] = folder / f"{name}.jsonl"
        sources[name].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer(texts, folder / "tokenizer", 400)
    keys = {"chunk_size": 16, "seed": 5, "cache_dir": "cache"}
    write_recipe(folder / "recipe.toml", sources, keys=keys)
    write_recipe(folder / "finite.toml", sources, keys={**keys, "repeat": False})
    return folder


def command(*arguments, **options):
    argv = [sys.executable, "-c", "from zephon.cli import main; main()", *map(str, arguments)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def common(corpus, recipe="recipe.toml"):
    return corpus / recipe, "--tokenizer", corpus / "tokenizer", "--seq-len", "32"


def test_verify_proves_a_recipe_through_kills_and_resumes(corpus, tmp_path):
    keep, picture = tmp_path / "runs", tmp_path / "barcode.png"
    options = ["--global-batch", "8", "--dp", "1,2", "--resume-at", "2", "--steps", "5", "--microbatch-size", "2"]
    process = command("verify", *common(corpus), *options, "--plot", picture, "--keep", keep)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert len(re.findall(r"^ *\d  [0-9a-f]{64}$", out, flags=re.M)) == 5
    rows = [line.split("  ") for line in out.splitlines() if line.startswith("dp ")]
    assert [row[0] for row in rows] == ["dp 1", "dp 2", "dp 1 > 2", "dp 2 > 1"]
    assert [row[-1].strip() for row in rows] == ["first", "yes", "yes", "yes"]
    assert "1 rank" in "".join(rows[2])
    assert out.splitlines()[-1] == "all 4 runs gave the same 5 global batches"
    assert picture.read_bytes().startswith(b"\x89PNG")
    states = sorted(path.name for path in (keep / "chain-1-dp-2-1" / "states" / "step-2").iterdir())
    assert states == ["rank-0-of-2.json", "rank-1-of-2.json"]

    # What the killed rank had consumed after its checkpoint was consumed again, and is on record twice.
    heads = [path for path in (keep / "chain-0-dp-1-2" / "ledger").iterdir() if path.name.startswith("dp1-0")]
    killed = next(path for path in heads if path.suffix == ".ledger")
    assert (killed.stat().st_size - 512) // 40 > 2 * 8

    # The kept runs can be compared again, and a record that was changed is named.
    other = keep / "chain-1-dp-2-1" / "ledger"
    file = next(path for path in sorted(other.iterdir()) if path.name.startswith("dp1-0") and path.suffix == ".ledger")
    content = bytearray(file.read_bytes())
    content[512 + 40 * 9 + 12] ^= 1
    file.write_bytes(content)
    difference = compare(read_ledger(keep / "dp-1" / "ledger"), read_ledger(other))
    assert (difference.step, difference.lane) == (4, 1)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A recipe of a tar archive, conversations with files below a folder, and text."""
    folder = tmp_path_factory.mktemp("images")
    files = [file_of(picture(20 + 5 * n, 60, seed=n), ("JPEG", "PNG", "WEBP")[n % 3]) for n in range(24)]
    pages = [{"texts": [None, f"page {n}"], "caption": f"page {n}"} for n in range(24)]
    with tarfile.open(folder / "pages.tar", "w") as archive:
        for n, (file, page) in enumerate(zip(files, pages, strict=True)):
            for kind, data in ((("jpg", "png", "webp")[n % 3], file), ("json", json.dumps(page).encode())):
                member = tarfile.TarInfo(f"{n:05}.{kind}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    (folder / "media").mkdir()
    for n, file in enumerate(files):
        (folder / "media" / f"{n}.jpg").write_bytes(file)
    talks = [{"image": f"{n}.jpg", "text": f"<image> shows {n} " + "a thing " * (n % 9)} for n in range(24)]
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks))
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"text {n} " * (n % 9 + 1)}) + "\n" for n in range(40))
    )
    (folder / "recipe.toml").write_text("""
seed = 5
canonical_replicas = 4
chunk_size = 8
max_images = 2
cache_dir = "cache"
[[sources]]
name = "pages"
path = "pages.tar"
documents = "images"
text_field = "json.caption"
[[sources]]
name = "talks"
path = "talks.jsonl"
documents = "images"
media_root = "media"
[[sources]]
name = "text"
path = "text.jsonl"
""")
    image_tokenizer(folder / "tokenizer")
    return folder


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        (["--dp", "1,2", "--steps", "3"], 2),
        pytest.param(["--dp", "1,2,4", "--resume-at", "1,3", "--steps", "5"], 6, marks=pytest.mark.deep),
    ],
    ids=["topologies", "resumes"],
)
def test_verify_proves_the_pixels_of_a_recipe_with_images(images, options, runs):
    vision = "patch_size=8,min_pixels=256,max_pixels=4096"
    options = [*options, "--global-batch", "4", "--microbatch-size", "1", "--vision", vision, "--pixels"]
    sizes = "--tokenizer", images / "tokenizer", "--seq-len", "96"
    out, err = (process := command("verify", images / "recipe.toml", *sizes, *options)).communicate()
    assert process.returncode == 0, err
    steps = options[options.index("--steps") + 1]
    assert out.splitlines()[-1] == f"all {runs} runs gave the same {steps} global batches"
    pipeline = Pipeline.from_recipe(
        images / "recipe.toml",
        tokenizer=images / "tokenizer",
        seq_len=96,
        microbatch_size=4,
        global_batch=4,
        vision=vision_settings(vision),
        digest_pixels=True,
    )
    assert step_digests([pipeline], 1, 4)[0].hex() in out
    pipeline.close()


def test_ranks_of_a_finite_recipe_end_at_the_same_step(corpus):
    options = ["--global-batch", "8", "--dp", "2,1", "--resume-at", "3"]
    process = command("verify", *common(corpus, "finite.toml"), *options)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert re.search(r"^all 4 runs gave the same \d+ global batches, after which the data ended$", out, flags=re.M)


def setup_of(corpus):
    return Setup(corpus / "recipe.toml", str(corpus / "tokenizer"), 32, 8, 8, 2, None, None, False)


def test_a_rank_that_fails_stops_the_matrix_and_leaves_no_process(corpus, tmp_path):
    missing = Run("failing", tmp_path / "a", [Leg(3, 2)])  # 8 records do not divide among 3 ranks
    with pytest.raises(
        ZephonError,
        match=r"^failing, rank \d of 3 ended with exit code 2: error: --global-batch is 8; expected a multiple",
    ):
        Matrix(setup_of(corpus)).run([Run("endless", tmp_path / "b", [Leg(1, None)]), missing])
    assert not _children()


def _children() -> list[str]:
    """Ids of living processes started by this one."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if int(parent) == os.getpid() and state != "Z":
                found.append(entry)
    return found


def test_ctrl_c_ends_a_stream_with_its_totals_and_130(corpus, tmp_path):
    digests = tmp_path / "digests.txt"
    process = command("stream", *common(corpus), "--microbatch-size", "4", "--digests", digests)
    deadline = time.monotonic() + 60
    while not (digests.exists() and digests.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert "records" in out
    assert "Traceback" not in err


def test_a_reader_that_has_enough_ends_the_command_quietly(corpus):
    process = command("show", *common(corpus), "--global-batch", "512", "--canonical-replicas", "4", "--step", "1")
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 1
    assert err.startswith("warning: ") and err.count("\n") == 1


@pytest.mark.parametrize("module", ["pyarrow", "typer"])
def test_ctrl_c_while_the_command_starts_ends_it_quietly(tmp_path, module):
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(
        [sys.executable, "-m", "zephon.cli", "--help"], env=environment, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (130, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">/dev/full"])
def test_a_closed_or_full_output_is_no_traceback(closed):
    line = f"{sys.executable} -m zephon.cli --help {closed}"
    run = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert "Traceback" not in run.stderr and "Exception ignored" not in run.stderr
    assert run.returncode == (1 if "full" in closed else 0)


@pytest.mark.slow
def test_the_demo_runs_from_nothing(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    argv = [sys.executable, "-m", "examples.demo", "--folder", tmp_path / "demo", "--steps", "50"]
    process = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert re.search(r"^all \d+ runs gave the same 16 global batches$", process.stdout, flags=re.M)
    assert (tmp_path / "demo" / "barcode.png").read_bytes().startswith(b"\x89PNG")
    names = sorted(path.name for path in (tmp_path / "demo").iterdir() if path.name[0] != ".")
    assert names == ["barcode.png", "cache", "corpus", "recipe.toml", "samples", "tokenizer"]
