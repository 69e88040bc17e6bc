"""Rows of text and images as they lie in files: every layout gives the same documents."""

import json
import tarfile
from io import BytesIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.vision_data import file_of, image_tokenizer, picture
from zephon import DataError, DataRecipe, Pipeline
from zephon.vision.geometry import VisionSettings

KINDS = ["jpg", "jpeg", "png", "webp"]
FILES = [file_of(picture(64, 32 * (1 + n), seed=n), kind) for n, kind in enumerate(["JPEG", "JPEG", "PNG", "WEBP"])]
TEXTS = [f"picture {n}" for n in range(4)]
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return image_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def run(n):
    return "<|vision_start|>" + "<|image_pad|>" * 2 * (n + 1) + "<|vision_end|>"


PAIRS = [f"{run(n)}{text}<|eos|>" for n, text in enumerate(TEXTS)]


def documents_of(folder, tokenizer, **keys):
    """The text of each row in order, with its images as runs of placeholders."""
    source = {"name": "data", "path": str(folder), "special_tokens": "eos", **keys}
    order = {"shuffle_shards": False, "shuffle_within_shard": False, "shuffle_after_pack": False, "repeat": False}
    recipe = DataRecipe.from_dict({"documents": "images", "sources": [source], "max_documents_per_record": 1, **order})
    pipeline = Pipeline.from_recipe(
        recipe,
        tokenizer=tokenizer,
        seq_len=64,
        microbatch_size=1,
        runner="inline",
        canonical_replicas=1,
        drop_last=False,
        vision=VisionSettings(min_pixels=1),
        io_options={"cache": {"enabled": False}},
    )
    found = {}
    for batch in pipeline:
        (place,) = batch.provenance().select(["shard", "row"]).to_pylist()
        row = place["shard"], place["row"]
        found[row] = pipeline.compiled.tokenizer.decode(batch.tokens[0, : batch.lengths[0]])
        assert (batch.to_training()["grid_thw"].prod(dim=1).sum()) // 4 == found[row].count("<|image_pad|>")
    pipeline.close()
    return [found[row] for row in sorted(found)]


def write_tar(path, samples):
    with tarfile.open(path, "w") as archive:
        for n, sample in enumerate(samples):
            for extension, data in sample:
                member = tarfile.TarInfo(f"{n:05}.{extension}")
                member.size = len(data)
                archive.addfile(member, BytesIO(data))


def test_tar_archives_of_mixed_kinds_with_members_in_any_order(tmp_path, tokenizer):
    samples = [[(kind, file), ("txt", text.encode())] for kind, file, text in zip(KINDS, FILES, TEXTS, strict=True)]
    write_tar(tmp_path / "a.tar", samples[:1])
    write_tar(tmp_path / "b.tar", [sample[::-1] for sample in samples[1:]])
    found = documents_of(tmp_path / "*.tar", tokenizer)
    assert sorted(found) == sorted(PAIRS)  # the second archive has kinds that the first lacks


def test_captions_in_the_json_of_tar_archives(tmp_path, tokenizer):
    samples = [
        [("json", json.dumps({"caption": text}).encode()), ("jpg", file)]
        for file, text in zip(FILES[:2], TEXTS, strict=False)
    ]
    write_tar(tmp_path / "a.tar", samples)
    assert documents_of(tmp_path / "a.tar", tokenizer, text_field="json.caption") == PAIRS[:2]


@pytest.mark.parametrize("layout", ["struct", "list", "binary"])
def test_columns_of_parquet(tmp_path, tokenizer, layout):
    kind, values = {
        "struct": (IMAGE, [{"bytes": file, "path": "x"} for file in FILES]),
        "list": (pa.list_(IMAGE), [[{"bytes": file, "path": None}] for file in FILES]),
        "binary": (pa.binary(), FILES),
    }[layout]
    pq.write_table(pa.table({"photo": pa.array(values, kind), "title": TEXTS}), tmp_path / "a.parquet")
    keys = {"images_field": "photo", "text_field": "title"}
    assert documents_of(tmp_path / "a.parquet", tokenizer, **keys) == PAIRS


def test_lists_of_texts_and_images_in_the_json_of_tar_archives(tmp_path, tokenizer):
    (tmp_path / "media").mkdir()
    for n, file in enumerate(FILES):
        (tmp_path / "media" / f"{n}.jpg").write_bytes(file)
    pages = [
        {"texts": ["one", None, "two"], "images": [None, "0.jpg", None]},
        {"texts": [None, "three"], "images": [{"path": "1.jpg"}, None]},
        {"texts": ["four"], "images": [None]},
    ]
    write_tar(tmp_path / "a.tar", [[("json", json.dumps(page).encode())] for page in pages])
    keys = {"text_field": "json.texts", "images_field": "json.images", "media_root": str(tmp_path / "media")}
    expected = [f"one{run(0)}two<|eos|>", f"{run(1)}three<|eos|>", "four<|eos|>"]
    assert documents_of(tmp_path / "a.tar", tokenizer, **keys) == expected
    lists = [{"texts": ["one", "two"]}, {"texts": [None, "one"]}]
    write_tar(tmp_path / "b.tar", [[("json", json.dumps(each).encode()), ("jpg", FILES[0])] for each in lists])
    with pytest.raises(DataError, match="2 texts and 1 image"):
        documents_of(tmp_path / "b.tar", tokenizer, text_field="json.texts")


