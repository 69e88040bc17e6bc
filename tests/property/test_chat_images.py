"""Conversations with images in the mix beside text: the same global batches on any topology, after a resume."""

import json

import pytest

from support import step_digests
from support.vision_data import file_of, image_tokenizer, picture
from zephon import DataRecipe, Pipeline
from zephon.vision.geometry import VisionSettings

BATCH = 4
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talks")
    tokenizer = image_tokenizer(folder / "tokenizer", "<|im_start|>", "<|im_end|>")
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "media").mkdir()
    for n in range(12):
        (folder / "media" / f"{n}.jpg").write_bytes(file_of(picture(20 + 9 * n, 50, seed=n)))
    rows = []
    for n in range(40):
        images = [f"{(n + i) % 12}.jpg" for i in range(n % 3)]
        said = "<image>" * len(images) + f"\nwhat is picture {n}?"
        talk = [{"from": "human", "value": said}, {"from": "gpt", "value": "a thing " * (n % 7 + 1)}]
        rows.append({"conversations": talk, **({"image": images} if images else {})})
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": "word " * (n % 40)}) + "\n" for n in range(40)))
    talks = {"name": "talks", "path": "talks.jsonl", "documents": "chat", "images_field": "auto"}
    recipe = DataRecipe.from_dict(
        {
            "sources": [{**talks, "media_root": "media"}, {"name": "text", "path": "text.jsonl"}],
            "max_images": 3,
            "chunk_size": 16,
            "canonical_replicas": 4,
            "cache_dir": "cache",
        },
        base=folder,
    )
    return recipe, tokenizer


def groups_of(data, dp, **options):
    recipe, tokenizer = data
    return [
        Pipeline.from_recipe(
            recipe,
            tokenizer=tokenizer,
            seq_len=128,
            microbatch_size=1,
            dp_degree=dp,
            dp_group_id=group,
            global_batch=BATCH,
            vision=VisionSettings(patch_size=8, min_pixels=256, max_pixels=4096),
            **options,
        )
        for group in range(dp)
    ]


def test_batches_are_the_same_on_any_topology_and_after_a_resume(data):
    (whole,) = groups_of(data, 1, runner="inline")
    expected = step_digests([whole], 6, BATCH)
    groups = groups_of(data, 2)
    assert step_digests(groups, 3, BATCH) == expected[:3]
    states = [each.checkpoint() for each in groups]
    (resumed,) = groups_of(data, 1, runner="process")
    assert step_digests([resumed.restore(states)], 3, BATCH) == expected[3:]
    images = [image for batch in [next(iter(whole)) for _ in range(9)] for image in batch.provenance()["images"]]
    assert any(len(each) for each in images)
    for each in (whole, resumed, *groups):
        each.close()
