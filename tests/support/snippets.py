"""The blocks of the documentation that do not begin with "# run", each with what runs it; see `support.pages`."""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from support.pages import ROOT, Act, Place, Snippet

AUTOMODEL, DEEPSPEED, PACKAGES, RAY, REGISTRY = (
    "tests/integration/test_automodel.py::test_the_documentation_runs_as_written",
    "tests/integration/test_deepspeed.py::test_a_run_of_deepspeed_goes_on_from_its_checkpoint",
    "tests/integration/test_packages.py::test_what_pages_install_is_there_and_works",
    "tests/integration/test_ray.py::test_the_pipeline_of_the_documentation_runs_on_the_cluster",
    "tests/unit/data/formats/test_registry.py::test_a_package_adds_the_format_of_the_documentation",
)
WORDS = "some words go on and on. "
SOURCES = "".join(f'[[sources]]\nname = "{name}"\npath = "data/{name}"\n' for name in ("web", "code"))
CAPTIONS = '[[sources]]\nname = "captions"\npath = "data/cc12m/*.tar"\ndocuments = "images"\n'


# What blocks take for granted


def all_of(*acts: Act) -> Act:
    return lambda place: [act(place) for act in acts]


def data(*names: str, rows: int = 200) -> Act:
    """Folders data/NAME with a Parquet file of texts each."""

    def make(place: Place) -> None:
        for name in names:
            folder = place.folder / "data" / name
            folder.mkdir(parents=True, exist_ok=True)
            texts = [f"{name} {n}: " + WORDS * (8 + n % 23) for n in range(rows)]
            pq.write_table(pa.table({"text": texts}), folder / "0.parquet")

    return make


def tokenizer(*names: str) -> Act:
    """Folders with a small tokenizer, which a name of the Hub stands for as well."""

    def make(place: Place) -> None:
        for name in names:
            shutil.copytree(place.fixture("tiny_tokenizer"), place.folder / name, dirs_exist_ok=True)

    return make


def image_data(place: Place) -> None:
    """The sources of docs/images.md, and a tokenizer that has the tokens of images and a chat template."""
    from support.vision_data import file_of, image_tokenizer, picture

    files = [file_of(picture(96 + 7 * n, 90 + 6 * n, seed=n)) for n in range(8)]
    media = place.folder / "data/llava/images"
    media.mkdir(parents=True)
    (place.folder / "data/cc12m").mkdir()
    with tarfile.open(place.folder / "data/cc12m/0.tar", "w") as tar:
        for n, content in enumerate(files):
            (media / f"{n}.jpg").write_bytes(content)
            for name, part in ((f"{n}.jpg", content), (f"{n}.txt", f"picture {n}".encode())):
                info = tarfile.TarInfo(name)
                info.size = len(part)
                tar.addfile(info, BytesIO(part))
    talks = [
        {
            "image": f"{n}.jpg",
            "conversations": [
                {"from": "human", "value": "<image>\nWhat is this?"},
                {"from": "gpt", "value": "A picture."},
            ],
        }
        for n in range(8)
    ]
    (place.folder / "data/llava.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    folder = image_tokenizer(place.folder / "my-tokenizer")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for m in messages %}{% if m.content is string %}{% set parts = [{'type': 'text', 'text': m.content}] %}"
        "{% else %}{% set parts = m.content %}{% endif %}{{ m.role + ': ' }}{% for part in parts %}"
        "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{{ '\\n' }}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def recipe(text: str = f"canonical_replicas = 8\n{SOURCES}", name: str = "recipe.toml") -> Act:
    return lambda place: (place.folder / name).write_text(text, encoding="utf-8")


def usual(*tokenizers: str) -> Act:
    """Two sources, recipe.toml of both, and tokenizers."""
    return all_of(data("web", "code"), recipe(), tokenizer(*tokenizers))


def project(place: Place) -> None:
    """What a clone of the project has, set up, in the current folder."""
    if (place.folder / "recipes").exists():
        return
    for name in ("Makefile", "examples", "benchmarks", "tests", "tools", "zephon-core", "README.md", "docs"):
        (place.folder / name).symlink_to(ROOT / name)
    for name in ("pyproject.toml", "torchtitan-zephon", "megatron-zephon"):
        (place.folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "recipes", place.folder / "recipes")  # whose paths lead to its own .zephon
    (place.folder / ".venv").symlink_to(sys.prefix)
    (place.folder / "scripts").mkdir()
    (place.folder / "scripts/setup").write_text("#!/bin/sh\n")  # the environment is there
    (place.folder / "scripts/setup").chmod(0o755)
    place.setenv("OMP_NUM_THREADS", "1")


def demo_data(place: Place) -> None:
    """Where `make demo` has not been run: small files under its names."""
    if not (place.folder / ".zephon/demo").exists():
        data("code", "docs")(place)
        corpus = place.folder / ".zephon/demo/corpus"
        corpus.parent.mkdir(parents=True)
        (place.folder / "data").rename(corpus)
        tokenizer(".zephon/demo/tokenizer")(place)


def without_data(place: Place) -> None:
    """Takes the small files away, in whose place `make demo` builds its corpus."""
    shutil.rmtree(place.folder / ".zephon")


def pipelines(**names: str) -> Act:
    """A source, and by name the pipelines that methods make of `Pipeline(source)`."""

    def make(place: Place) -> None:
        from zephon import Pipeline
        from zephon.io import Dataset
        from zephon.work import StaticMixtureWorkSource

        tokenizer("tokenizer")(place)
        texts = {"text": [f"text {n}: " + WORDS * (1 + n % 30) for n in range(300)]}
        source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("web", texts)], chunk_size=50, seed=3)
        place.names |= {"source": source, "Pipeline": Pipeline}
        for name, methods in names.items():
            place.names[name] = eval(f"Pipeline(source){methods}", place.names)

    return make


