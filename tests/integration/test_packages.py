"""The packages as users get them: wheels and sdists, built, looked at, and installed outside of the repository."""

import email
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from support.chat_data import CHATML, write_chat_tokenizer
from support.interpreters import ROOT, VERSIONS, alone, find_python, find_uv
from support.pages import text_of

PACKAGES = {"zephon-core": "zephon", "torchtitan-zephon": "torchtitan_zephon", "megatron-zephon": "megatron_zephon"}
EXTRAS = {"all", "fast", "lance", "object-stores", "plot", "ray", "trainers", "vision", "vortex"}
"""Those that every release has; trainers may have their own."""
FAST = ("fastokens", "gigatoken")


HOME = "https://example.org/zephon"


def build(folder, **environment):
    command = [ROOT / "scripts/dist", folder]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **environment})
    return folder


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    return build(tmp_path_factory.mktemp("dist"), ZEPHON_URL=HOME)


def wheel_of(dist, package):
    (path,) = dist.glob(f"{package.replace('-', '_')}-*.whl")
    return path


def metadata_of(dist, package):
    with zipfile.ZipFile(wheel_of(dist, package)) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(wheel.read(name))


def test_wheels_hold_the_package_its_license_and_its_readme_and_nothing_else(dist):
    for package, module in PACKAGES.items():
        with zipfile.ZipFile(wheel_of(dist, package)) as wheel:
            names = {name for name in wheel.namelist() if ".dist-info/" not in name}
            licenses = [name for name in wheel.namelist() if name.endswith("dist-info/licenses/LICENSE")]
            assert [wheel.read(name) for name in licenses] == [(ROOT / "LICENSE").read_bytes()]
        source = ROOT / package / "src"
        files = {p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file() and p.suffix != ".pyc"}
        assert names == files and f"{module}/py.typed" in names
        with tarfile.open(next(dist.glob(f"{package.replace('-', '_')}-*.tar.gz"))) as sdist:
            inside = {name.partition("/")[2] for name in sdist.getnames()}
        assert inside == {f"src/{name}" for name in files} | {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO"} | (
            inside & {".gitignore"}
        )


def test_metadata_say_what_an_index_shows(dist):
    for package in PACKAGES:
        metadata = metadata_of(dist, package)
        assert (metadata["Name"], metadata["License-Expression"]) == (package, "Apache-2.0")
        assert metadata.get_payload().strip() == (ROOT / package / "README.md").read_text(encoding="utf-8").strip()
        assert metadata["Description-Content-Type"] == "text/markdown"
        oldest = metadata["Requires-Python"].removeprefix(">=")
        stated = [c.rpartition(":: ")[2] for c in metadata.get_all("Classifier") if re.search(r":: 3\.\d+$", c)]
        assert stated == [version for version in VERSIONS if int(version[2:]) >= int(oldest[2:])]
        assert metadata.get_all("Project-URL") == [f"Homepage, {HOME}", f"Repository, {HOME}"]


def test_the_core_needs_no_library_without_wheels_for_free_threaded_python(dist):
    metadata = metadata_of(dist, "zephon-core")
    required = metadata.get_all("Requires-Dist")
    extras = set(metadata.get_all("Provides-Extra"))
    assert extras >= EXTRAS
    names = {extra: set() for extra in extras}
    for line in required:
        if "extra ==" in line:
            names[re.search(r"extra == '([\w-]+)'", line)[1]].add(re.match(r"[\w-]+", line)[0])
    assert names["fast"] == set(FAST)
    assert names["all"] == set().union(*(names[extra] for extra in extras - {"all"}))
    hard = {re.match(r"[\w-]+", line)[0] for line in required if "extra ==" not in line}
    assert {"tokenizers", "huggingface-hub"} <= {name.replace("_", "-") for name in hard}


