"""Any mix of sources of images and of text: equal ids, grids, files and pixels on any topology, after any resumes."""

import json
import random
import tarfile
from io import BytesIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import step_digests
from support.examples import few
from support.vision_data import file_of, image_tokenizer, picture
from zephon import DataError, DataRecipe, Pipeline, merge_checkpoints
from zephon.columns.faults import read_report
from zephon.config.topology import divisors
from zephon.engine import pixels
from zephon.vision.geometry import VisionSettings

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
VISIONS = {
    "pixels": VisionSettings(patch_size=8, min_pixels=256, max_pixels=4096),
    "patches": VisionSettings(
        patch_size=7, temporal_patch_size=1, patch_order="raster", budget="patches", max_patches=40, mean=(0.4,) * 3
    ),
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)


def some_files():
    """Sound images of every format and of several sizes, then some that cannot be decoded, with sound headers."""
    choose = random.Random(0)
    kinds = [
        ("JPEG", "RGB"),
        ("JPEG", "CMYK"),
        ("JPEG", "L"),
        ("PNG", "RGBA"),
        ("PNG", "P"),
        ("WEBP", "RGB"),
        ("GIF", "P"),
    ]
    sound = [
        file_of(picture(choose.randint(5, 90), choose.randint(5, 90), mode, seed=n), kind)
        for n, (kind, mode) in enumerate(kinds * 3)
    ]
    turned = picture(70, 30)
    turned.getexif()[0x0112] = 6
    sound.append(file_of(turned, exif=turned.getexif()))
    broken = [file_of(picture(80, 60, seed=n), kind) for n, kind in enumerate(["JPEG", "PNG", "WEBP"])]
    return sound, [file[: len(file) * 2 // 3] for file in broken]


SOUND, BROKEN = some_files()


def table(path, rows, kind, layout):
    """Parquet with rows of (texts, images), which become one text and one image, or lists."""
    columns = zip(*rows, strict=True)
    texts, images = ([list(each) for each in column] for column in columns)
    wrapped = [[None if file is None else {"bytes": file, "path": None} for file in each] for each in images]
    values = {
        "pairs": ([each[0] for each in texts], pa.array([each[0] for each in wrapped], IMAGE)),
        "binary": ([each[0] for each in texts], pa.array([each[0] for each in images], pa.binary())),
        "pages": (texts, pa.array(wrapped, pa.list_(IMAGE))),
        "marks": (["<image>".join(["", *map(str, each)]) for each in texts], pa.array(wrapped, pa.list_(IMAGE))),
    }
    pq.write_table(pa.table({"text": values[layout][0], kind: values[layout][1]}), path, row_group_size=7)


def write_source(folder, name, form, rows):
    """A source of rows of (texts, images, a list of the same length each); its keys in the recipe."""
    keys = {"name": name, "documents": "images"}
    if form in ("pairs", "binary", "marks", "pages"):
        path = folder / f"{name}.parquet"
        table(path, rows, "images", form)
    elif form == "tar":
        path = folder / f"{name}.tar"
        with tarfile.open(path, "w") as archive:
            for n, (texts, images) in enumerate(rows):
                kind = {b"\xff\xd8": "jpg", b"\x89P": "png", b"RI": "webp", b"GI": "gif"}[images[0][:2]]
                members = [(kind, images[0]), ("txt", texts[0].encode())]
                for extension, data in members[:: 1 if n % 2 else -1]:
                    member = tarfile.TarInfo(f"{n:05}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, BytesIO(data))
    else:
        path, media = folder / f"{name}.jsonl", folder / f"{name}-media"
        media.mkdir()
        lines = []
        for n, (texts, images) in enumerate(rows):
            for i, image in enumerate(images):
                (media / f"{n}-{i}.jpg").write_bytes(image)  # whatever it is
            paths = [f"{n}-{i}.jpg" for i in range(len(images))]
            if form == "paths":
                lines.append({"texts": [*texts, "the end"], "images": [*paths, None]})
            else:
                said = "<image>" * len(images) + f"what is {n}?"
                talk = [{"from": "human", "value": said}, {"from": "gpt", "value": " ".join(texts)}]
                lines.append({"conversations": talk, "image": paths})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        keys |= {"media_root": str(media)}
        keys |= {"documents": "chat", "images_field": "image"} if form == "chat" else {}
    return {**keys, "path": str(path)}


FORMS = ("pairs", "binary", "marks", "pages", "tar", "paths", "chat")


@st.composite
def runs(draw, broken=0.0):
    """Sources, and what decides the records of a run; `broken` is the share of images that cannot be decoded."""
    seed = draw(st.integers(0, 9999))
    lanes = draw(st.sampled_from([1, 2, 4]))
    return {
        "seed": seed,
        "broken": broken,
        "forms": draw(st.lists(st.sampled_from(FORMS), min_size=1, max_size=3)),
        "texts": draw(st.integers(0, 2)),
        "rows": draw(st.integers(3, 25)),
        "lanes": lanes,
        "batch": lanes * draw(st.integers(1, 3)),
        "vision": draw(st.sampled_from(sorted(VISIONS))),
        "recipe": {
            "seed": seed,
            "chunk_size": draw(st.integers(3, 30)),
            "flush_every_k_chunks": draw(st.integers(1, 3)),
            "shuffle_buffer_size": draw(st.sampled_from([1, 7, 32])),
            "max_images": draw(st.sampled_from([None, 1, 3])),
            "max_patches": draw(st.sampled_from([None, 130])),
            "always_image": draw(st.booleans()),
            **draw(
                st.sampled_from(
                    [{"pack_algorithm": "best_fit"}, {"pack_algorithm": "first_fit"}, {"pack_mode": "sequences"}]
                )
            ),
        },
    }


def write(folder, run):
    """The recipe of a run with its files."""
    choose = random.Random(run["seed"])

    def image():
        return choose.choice(BROKEN if choose.random() < run["broken"] else SOUND)

    def words():
        return "<|image_pad|> some words " * choose.randint(1, 3)

    sources = []
    for s, form in enumerate(run["forms"]):
        rows = []
        for _ in range(run["rows"]):
            # One row at least fits any record.
            count = choose.randint(1, 3) if form in ("marks", "pages", "paths", "chat") and rows else 1
            rows.append(([words() for _ in range(count)], [image() for _ in range(count)]))
        sources.append(write_source(folder, f"images-{s}", form, rows))
    for s in range(run["texts"]):
        path = folder / f"text-{s}.jsonl"
        path.write_text("".join(json.dumps({"text": words() + str(n)}) + "\n" for n in range(run["rows"])))
        sources.append({"name": f"text-{s}", "path": str(path), "documents": "text"})
    lanes = {"canonical_replicas": run["lanes"]}
    return DataRecipe.from_dict({**run["recipe"], **lanes, "sources": sources}, base=folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = image_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def build(recipe, run, tokenizer, *, groups=1, group=0, **options):
    defaults = {"runner": "inline", "microbatch_size": 1, "digest_pixels": True}
    defaults["io_options"] = {"cache": {"enabled": False}}
    return Pipeline.from_recipe(
        recipe,
        tokenizer=tokenizer,
        seq_len=128,
        dp_degree=groups,
        dp_group_id=group,
        global_batch=run["batch"],
        vision=VISIONS[run["vision"]],
        **{**defaults, **options},
    )


RUNNERS = ({"runner": "inline"}, {"runner": "threads"}, {"runner": "process"}, {"isolate": True})


def chain_of_legs(data, run, runners, legs=3):
    """Legs of a chain of resumes: steps, groups, and how each group runs."""
    for _ in range(legs):
        groups = data.draw(st.sampled_from(divisors(run["lanes"])))
        share = run["batch"] // groups
        options = [
            {
                "group": group,
                "microbatch_size": data.draw(st.sampled_from(divisors(share))),
                "prefetch_buffer_size": data.draw(st.sampled_from([1, 1 << 16, 1 << 22])),
                **data.draw(st.sampled_from(runners)),
            }
            for group in range(groups)
        ]
        yield data.draw(st.integers(1, 4)), groups, options


def check_chain(tmp_path_factory, tokenizer, run, data, runners):
    recipe = write(tmp_path_factory.mktemp("data"), run)
    policy = {"on_error": "skip", "error_budget": 1.0} if run["broken"] else {}
    legs = list(chain_of_legs(data, run, runners))
    whole = build(recipe, run, tokenizer, **policy)
    expected = step_digests([whole], sum(steps for steps, *_ in legs), run["batch"])
    found, states = [], None
    for steps, groups, options in legs:
        pipelines = [build(recipe, run, tokenizer, groups=groups, **policy, **each) for each in options]
        for pipeline in pipelines if states else ():
            pipeline.restore(states)
        found += step_digests(pipelines, steps, run["batch"])
        states = [json.loads(json.dumps(pipeline.checkpoint())) for pipeline in pipelines]
        states = [merge_checkpoints(states)] if data.draw(st.booleans()) else states
        for pipeline in pipelines:
            pipeline.close()
    assert found == expected
    assert merge_checkpoints(states)["lanes"] == whole.checkpoint()["lanes"]
    assert merge_checkpoints(states).get("images") == whole.checkpoint().get("images")
    whole.close()


@few(4)
@given(st.sampled_from([0.0, 0.3]).flatmap(runs), st.data())
def test_chains_of_resumes_on_other_topologies_give_the_same_ids_grids_files_and_pixels(
    tokenizer, tmp_path_factory, run, data
):
    check_chain(tmp_path_factory, tokenizer, run, data, RUNNERS[:2])


@pytest.mark.deep
@few(3)
@given(st.sampled_from([0.0, 0.3]).flatmap(runs), st.data())
def test_chains_of_resumes_through_processes_give_the_same_pixels(tokenizer, tmp_path_factory, run, data):
    check_chain(tmp_path_factory, tokenizer, run, data, RUNNERS)


def first_stop(pipelines, run, records):
    """The first record at which the images of a run stop it, with the error; None within so many records."""
    stops = []
    for pipeline in pipelines:
        used, stream = pipeline.cursor // len(pipelines), iter(pipeline)
        try:
            for _ in range(records // len(pipelines) - used):
                next(stream)
        except DataError as error:
            reached = pipeline.compiled.topology.sequence_numbers(pipeline.cursor // len(pipelines), 1)
            stops.append((int(reached[0]), str(error)))
    return min(stops, default=None)


@few(3)
@given(runs(broken=0.25), st.sampled_from([0.1, 0.3, 0.5]), st.data())
def test_the_budget_for_grey_images_ends_every_topology_and_resume_at_the_same_record(
    tokenizer, tmp_path_factory, run, budget, data
):
    recipe = write(tmp_path_factory.mktemp("data"), run)
    options = {"on_error": "quarantine", "error_budget": budget}
    records = 8 * run["batch"]

    def groups_of(groups, **more):
        folder = tmp_path_factory.mktemp("report")
        more |= {**options, "error_report": str(folder)}
        return [build(recipe, run, tokenizer, groups=groups, group=group, **more) for group in range(groups)], folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pixels, "JUDGED", 7)
        stops, reports = set(), []
        for groups in divisors(run["lanes"]):
            pipelines, folder = groups_of(groups, **data.draw(st.sampled_from(RUNNERS[:2])))
            stops.add(first_stop(pipelines, run, records))
            reports.append({(e["shard"], e["row"], e["reason"], e["content"]) for e in read_report(folder)})
            for pipeline in pipelines:
                pipeline.close()
        (expected,) = stops
        if expected is None:
            assert all(report == reports[0] for report in reports)
        # And where it is resumed on the way.
        middle = data.draw(st.integers(1, 7)) * run["batch"]
        before, _ = groups_of(data.draw(st.sampled_from(divisors(run["lanes"]))))
        if (stop := first_stop(before, run, middle)) is not None:
            assert stop == expected
            return
        assert expected is None or expected[0] >= middle
        after, _ = groups_of(data.draw(st.sampled_from(divisors(run["lanes"]))))
        states = [pipeline.checkpoint() for pipeline in before]
        assert first_stop([pipeline.restore(states) for pipeline in after], run, records) == expected