# What is checked


def gives_batch(before: str = "", after: str = "", tokenizer: str = "tokenizer", **options: Any) -> Act:
    """The recipe that the block is, with lines before and after, gives a batch."""

    def check(place: Place) -> None:
        from zephon import DataRecipe, Pipeline

        text = place.file.read_text(encoding="utf-8")
        place.file.write_text(f"{before}\n{text}\n{after}", encoding="utf-8")
        recipe = DataRecipe.from_toml(place.file)
        for key, value in place.values[0].items():
            if key not in ("sources", "schedule", "continue_from"):
                assert getattr(recipe, key) == value
        pipeline = Pipeline.from_recipe(
            recipe, tokenizer=tokenizer, **{"seq_len": 64, "microbatch_size": 4, "global_batch": 64, **options}
        )
        assert len(next(iter(pipeline))) == options.get("microbatch_size", 4)
        pipeline.close()

    return check


def asserts(place: Place) -> None:
    """The block checks itself."""


def prints(*texts: str) -> Act:
    def check(place: Place) -> None:
        for text in texts:
            assert text in place.output, place.output[-8000:]

    return check


def resumed(folder: str = "out", ledger: str = "{}/ledger") -> Act:
    """A run of two processes goes on in one, and both have the same global batches."""

    def check(place: Place) -> None:
        prints("all 2 runs are identical over the 3 steps that they share")(place)
        for name, ranks in (("two", 2), ("one", 1)):
            ledgers = (place.folder / folder / ledger.format(name)).glob("*.ledger")
            assert sorted(path.name[:5] for path in ledgers) == [f"dp{ranks}-{rank}" for rank in range(ranks)]

    return check


def titan_batch(
    field: str = "dataloader",
    *,
    tokenizer_of: Callable[[Path], Any] | None = None,
    folder: str = "tokenizer",
    seq_len: int = 64,
    batch: int = 512,
) -> Act:
    """The loader of the config of TorchTitan that the block makes gives a batch of one of two ranks."""

    def plain(folder: Path) -> Any:
        from zephon.tokenizer.tokenizer import load_tokenizer

        known = load_tokenizer(folder)
        return SimpleNamespace(tokenizer_path=str(folder), bos_id=known.bos_id, eos_id=known.eos_id)

    def check(place: Place) -> None:
        config = place.names["config"]
        for name in field.split("."):
            config = getattr(config, name)
        loader = config.build(
            dp_world_size=2,
            dp_rank=1,
            tokenizer=(tokenizer_of or plain)(place.folder / folder),
            seq_len=seq_len,
            local_batch_size=2,
            global_batch_size=batch,
            snapshot_every_n_steps=None,
        )
        fields, labels = next(iter(loader))
        assert fields["input"].shape == labels.shape == (2, seq_len)

    return check


