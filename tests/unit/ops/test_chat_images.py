"""Conversations with images as tokens, as the processor of transformers makes them."""

import json
from io import BytesIO

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image as Pillow

from support.vision_data import file_of, image_tokenizer, picture
from zephon.errors import PipelineError
from zephon.ops.chat import TokenizeChat
from zephon.ops.rows import Rows
from zephon.tokenizer.tokenizer import load_tokenizer
from zephon.vision.geometry import VisionSettings

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
A, B = (file_of(picture(width, height, seed=width)) for width, height in [(90, 60), (200, 130)])
VISION = VisionSettings(patch_size=14, min_pixels=28 * 28, max_pixels=14 * 14 * 64)


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


def test_tokens_are_those_of_the_processor_of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    size = {"shortest_edge": VISION.min_pixels, "longest_edge": VISION.max_pixels}
    processor = transformers.Qwen2VLImageProcessor(patch_size=14, merge_size=2, size=size)
    table = {"messages": [messages for messages, _ in TALKS], "images": [images for _, images in TALKS]}
    found, documents, _, _ = encoded(folder, table)
    for (messages, images), tokens in zip(TALKS, found, strict=True):
        text = tokenizer.apply_chat_template(
            [{**m, "content": [{k: v for k, v in p.items() if v is not None} for p in m["content"]]} for m in messages],
            chat_template=TEMPLATE,
            tokenize=False,
        )
        pictures = [Pillow.open(BytesIO(file)) for file in images]
        grids = processor(images=pictures, return_tensors="pt")["image_grid_thw"].tolist() if images else []
        for _, high, wide in grids:  # as Qwen2VLProcessor does it
            text = text.replace("<|image_pad|>", "<|placeholder|>" * (high * wide // 4), 1)
        expected = tokenizer(text.replace("<|placeholder|>", "<|image_pad|>"), add_special_tokens=False)["input_ids"]
        assert tokens.tolist() == expected
    assert documents.images.offsets.tolist() == [0, 3, 3]
    assert documents.images.files.to_pylist() == [A, B, A]
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