def test_json_lines_with_paths_below_a_folder(tmp_path, tokenizer):
    (tmp_path / "media" / "x").mkdir(parents=True)
    for n, file in enumerate(FILES):
        (tmp_path / "media" / "x" / f"{n}.jpg").write_bytes(file)
    rows = [{"image": f"x/{n}.jpg", "text": text} for n, text in enumerate(TEXTS)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"media_root": str(tmp_path / "media")}
    assert documents_of(tmp_path / "pairs.jsonl", tokenizer, **keys) == PAIRS
    pages = [
        {"texts": ["one", None, "two"], "images": [None, "x/0.jpg", None]},
        {"texts": [None, "<three>"], "images": [{"path": "x/1.jpg"}, None]},
    ]
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pages))
    shown = [f"one{run(0)}two<|eos|>", f"{run(1)}<three><|eos|>"]
    assert documents_of(tmp_path / "pages.jsonl", tokenizer, **keys) == shown
    info = [{"image_name": f"x/{n}.jpg", "matched_text_index": at} for n, at in [(1, 1), (0, 0)]]
    (tmp_path / "mmc4.jsonl").write_text(json.dumps({"text_list": ["one", "two"], "image_info": info}) + "\n")
    assert documents_of(tmp_path / "mmc4.jsonl", tokenizer, **keys) == [f"{run(0)}one{run(1)}two<|eos|>"]


@pytest.mark.parametrize("kind", ["tar", "store", "file"])
def test_media_may_lie_in_an_archive_or_a_store(tmp_path, tokenizer, kind, monkeypatch):
    """The same documents, of pairs and of conversations; what is missing, or outside, is a row that cannot be used."""
    root = {"tar": "media.tar", "store": "memory://test-media", "file": f"file://{tmp_path}/media"}[kind]
    names = [f"x/{n}.jpg" for n in range(4)]
    if kind == "tar":
        with tarfile.open(tmp_path / "media.tar", "w") as archive:
            for name, file in zip(names, FILES, strict=True):
                member = tarfile.TarInfo(name)
                member.size = len(file)
                archive.addfile(member, BytesIO(file))
    for name, file in zip(names, FILES, strict=True):
        if kind == "store":
            fsspec.filesystem("memory").pipe(f"/test-media/{name}", file)
        elif kind == "file":
            (tmp_path / "media" / "x").mkdir(parents=True, exist_ok=True)
            (tmp_path / "media" / name).write_bytes(file)
    rows = [{"image": name, "text": text} for name, text in zip(names, TEXTS, strict=True)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    assert documents_of(tmp_path / "pairs.jsonl", tokenizer, media_root=root) == PAIRS
    asks = [{"type": "image", "path": names[1]}, {"type": "text", "text": "?"}]
    talk = [{"role": "user", "content": asks}, {"role": "assistant", "content": "a thing"}]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    template = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    template += "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}"
    (tmp_path / "template.jinja").write_text(template + "{% endif %}{% endfor %}{% endif %}{% endfor %}")
    keys = {"documents": "chat", "images_field": "auto", "chat_template": str(tmp_path / "template.jinja")}
    keys |= {"chat_loss": "all", "media_root": root}
    assert documents_of(tmp_path / "talks.jsonl", tokenizer, **keys)[0].startswith(f"{run(1)}?a thing")
    for bad in ("x/none.jpg", "../pairs.jsonl", "https://example.com/a.jpg"):
        (tmp_path / "bad.jsonl").write_text(json.dumps({"image": bad, "text": "a"}) + "\n")
        with pytest.raises(DataError, match=r"cannot use any of the 1 rows"):
            documents_of(tmp_path / "bad.jsonl", tokenizer, media_root=root)


def test_blocks_of_rows_that_name_files_are_as_large_as_their_files(tmp_path, tokenizer):
    """A row of a hundred bytes may name a picture of a megabyte."""
    (tmp_path / "media").mkdir()
    large = file_of(picture(640, 480), "PNG")
    (tmp_path / "media" / "a.png").write_bytes(large)
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({"image": "a.png", "text": "x"}) + "\n" for _ in range(30))
    )
    source = {"name": "data", "path": str(tmp_path / "pairs.jsonl"), "media_root": str(tmp_path / "media")}
    recipe = DataRecipe.from_dict({"documents": "images", "sources": [source], "canonical_replicas": 1})
    pipeline = Pipeline.from_recipe(
        recipe, tokenizer=tokenizer, seq_len=512, microbatch_size=1, vision=VisionSettings()
    )
    plan = pipeline.compiled.plan
    assert len(large) < plan.row_bytes[0] < len(large) + 1000
    assert plan.record_bytes > len(large)


def test_media_may_move_and_are_not_in_the_fingerprint(tmp_path, tokenizer):
    """A restore does not notice files that have changed; digests do."""
    (tmp_path / "media").mkdir()
    rows = [{"image": f"{n}.jpg", "text": text} for n, text in enumerate(TEXTS)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for n, file in enumerate(FILES):
        (tmp_path / "media" / f"{n}.jpg").write_bytes(file)

    def pipeline(root):
        source = {"name": "data", "path": str(tmp_path / "pairs.jsonl"), "media_root": str(tmp_path / root)}
        recipe = DataRecipe.from_dict({"documents": "images", "sources": [source], "canonical_replicas": 1})
        options = {"seq_len": 64, "microbatch_size": 4, "runner": "inline", "vision": VisionSettings(min_pixels=1)}
        return Pipeline.from_recipe(recipe, tokenizer=tokenizer, **options)

    one = pipeline("media")
    batches = iter(one)
    next(batches)
    state, expected = one.checkpoint(), next(batches).digests
    (tmp_path / "media").rename(tmp_path / "moved")
    moved = pipeline("moved")
    moved.restore(state)
    assert next(iter(moved)).digests == expected
    (tmp_path / "moved" / "0.jpg").write_bytes(file_of(picture(64, 32, seed=99)))
    changed = pipeline("moved")
    changed.restore(state)
    assert next(iter(changed)).digests != expected
    for each in (one, moved, changed):
        each.close()