# AutoModel, commands, formats


def _automodel_validation(place: Place) -> None:
    from zephon.integrations.automodel import ZephonEvaluationDataset

    pages = place.values[0]
    settings = dict(pages["validation_dataset"])
    assert settings.pop("_target_") == "zephon.integrations.automodel.ZephonEvaluationDataset"
    dataset = ZephonEvaluationDataset(**settings, tokenizer=str(place.folder / "tokenizer"))
    assert sum(len(batch["input_ids"]) for batch in dataset.shard(1, 0)) == 256
    assert pages["validation_dataloader"] == {"batch_size": None}


def _stored(place: Place) -> None:
    data("web")(place)
    recipe(SOURCES.split('[[sources]]\nname = "code"')[0])(place)
    place.fixture("s3").upload(place.folder / "data/web", "web")


def _home(place: Place) -> None:
    place.setenv("HOME", str(place.folder))
    place.setenv("SHELL", "/bin/bash")


def _completes(place: Place) -> None:
    assert "_ZEPHON_COMPLETE" in place.output and "zephon" in (place.folder / ".bashrc").read_text()


def _hub(place: Place) -> None:
    usual("gpt2", "T")(place)
    rows = (json.dumps({"text": f"page {n} " + WORDS * 9, "url": f"u{n}"}) + "\n" for n in range(90))
    from support.servers.hub import Repository

    hub = place.fixture("hub")
    hub.repositories["allenai/c4"] = Repository(
        card={"configs": [{"config_name": "en", "data_files": [{"split": "train", "path": "en/*"}]}]}
    )
    hub.repositories["allenai/c4"].commit({"en/c4-train.00000.json": "".join(rows).encode()})


# Trainers


def _hugging_face(place: Place) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainingArguments

    usual("tokenizer")(place)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    place.setenv("CUDA_VISIBLE_DEVICES", "")
    place.names |= {
        "TrainingArguments": lambda *args, **more: TrainingArguments(*args, use_cpu=True, report_to="none", **more),
        "model": LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=1024, **sizes)),
        "tokenizer": AutoTokenizer.from_pretrained(place.folder / "tokenizer"),
    }


def _hugging_face_steps(place: Place) -> None:
    assert place.names["trainer"].state.global_step == 2


def _lightning(place: Place) -> None:
    from lightning.pytorch import Trainer

    from examples.train_lightning import Module

    usual("gpt2")(place)
    place.names["model"] = Module("gpt2")
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    place.names["Trainer"] = lambda **more: Trainer(**quiet, **more)


def _lightning_steps(place: Place) -> None:
    assert place.names["trainer"].global_step == 2


def _pytorch(place: Place) -> None:
    usual("gpt2")(place)
    place.names["steps"] = 3


def _pytorch_steps(place: Place) -> None:
    loader = place.names["loader"]
    assert place.names["fields"]["input_ids"].shape == (4, 1024) and loader.batches_per_step == 16
    assert next(iter(loader))["input_ids"].shape == (4, 1024)
    loader.close()


def _image_fields(place: Place) -> None:
    assert {"pixel_values", "grid_thw"} <= set(place.names["fields"])
    place.names["pipeline"].close()


def _vision(**settings: Any) -> Any:
    from zephon import VisionSettings

    return VisionSettings(min_pixels=1024, max_pixels=4096, **settings)


# Packing, reports, runners, schedules


def _packed(place: Place) -> None:
    """Both calls give a pipeline, and that gives a batch."""
    assert len(place.values) == 2
    for pipeline in place.values:
        batches = pipeline.batch(2)
        assert next(iter(batches)).tokens.shape == (2, 4097)
        batches.close()