def test_the_workspace_installs_the_fast_libraries():
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for file in ("scripts/setup", "tools/lock"):
        assert "zephon-core[fast," in (ROOT / file).read_text(encoding="utf-8")
    assert all(f"\n{name}==" in constraints for name in FAST)
    assert "zephon-core[fast]" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_packages_have_the_license_and_the_workspace_what_extras_for_trainers_name():
    for package in PACKAGES:
        assert (ROOT / package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    project = tomllib.loads((ROOT / "zephon-core/pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    tested = {re.match(r"[\w-]+", line)[0] for line in groups["trainers"] + groups["frameworks"]}
    for extra in ("ray", "hugging-face", "lightning", "trl"):
        assert {re.match(r"[\w-]+", line)[0] for line in extras[extra]} <= tested, extra


@pytest.mark.deep
def test_two_builds_give_the_same_bytes_whatever_the_times_and_the_mask_of_files(dist, tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    before = os.umask(0o077)
    for package in PACKAGES:
        for path in (ROOT / package / "src").rglob("*.py"):
            os.utime(path)
            break
    try:
        again = build(tmp_path / "again", ZEPHON_URL=HOME)
    finally:
        os.umask(before)

    def digests(folder):
        files = [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    assert digests(again) == digests(dist) and len(digests(dist)) == 6


def install(folder, python, *what):
    """A fresh environment in `folder` with these packages; gives its python."""
    uv = find_uv()
    subprocess.run([uv, "venv", "-q", "--no-project", "--python", python, folder], check=True, env=alone())
    inside = folder / "bin/python"
    subprocess.run([uv, "pip", "install", "-q", "--python", inside, *what], check=True, env=alone(), cwd=folder)
    return inside


def run(python, program, folder):
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(program, encoding="utf-8")
    environment = alone() | {"ZEPHON_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [python, "-I", "program.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran


def examples_of(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def interpreter(version):
    python = find_python(version)
    if python is None:
        pytest.skip(
            f"there is no Python {version} on this machine (ZEPHON_PYTHON_{version.replace('.', '_')} names one)"
        )
    return python


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fast", ["alone", "fast"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_core_installs_alone_and_runs_its_example(dist, tmp_path, version, fast):
    extra = "[fast]" if fast == "fast" else ""
    python = install(tmp_path / "venv", interpreter(version), f"{wheel_of(dist, 'zephon-core')}{extra}")
    (example,) = examples_of(ROOT / "zephon-core/README.md")
    check = "import sys\nassert 'zephon' not in sys.modules\n"
    where = "\nimport zephon\nassert 'site-packages' in zephon.__file__\nprint(zephon.__version__)\n"
    ran = run(python, check + example + where, tmp_path / "work")
    told = subprocess.run(
        [python.parent / "zephon", "--version"], cwd=tmp_path, env=alone(), capture_output=True, text=True, check=True
    )
    assert told.stdout == f"zephon {ran.stdout.split()[-1]}\n"


@pytest.mark.deep
@pytest.mark.parametrize("extra", ["", "[fast]"])
def test_wheels_for_free_threaded_python_are_there_without_the_fast_libraries(dist, tmp_path, extra):
    """What pip would install on CPython 3.14t: every requirement as a wheel that it can load. (Some versions of pip
    take abi3 wheels for loadable there, which they are not; those of the fast libraries are of this kind.)"""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "pip"], check=True)
    command = [tmp_path / "pip/bin/python", "-m", "pip", "install", "--dry-run", "--quiet", "--only-binary=:all:"]
    command += ["--implementation=cp", "--python-version=3.14", "--abi=cp314t", "--abi=none", "--report=-"]
    command += [f"--platform={name}" for name in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "any")]
    command += ["--target", tmp_path / "target", f"{wheel_of(dist, 'zephon-core')}{extra}"]
    ran = subprocess.run(command, env=alone(), capture_output=True, text=True, check=False)
    wheels = []
    if ran.returncode == 0:
        chosen = json.loads(ran.stdout)["install"]
        wheels = [each["download_info"]["url"].rpartition("/")[2] for each in chosen]
        assert len(wheels) > len(FAST)
    loadable = wheels and all(wheel.split("-")[-2] in ("none", "cp314t") for wheel in wheels)
    assert bool(loadable) == (extra == ""), (wheels, ran.stderr)


INTEGRATION = {
    "torchtitan-zephon": """
from torchtitan_zephon import ZephonDataLoader
config = ZephonDataLoader.Config.from_toml("recipe.toml")
""",
    "megatron-zephon": """
from pathlib import Path
import megatron_zephon.provider, sys
assert (Path(sys.executable).parent / "pretrain_gpt_zephon.py").is_file()
""",
}


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("package", list(INTEGRATION))
@pytest.mark.parametrize("version", VERSIONS)
def test_integrations_install_alone_and_run_the_example_of_the_readme(dist, tmp_path, version, package):
    """Each with what it declares, and what its framework needs; the example is that of the front page, with torch."""
    oldest = metadata_of(dist, package)["Requires-Python"].removeprefix(">=")
    if int(version[2:]) < int(oldest[2:]):
        pytest.skip(f"{package} needs Python {oldest}")
    versions = [
        f"{name}=={PINNED[name]}" for name in ("torch", "torchtitan" if "titan" in package else "megatron-core")
    ]
    what = [wheel_of(dist, package), "--find-links", dist, *versions]
    python = install(tmp_path / "venv", interpreter(version), *what)
    work = tmp_path / "work"
    for name in ("wiki", "news"):
        (work / "data" / name).mkdir(parents=True)
        rows = "".join(f'{{"text": "{name} {n} {"some words go on and on " * 20}"}}\n' for n in range(200))
        (work / "data" / name / "a.jsonl").write_text(rows)
    write_chat_tokenizer(work / "gpt2", CHATML)
    (work / "recipe.toml").write_text('[[sources]]\nname = "wiki"\npath = "data/wiki"\n')
    (example,) = (code for code in examples_of(ROOT / "README.md") if "train_step(" in code)
    head = "rank = 3\n\ndef train_step(fields):\n    print(sorted(fields))\n    raise SystemExit\n\n"
    ran = run(python, INTEGRATION[package] + head + example, work)
    assert ran.stdout.splitlines()[-1] == "['input_ids', 'labels', 'position_ids']"


PINNED = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line
)
TITAN, MEGATRON = (
    [f"torch=={PINNED['torch']}", f"torchtitan=={PINNED['torchtitan']}"],
    [f"torch=={PINNED['torch']}", f"megatron-core[training]=={PINNED['megatron-core']}"],
)


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page, begins, there, prints",
    [
        ("docs/start.md", "python3 -m venv", [], "zephon 0."),
        ("docs/start.md", "pip install", TITAN, "torchtitan-zephon=="),
        ("docs/huggingface.md", "pip install", [], "transformers==5"),
        ("docs/lightning.md", "pip install", [], "lightning==2"),
        ("README.md", "pip install", [], "fastokens=="),
        ("zephon-core/README.md", "pip install", [], "fastokens=="),
        ("torchtitan-zephon/README.md", "git clone", TITAN, "torchtitan-zephon=="),
        ("megatron-zephon/README.md", "git clone", MEGATRON, "megatron-zephon=="),
    ],
)
def test_what_pages_install_is_there_and_works(dist, tmp_path, page, begins, there, prints):
    """In a fresh environment, with the framework that the page takes for granted."""
    (tmp_path / "dist").symlink_to(dist)
    code = text_of(page, begins)
    environment = alone()
    if "venv" not in code:
        binaries = install(tmp_path / "venv", sys.executable, "packaging", *there).parent
        path = os.pathsep.join([str(binaries), str(Path(find_uv()).parent), os.environ["PATH"]])
        environment |= {"VIRTUAL_ENV": str(tmp_path / "venv"), "PATH": path}
    if "--dry-run" not in code:
        code += "\nzephon --version && zephon stream --help > help.txt"
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0 and prints in ran.stdout + ran.stderr, ran.stdout + ran.stderr
    assert "--dry-run" in code or "zephon 0." in ran.stdout


def test_this_interpreter_is_one_of_those_that_packages_name():
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in VERSIONS
    assert Path(find_python("3.12") or sys.executable).exists()
