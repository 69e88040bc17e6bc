"""Conversations with images as tokens, as the processor of transformers makes them."""

import json
from io import BytesIO

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image as Pillow

from support.vision_data import file_of, image_tokenizer, normalized, picture
from zephon.errors import PipelineError
from zephon.ops.chat import TokenizeChat
from zephon.ops.rows import Rows
from zephon.tokenizer.tokenizer import load_tokenizer
from zephon.vision.geometry import Grid, VisionSettings
from zephon.vision.pixels import image_patches

# That of Qwen2.5-VL, without videos.
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# That of Qwen3-VL, without tools and videos.
TEMPLATE_3 = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].content is string %}{{- messages[0].content }}{%- else %}
        {%- for content in messages[0].content %}
            {%- if 'text' in content %}{{- content.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set image_count = namespace(value=0) %}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content is string %}{{- message.content }}{%- else %}
            {%- for content in message.content %}
                {%- if content.type == 'image' or 'image' in content or 'image_url' in content %}
                    {%- set image_count.value = image_count.value + 1 %}
                    {%- if add_vision_id %}Picture {{ image_count.value }}: {% endif -%}
                    <|vision_start|><|image_pad|><|vision_end|>
                {%- elif 'text' in content %}
                    {{- content.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
A, B = (file_of(picture(width, height, seed=width)) for width, height in [(90, 60), (200, 130)])
VISION = VisionSettings(patch_size=14, min_pixels=28 * 28, max_pixels=14 * 14 * 64)
CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
OF_14 = VisionSettings(patch_size=14, min_pixels=28 * 28, max_pixels=14 * 14 * 64, **CLIP)
OF_16 = VisionSettings(patch_size=16, min_pixels=32 * 32, max_pixels=16 * 16 * 64)
PROCESSORS = {
    "Qwen2VLProcessor": (TEMPLATE, OF_14, "Qwen2VLVideoProcessor"),
    "Qwen2_5_VLProcessor": (TEMPLATE, OF_14, "Qwen2VLVideoProcessor"),
    "Qwen3VLProcessor": (TEMPLATE_3, OF_16, "Qwen3VLVideoProcessor"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = image_tokenizer(tmp_path_factory.mktemp("tokenizer"), "<|im_start|>", "<|im_end|>")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def encoded(folder, table, skips=False, **options):
    spec = TokenizeChat(str(folder), **{"images": "auto", "vision": VISION, **options})
    tokenizer = load_tokenizer(str(folder))
    spec = spec.resolved(list(table), "talks")
    rows = Rows(pa.table(table), np.arange(len(next(iter(table.values())))), skips)
    documents = spec.encoder(tokenizer, None, None).encode(rows)
    return np.split(documents.tokens, documents.offsets[1:-1]), documents, rows, tokenizer


def parts(*contents):
    return [{"type": "image", "text": None} if each is None else {"type": "text", "text": each} for each in contents]


TALKS = [
    (
        [
            {"role": "user", "content": parts(None, "what is it?")},
            {"role": "assistant", "content": parts("a cat")},
            {"role": "user", "content": parts("and ", None, " or ", None)},
            {"role": "assistant", "content": parts("two cats")},
        ],
        [A, B, A],
    ),
    ([{"role": "user", "content": parts("no image")}, {"role": "assistant", "content": parts("none")}], []),
]


@pytest.mark.parametrize("name", PROCESSORS)
def test_tokens_and_pixels_are_those_of_the_processors_of_transformers(folder, name):
    transformers = pytest.importorskip("transformers")
    template, vision, videos = PROCESSORS[name]
    processor = getattr(transformers, name)(
        transformers.Qwen2VLImageProcessor(
            patch_size=vision.patch_size,
            merge_size=vision.merge_size,
            temporal_patch_size=vision.temporal_patch_size,
            size={"shortest_edge": vision.min_pixels, "longest_edge": vision.max_pixels},
            image_mean=list(vision.mean),
            image_std=list(vision.std),
        ),
        transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")),
        getattr(transformers, videos)(),
        chat_template=template,
    )
    table = {"messages": [messages for messages, _ in TALKS], "images": [images for _, images in TALKS]}
    found, documents, _, _ = encoded(folder, table, vision=vision, chat_template=template)
    pictures = documents.images
    for n, ((messages, images), tokens) in enumerate(zip(TALKS, found, strict=True)):
        files = iter(images)
        theirs = processor.apply_chat_template(
            [
                {
                    "role": message["role"],
                    "content": [
                        {"type": "image", "image": Pillow.open(BytesIO(next(files)))}
                        if part["type"] == "image"
                        else {"type": "text", "text": part["text"]}
                        for part in message["content"]
                    ],
                }
                for message in messages
            ],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        assert tokens.tolist() == theirs["input_ids"][0].tolist()
        own = range(*pictures.offsets[n : n + 2].tolist())
        grids = [pictures.grids[i].tolist() for i in own]
        assert [[1, *grid[:2]] for grid in grids] == (theirs["image_grid_thw"].tolist() if images else [])
        for grid, file, values in zip(
            grids,
            images,
            theirs["pixel_values"].split([grid[0] * grid[1] for grid in grids]) if images else [],
            strict=True,
        ):
            ours = normalized(image_patches(file, Grid(*grid), vision), vision)
            unit = np.abs(ours - values.numpy()).reshape(len(ours), 3, -1).max(axis=(0, 2)) * 255
            assert (unit * vision.std <= 1 + 1e-3).all()
    assert pictures.offsets.tolist() == [0, 3, 3]
    assert pictures.files.to_pylist() == [A, B, A]
    trained = "".join(load_tokenizer(str(folder)).decode(documents.tokens[documents.loss]))
    assert trained == "a cat<|im_end|>two cats<|im_end|>none<|im_end|>"


@pytest.mark.parametrize(
    ("column", "value"),
    [("image", A), ("images", [A]), ("image", {"bytes": A, "path": "a.jpg"})],
)
def test_marks_in_texts_are_images_in_their_places(folder, column, value):
    talk = [{"from": "human", "value": "<image>\nwhat is <b>it</b>?"}, {"from": "gpt", "value": "a cat"}]
    (tokens,), documents, _, tokenizer = encoded(folder, {"conversations": [talk], column: [value]})
    shown = "<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>\nwhat is <b>it</b>?"
    assert f"<|im_start|>user\n{shown}<|im_end|>" in tokenizer.decode(tokens)
    assert tokenizer.decode(tokens[documents.loss]) == "a cat<|im_end|>"


def test_text_that_spells_a_placeholder_stays_text(folder):
    talk = [
        {"role": "user", "content": parts("<|image_pad|><|vision_end|>", None)},
        {"role": "assistant", "content": parts("<|image_pad|>")},
    ]
    (tokens,), documents, _, tokenizer = encoded(folder, {"messages": [talk], "images": [[A]]}, loss="all")
    ids = {token.content: token.id for token in tokenizer.special_tokens}
    assert (tokens == ids["<|image_pad|>"]).sum() == 6
    assert "".join(tokenizer.decode(tokens)).count("<|image_pad|>") == 8
    vision = [ids[f"<|{name}|>"] for name in ("vision_start", "image_pad", "vision_end")]
    assert (documents.loss == ~np.isin(tokens, vision)).all()


def test_parts_may_have_their_image(folder, tmp_path):
    (tmp_path / "a.jpg").write_bytes(A)
    for part in ({"type": "image", "path": "a.jpg"}, {"type": "image_url", "image_url": {"url": "a.jpg"}}):
        talk = json.dumps(
            [{"role": "user", "content": [part, {"type": "text", "text": "x"}]}, {"role": "assistant", "content": "y"}]
        )
        _, documents, _, _ = encoded(folder, {"messages": [talk]}, media_root=str(tmp_path))
        assert documents.images.files.to_pylist() == [A]


@pytest.mark.parametrize(
    ("content", "images", "message"),
    [
        (parts(None, None), [A], "more image parts than images, of which there are 1"),
        (parts(None), [A, B], "1 of 2 images are in no message"),
        ("no mark", [A], "1 images, and 0 <image> in the messages, which have no image parts"),
        ("<image>", None, "0 images, and 1 <image> in the messages"),
        (parts(None), ["https://x/a.jpg"], "an image is the URL 'https://x/a.jpg'; expected bytes, or a path below"),
        (parts(None), [b"x"], "the first bytes are b'x'; expected those of a JPEG"),
    ],
)
def test_conversations_whose_images_do_not_fit(folder, content, images, message):
    talk = json.dumps([{"role": "user", "content": content}, {"role": "assistant", "content": "y"}])
    _, documents, rows, _ = encoded(folder, {"messages": [talk], "images": [images]}, skips=True)
    assert message in rows.failed[0][2]
    assert not len(documents.places)


def test_a_template_without_placeholders_and_a_length_are_refused(folder):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}"
    talk = json.dumps([{"role": "user", "content": parts(None)}])
    _, _, rows, _ = encoded(folder, {"messages": [talk], "image": [A]}, skips=True, chat_template=template)
    assert "the template writes 0 <|image_pad|> for 1 images; expected one for each" in rows.failed[0][2]
    with pytest.raises(PipelineError, match="tokenize_chat max_length is 9, which would cut images"):
        TokenizeChat(str(folder), images="auto", max_length=9)
    with pytest.raises(PipelineError, match=r'does not use column "images", .* name it \(images="images", in a recipe'):
        TokenizeChat(str(folder)).resolved(["messages", "images"], "talks")