def _stateful(place: Place) -> None:
    assert "loss_mask" in place.names["fields"] and place.names["state"]


def _taken_over(place: Place) -> None:
    """The new recipe takes over from a run of the first one."""
    sizes = "--tokenizer tokenizer --seq-len 64 --global-batch 64 --microbatch-size 4 --steps 2"
    place.shell(
        f"zephon stream first.toml {sizes} --checkpoint saved && zephon stream recipe.toml {sizes} --restore saved"
    )


def _ledgers(place: Place) -> None:
    usual("T")(place)
    sizes = "--tokenizer T --seq-len 2048 --global-batch 16 --microbatch-size 4 --steps 3"
    for folder in ("out", "other"):
        place.shell(f"zephon stream recipe.toml {sizes} --ledger {folder}/ledger")


def _page_of_steps(place: Place) -> None:
    json_line = place.values[0]
    assert set(json_line) == {"until", "records", "wait", "tokens", "wanted"}
    steps = next((place.folder / "out/ledger").glob("*.steps")) if (place.folder / "out").exists() else None
    if steps is not None:
        written = [json.loads(line) for line in steps.read_text().splitlines()]
        assert set(json_line) <= set().union(*written)


RUNNERS_BEFORE = """
from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

texts = [f"What page {n} says, in a few words." for n in range(300)]
source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("pages", {"text": texts})], seed=1)
"""
RUNNERS_AFTER = """
if __name__ == "__main__":
    digests = []
    for runner in ("threads", "process"):
        each = pipeline if runner == "process" else Pipeline(source).map_transform(first_words, columns=["text"])
        each = each.tokenize("tokenizer", parallelism=1).pack_flat(max_length=64).batch(microbatch_size=4)
        digests.append(next(iter(each)).digests)
        each.close()
    assert digests[0] == digests[1]
"""


# Read me


def _front(place: Place) -> None:
    """Files and tokenizers of the first example."""
    data("wiki", "news")(place)
    tokenizer("gpt2", "my-tokenizer")(place)
    place.names |= {"rank": 3, "taken": (taken := []), "train_step": taken.append}


def _front_batches(place: Place) -> None:
    shapes = [{name: tuple(each.shape) for name, each in fields.items()} for fields in place.names["taken"]]
    assert shapes == [dict.fromkeys(("input_ids", "labels", "position_ids"), (8, 2048))] * 2
    place.names["pipeline"].close()


def _operators(place: Place) -> None:
    from support.chat_data import CHATML, write_chat_tokenizer
    from zephon.io import Dataset
    from zephon.work import StaticMixtureWorkSource

    shutil.rmtree(place.folder / "my-tokenizer")
    write_chat_tokenizer(place.folder / "my-tokenizer", CHATML)
    texts = [f"Document {n}: " + WORDS * 20 for n in range(200)]
    web = Dataset.from_dict("web", {"text": texts, "language": ["en", "de"] * 100})
    talk = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes. " * 30}]
    chat = Dataset.from_dict("chat", {"messages": [talk] * 50})
    place.names["source"] = StaticMixtureWorkSource(datasets=[web, chat])


def _operators_batch(place: Place) -> None:
    pipeline = place.names["pipeline"]
    assert len(next(iter(pipeline))) == 8 and pipeline.mixture()["web"].dropped > 0
    assert min(each.given for each in pipeline.mixture().values()) > 0
    pipeline.close()


def _with_states(place: Place) -> None:
    """The pipeline of one rank, and states of two after three steps."""
    from support.runs import build_all, go_on

    pipelines()(place)
    sizes = {"lanes": 2, "batch": 8, "seq_len": 64, "microbatch": 4}
    _, states = go_on(build_all(place.names["source"], "tokenizer", groups=2, **sizes), 3, 8)
    (pipeline,) = build_all(place.names["source"], "tokenizer", **sizes)
    place.names |= {"pipeline": pipeline, "states": states}


def _moved(place: Place) -> None:
    pipeline = place.names["pipeline"]
    json.dumps(place.names["state"])
    assert next(iter(pipeline)).sequence_numbers[0] == 120 * 8 and pipeline.checkpoint() != place.names["state"]
    pipeline.close()


def _command(place: Place) -> None:
    """The files that the capitals of the commands stand for."""
    data("web", "code", rows=400)(place)
    tokenizer("T")(place)
    (place.folder / "data/web").rename(place.folder / "PATH")
    recipe(f"canonical_replicas = 64\n{SOURCES.replace('data/web', 'PATH')}")(place)
    sizes = "--tokenizer T --seq-len 2048 --global-batch 64 --microbatch-size 8 --steps 18"
    place.shell(f"zephon stream recipe.toml {sizes} --ledger DIR --checkpoint out/checkpoint/step-1000")
    (place.folder / "LEDGER").symlink_to("DIR")


def _titan_config(place: Place) -> None:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    project(place)
    demo_data(place)
    tokenizer("tokenizer")(place)
    place.names["config"] = llama3_debugmodel()


def _titan_images(place: Place) -> None:
    image_data(place)
    recipe(f"max_images = 2\n{CAPTIONS}")(place)


def _launched(place: Place) -> None:
    project(place)
    recipe()(place)


def _helped(place: Place) -> None:
    """Each of the three programs has printed the options of Zephon's group."""
    assert place.output.count("\nzephon:\n") == 3


def _multi_modal_tokenizer(folder: Path) -> Any:
    from torchtitan.components.tokenizer import MultiModalTokenizer

    names = {f"{name}_token": f"<|{name}|>" for name in ("vision_start", "vision_end")}
    names |= {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "pad_token": "<|endoftext|>"}
    return MultiModalTokenizer.Config(**names).build(tokenizer_path=str(folder))


def _my_config(place: Place) -> None:
    assert place.names["my_config"]().dataloader.seed == 7
    place.names["config"] = place.names["my_config"]()
    titan_batch()(place)


def _indexed(place: Place) -> None:
    """Two datasets as Megatron's preprocess_data.py writes them."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for name in ("web", "code"):
        prefix = str(place.folder / f"{name}_text_document")
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
        for row in range(9):
            builder.add_document(torch.arange(40) + row, [40])
        builder.finalize(f"{prefix}.idx")


def _blended(place: Place) -> None:
    from zephon import DataRecipe

    blend = DataRecipe.from_toml("recipe.toml")
    assert [source.weight for source in blend.sources] == [0.3, 0.7]


def _vlm(place: Place) -> None:
    image_data(place)
    shutil.copytree(place.folder / "my-tokenizer", place.folder / "path/to/tokenizer")
    recipe(f"canonical_replicas = 1\nmax_documents_per_record = 2\n{CAPTIONS}")(place)


def _vlm_batch(place: Place) -> None:
    fields = next(place.names["data_iterator"])
    assert fields["input_ids"].shape == (1, 4096) and len(fields["visual_inputs"].pixel_values)
    place.names["pipeline"].close()


MEGATRON_BEFORE = """
import os
import sys

# As torchrun does, for one process.
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
sys.argv += '''--zephon-data-config recipes/pretrain.toml --tokenizer-model .zephon/demo/tokenizer --num-layers 2
    --hidden-size 64 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 --attention-dropout 0
    --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 16 --train-iters 2 --lr 1e-3 --log-interval 1
    --zephon-ledger out/program-ledger'''.split()
from megatron_zephon import cpu_train

sys.argv[1:] = [*cpu_train.FLAGS, *sys.argv[1:]]
cpu_train.prepare()
import megatron.training
from megatron.core.enums import ModelType
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

from megatron_zephon.training import forward_step

has_nvidia_modelopt, full_config = False, None


def pretrain(config, provider, *unchanged):
    assert unchanged == (...,)  # of Megatron's own program, as is the config
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    megatron.training.pretrain(config, provider, ModelType.encoder_or_decoder, forward_step)
"""

MAKE = "the Makefile has the command; here with fewer processes and steps"
"""Why a command of make has options."""
GPUS = "needs GPUs"
UV = {"pip install": "uv pip install"}
SHARED = "uv shares what it has downloaded"
CLONED = {"URL-OF-THIS-PROJECT": f"file://{ROOT}", **UV}
RESOLVED = {"pip install": "uv pip install --dry-run --find-links dist"}
OF_AN_INDEX = "no index has the packages yet, and torch is large"


def of_make(target: str) -> str:
    """The command of a target, without setting up."""
    return f"$(make --silent --dry-run {target} | tail -n 1)"


def tests_of(page: str) -> Snippet:
    """The block that runs the tests of an integration."""
    return Snippet(
        page,
        ".venv/bin/python -m pytest",
        given=project,
        then=prints("tests collected"),
        put={"-m pytest": "-m pytest --collect-only -q"},
        why="tests run these tests already",
        deep=True,
    )


SNIPPETS = [
    Snippet(
        "docs/automodel.md",
        "step_scheduler:",
        put={"max_steps: 1000": "max_steps: 1"},
        why="steps on a CPU",
        test=AUTOMODEL,
    ),
    Snippet("docs/automodel.md", "make demo", test=AUTOMODEL),
    Snippet("docs/automodel.md", "cd out/two/epoch_0_step_2", test=AUTOMODEL),
    Snippet(
        "docs/automodel.md",
        "validation_dataset:",
        given=all_of(data("web", rows=1200), recipe('[[sources]]\nname = "web"\npath = "data/web"\n', "held-out.toml")),
        then=all_of(tokenizer("tokenizer"), _automodel_validation),
        put={"*microbatch_size": "4"},
        why="the name stands for that of the first block",
    ),
    Snippet("docs/command.md", "zephon --install-completion", given=_home, then=_completes),
    Snippet(
        "docs/experiment.md",
        "make experiment",
        given=project,
        then=prints("Zephon: losses of a step at most", "elastic.png"),
        put={"make experiment": f"{of_make('experiment')} --ranks 1 --steps 11 --seeds 1"},
        why=MAKE,
        deep=True,
    ),
    Snippet(
        "docs/formats.md",
        "zephon index data/web",
        given=_stored,
        put={"s3://bucket": "s3://corpus"},
        why="the server of the tests has that bucket",
    ),
    Snippet("docs/formats.md", "import hashlib", test=REGISTRY),
    Snippet("docs/formats.md", "[project.entry-points", test=REGISTRY),
    Snippet("docs/huggingface.md", "pip install", put=RESOLVED, why=OF_AN_INDEX, test=PACKAGES),
    Snippet(
        "docs/huggingface.md",
        "from zephon.integrations.hugging_face",
        given=_hugging_face,
        then=_hugging_face_steps,
        put={"max_steps=1000": "max_steps=2", "global_batch=64": "global_batch=8", "seq_len=1024": "seq_len=64"},
        why="steps on a CPU",
    ),
    Snippet("docs/huggingface.md", "make demo", given=project, then=resumed(), deep=True),
    Snippet(
        "docs/images.md",
        "max_images = 8",
        given=all_of(data("web"), image_data),
        then=gives_batch(
            "canonical_replicas = 2",
            tokenizer="my-tokenizer",
            seq_len=512,
            microbatch_size=2,
            global_batch=4,
            vision=_vision(patch_size=16, merge_size=2),
        ),
    ),
    Snippet(
        "docs/images.md",
        "from zephon import Pipeline, VisionSettings",
        then=_image_fields,
        put={"in pipeline:": "in islice(pipeline, 2):", "seq_len=8192": "seq_len=2048"},
        why="it would go on for ever",
    ),
    Snippet("docs/inspect.md", "zephon inspect data/web", given=_hub, then=prints("duplicates in the sample")),
    Snippet(
        "docs/inspect.md",
        "zephon bench",
        then=prints("this machine feeds the model"),
        put={"25k": "25k --seconds 1"},
        why="a shorter measurement",
    ),
    Snippet("docs/lightning.md", "pip install", put=RESOLVED, why=OF_AN_INDEX, test=PACKAGES),
    Snippet(
        "docs/lightning.md",
        "from zephon.integrations.lightning",
        given=_lightning,
        then=_lightning_steps,
        put={"max_steps=1000": "max_steps=2"},
        why="steps on a CPU",
    ),
    Snippet("docs/lightning.md", "make demo", given=project, then=resumed(), deep=True),
    Snippet(
        "docs/mixtures.md",
        "[[sources]]",
        given=all_of(data("web", "code"), tokenizer("tokenizer")),
        then=gives_batch(),
    ),
    Snippet(
        "docs/mixtures.md",
        "ensure_mixture",
        then=gives_batch("canonical_replicas = 1\nensure_mixture_buffer_size = 64", SOURCES, global_batch=4),
    ),
    Snippet(
        "docs/packing.md",
        "pipeline.pack_flat",
        given=pipelines(pipeline='.options(canonical_replicas=2).tokenize("tokenizer")'),
        then=_packed,
    ),
    Snippet(
        "docs/performance.md",
        "make bench",
        given=project,
        put={
            "make bench": f"{of_make('bench')} --only zephon_here --rounds 1 --seconds 1 --source-mb 4",
            "--only zephon_here grain": "--only zephon_here grain --rounds 1 --seconds 1 --source-mb 4",
            "--rounds 7 --seconds 20": "--rounds 1 --seconds 1 --source-mb 4 --only zephon_here",
        },
        why="all loaders take an hour, and an environment each",
        deep=True,
    ),
    Snippet("docs/pytorch.md", "from zephon.loader import JobLoader", given=_pytorch, then=_pytorch_steps),
    Snippet("docs/pytorch.md", "make demo", given=project, then=resumed(), deep=True),
    Snippet(
        "docs/pytorch.md",
        "export ACCELERATE_USE_CPU",
        then=resumed("out/accelerate"),
        deep=True,
    ),
    Snippet("docs/pytorch.md", "engine.save_checkpoint", test=DEEPSPEED),
    Snippet("docs/report.md", "zephon report out/ledger -o", given=_ledgers, deep=True),
    Snippet("docs/report.md", '{"until"', then=_page_of_steps),
    Snippet("docs/runners.md", "def first_words", script=(RUNNERS_BEFORE, RUNNERS_AFTER)),
    Snippet(
        "docs/runners.md",
        "pipeline = Pipeline(source).options(\n",
        put={"10.0.0.1:6379": "ADDRESS", "parallelism=32": "parallelism=2"},
        why="the cluster is on this machine",
        test=RAY,
    ),
    Snippet(
        "docs/runners.md",
        "from torchdata",
        given=lambda place: place.names.update(pipeline=place.names["build"]()),
        then=_stateful,
        put={"in loader:": "in islice(loader, 2):"},
        why="it would go on for ever",
    ),
    Snippet(
        "docs/schedules.md",
        "[[sources]]",
        given=all_of(data("web", "code", "math"), tokenizer("tokenizer")),
        then=gives_batch("canonical_replicas = 2", seq_len=8192, microbatch_size=1, global_batch=128),
    ),
    Snippet("docs/schedules.md", "continue_from", given=recipe(SOURCES, "first.toml"), then=_taken_over),
    Snippet("docs/start.md", "python3 -m venv", put={"/path/to/": ""}, why="where they are", test=PACKAGES),
    Snippet("docs/start.md", "# recipe.toml", then=gives_batch()),
    Snippet("docs/start.md", "pip install", put={"/path/to/": "", **UV}, why=SHARED, test=PACKAGES),
    Snippet("docs/writing-recipes.md", "# mixed.toml", then=gives_batch()),
    Snippet("docs/writing-recipes.md", "zephon plan", then=prints("global batches"), deep=True),
    Snippet(
        "README.md",
        "make demo    # set up",
        given=project,
        put={"make test": "make --dry-run test"},
        why="it would run all tests",
        deep=True,
    ),
    Snippet("README.md", "pip install", put=UV, why=SHARED, test=PACKAGES),
    Snippet(
        "README.md",
        "from zephon import Pipeline",
        given=_front,
        then=_front_batches,
        put={"in pipeline:": "in islice(pipeline, 2):"},
        why="it would go on for ever",
    ),
    Snippet(
        "README.md",
        "seed = 42",
        given=all_of(data("web", "code"), tokenizer("tokenizer")),
        then=gives_batch(),
    ),
    Snippet("README.md", "def clean(row)", given=_operators, then=_operators_batch),
    Snippet(
        "README.md",
        "state = pipeline.checkpoint()",
        given=_with_states,
        then=_moved,
        put={"120_000": "120", "5_000, 5_200": "500, 520"},
        why="as many steps are read",
    ),
    Snippet(
        "README.md",
        "zephon inspect PATH",
        given=_command,
        put={"RECIPE": "recipe.toml"},
        why="which files are recipes is told by their endings",
        deep=True,
    ),
    Snippet("README.md", "from torchtitan_zephon", given=_titan_config, then=titan_batch()),
    Snippet("README.md", "make demo\nexport ZEPHON_RECIPE", then=resumed(), deep=True),
    Snippet(
        "README.md",
        "make demo\nexport OMP_NUM_THREADS",
        then=resumed(ledger="{}-ledger"),
        deep=True,
    ),
    Snippet(
        "megatron-zephon/README.md",
        "torchrun --nproc_per_node=8 -m megatron_zephon.pretrain_gpt_zephon --zephon-data-config",
        given=_launched,
        then=prints("--zephon-data-config"),
        put={"nproc_per_node=8": "nproc_per_node=1", "...": "--help"},
        why=GPUS,
        deep=True,
    ),
    Snippet("megatron-zephon/README.md", "git clone", put=CLONED, why=SHARED, test=PACKAGES),
    Snippet("megatron-zephon/README.md", "make demo", then=resumed(ledger="{}-ledger"), deep=True),
    Snippet(
        "megatron-zephon/README.md",
        "torchrun --nproc_per_node=8 -m megatron_zephon.pretrain_gpt_zephon $DATA",
        given=lambda place: (place.setenv("DATA", ""), place.setenv("MODEL", "--help")),
        then=_helped,
        put={"nproc_per_node=8": "nproc_per_node=1"},
        why=GPUS,
        deep=True,
    ),
    Snippet(
        "megatron-zephon/README.md",
        "from megatron_zephon import zephon_train",
        script=(MEGATRON_BEFORE, ""),
        then=prints("iteration        2/       2"),
        deep=True,
    ),
    Snippet("megatron-zephon/README.md", "python -m megatron_zephon.blend", given=_indexed, then=_blended),
    Snippet("megatron-zephon/README.md", "from megatron_zephon.vlm", given=_vlm, then=_vlm_batch),
    tests_of("megatron-zephon/README.md"),
    Snippet(
        "torchtitan-zephon/README.md",
        "from torchtitan_zephon import ZephonDataLoader\n",
        given=_titan_config,
        then=titan_batch(),
    ),
    Snippet("torchtitan-zephon/README.md", "git clone", put=CLONED, why=SHARED, test=PACKAGES),
    Snippet("torchtitan-zephon/README.md", "make demo", given=without_data, then=resumed(), deep=True),
    Snippet(
        "torchtitan-zephon/README.md",
        "# my_configs.py",
        given=usual("tokenizer"),
        then=_my_config,
    ),
    Snippet("torchtitan-zephon/README.md", "from torchtitan_zephon import Source", then=titan_batch()),
    Snippet(
        "torchtitan-zephon/README.md",
        "from torchtitan.models.muse_glimmer",
        given=_titan_images,
        then=titan_batch(tokenizer_of=_multi_modal_tokenizer, folder="my-tokenizer", seq_len=256, batch=4),
    ),
    Snippet(
        "torchtitan-zephon/README.md",
        "config.validator.dataloader",
        then=titan_batch("validator.dataloader"),
    ),
    tests_of("torchtitan-zephon/README.md"),
    Snippet(
        "zephon-core/README.md",
        "pip install",
        put={"pip install": "uv pip install --find-links dist"},
        why="no index has the packages yet",
        test=PACKAGES,
    ),
    Snippet("zephon-core/README.md", "import json\nfrom pathlib", then=asserts),
]
