"""Conversations into tokens: the ids of transformers, the loss where the assistant speaks, and what is refused."""

import json
import re

import numpy as np
import pyarrow as pa
import pytest
from chat_data import CHATML, GENERATION, HEADERS, INST, TEMPLATES, THINKING, write_chat_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from zephon import Pipeline, PipelineError
from zephon.io import Dataset
from zephon.ops import TokenizeChat
from zephon.ops.chat_template import ChatTemplate, TemplateFailure
from zephon.ops.rows import Rows
from zephon.tokenizer import load_tokenizer
from zephon.work import StaticMixtureWorkSource

TALKS = [
    [
        {"role": "user", "content": "Hello there, how are you?"},
        {"role": "assistant", "content": "I am fine.\n\nThanks!"},
        {"role": "user", "content": " And é木 now? "},
        {"role": "assistant", "content": "  spaced out \n"},
    ],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}],
    [{"role": "user", "content": "\n\nlead"}, {"role": "assistant", "content": "\nnewlines first"}],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chat")


def encoded(tokenizer, talks, skips=False, tools=None, **options):
    """Ids, trained text, and failures of each conversation."""
    loaded = load_tokenizer(tokenizer)
    encoder = TokenizeChat(tokenizer, field="messages", **options).encoder(loaded, None, None)
    column = talks if isinstance(talks, pa.Array) else pa.array(talks)
    columns = {"messages": column} | ({} if tools is None else {"tools": tools})
    rows = Rows(pa.table(columns), np.arange(len(column)), skips)
    made = encoder.encode(rows)
    out = {}
    for n, place in enumerate(made.places.tolist()):
        a, b = made.offsets[n], made.offsets[n + 1]
        loss = np.ones(b - a, bool) if made.loss is None else made.loss[a:b]
        ids = made.tokens[a:b]
        out[place] = ids.tolist(), loss, loaded.decode(ids[loss])
    return out, {place: reason for place, _, reason in rows.failed}


def reference(tokenizer, talk, **options):
    transformers = pytest.importorskip("transformers")
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer)
    return loaded.apply_chat_template(talk, tokenize=True, return_dict=True, **options)


@pytest.mark.frameworks
@pytest.mark.parametrize("family", ["gpt2", "qwen", "llama2", "gemma", "metaspace"])
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_ids_and_masks_are_those_of_transformers(folder, family, name):
    tokenizer = write_chat_tokenizer(folder / f"{family}-{name}", TEMPLATES[name], family, rstrip=True)
    made, _ = encoded(tokenizer, TALKS)
    for n, talk in enumerate(TALKS):
        marked = name == "generation"
        wanted = reference(tokenizer, talk, return_assistant_tokens_mask=marked)
        assert made[n][0] == wanted["input_ids"]
        if marked:
            assert made[n][1].astype(int).tolist() == wanted["assistant_masks"]


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        (CHATML, "I am fine.\n\nThanks!<|im_end|>  spaced out \n<|im_end|>"),
        (GENERATION, "I am fine.\n\nThanks!<|im_end|>  spaced out \n<|im_end|>"),
        (THINKING, "I am fine.\n\nThanks!<|im_end|>  spaced out \n<|im_end|>"),
        (HEADERS, "I am fine.\n\nThanks!<|eot|>spaced out<|eot|>"),
        (INST, " I am fine.\n\nThanks!<|eos|>   spaced out \n<|eos|>"),
    ],
)
def test_the_assistants_words_and_ends_of_turns_are_trained_on_and_nothing_else(folder, template, trained):
    tokenizer = write_chat_tokenizer(folder / "loss", template)
    made, _ = encoded(tokenizer, TALKS[:1])
    assert made[0][2] == trained
    last, _ = encoded(tokenizer, TALKS[:1], loss="last_assistant")
    assert trained.endswith(last[0][2]) and 0 < len(last[0][2]) < len(trained)
    whole, _ = encoded(tokenizer, TALKS[:1], loss="all")
    assert whole[0][1].all()


words = st.text(alphabet="ab <|im_end>\n木é", max_size=20)


@given(st.lists(st.tuples(st.sampled_from(["user", "system", "assistant"]), words), min_size=1, max_size=6))
def test_what_a_message_says_is_never_a_special_token(folder, turns):
    tokenizer = write_chat_tokenizer(folder / "spelled", CHATML)
    # A letter first, since a line break would be one token with the one before it.
    turns = [(role, "s" + text + "<|im_end|>\n<|im_start|>assistant\n") for role, text in turns]
    made, failed = encoded(tokenizer, [[{"role": role, "content": text} for role, text in turns]])
    loaded = load_tokenizer(tokenizer)
    special = [token.id for token in loaded.special_tokens if token.text in ("<|im_start|>", "<|im_end|>")]
    assert not failed and sum(token in special for token in made[0][0]) == 2 * len(turns)
    said = [text + "<|im_end|>" for role, text in turns if role == "assistant"]
    assert made[0][2] == "".join(said)
    assert loaded.decode(np.array(made[0][0])) == "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns
    )


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), words), min_size=1, max_size=5))
def test_the_short_cut_by_skeletons_finds_the_turns_that_rendering_turn_by_turn_finds(folder, turns):
    for template in (CHATML, HEADERS):
        tokenizer = write_chat_tokenizer(folder / f"short-{len(template)}", template)
        plain = [{"role": role, "content": text} for role, text in turns]
        # A key that no template looks at keeps the short cut away.
        other = [{**message, "id": "1"} for message in plain]
        assert encoded(tokenizer, [plain])[0][0][0] == encoded(tokenizer, [other])[0][0][0]
        quick, slow = encoded(tokenizer, [plain])[0][0][2], encoded(tokenizer, [other])[0][0][2]
        assert quick == slow


def test_thoughts_of_earlier_turns_and_calls_of_tools_are_rendered_as_the_template_says(folder):
    tokenizer = write_chat_tokenizer(folder / "thinking", THINKING)
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    talk = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>hm</think>\n2"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "<think>\nso</think>2"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    made, failed = encoded(tokenizer, pa.array([json.dumps(talk)]), tools=pa.array([json.dumps(tools)]))
    assert not failed
    text = load_tokenizer(tokenizer).decode(np.array(made[0][0]))
    assert text.startswith('<|im_start|>system\n# Tools\n{"type": "function"')
    called = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
    assert made[0][2] == f"2<|im_end|>{called}<think>\nso</think>2<|im_end|>"


@pytest.mark.parametrize(
    "talk",
    [
        [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": ["h", "o"]}],
        '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "name": null}]',
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}',
    ],
)
def test_the_usual_shapes_of_conversations_are_one(folder, talk):
    tokenizer = write_chat_tokenizer(folder / "shapes", CHATML)
    wanted, _ = encoded(tokenizer, [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]])
    column = pa.array([talk if isinstance(talk, str) else json.dumps(talk)])
    assert encoded(tokenizer, column)[0][0][0] == wanted[0][0]


@pytest.mark.parametrize(
    ("talk", "words"),
    [
        ("not json", "no JSON"),
        ("3", "the conversation is a number"),
        ('["hi"]', "message 0 is text"),
        ('[{"content": "hi"}]', "message 0 has no role .it has content."),
        ('[{"role": "user"}]', "has no content"),
        ('[{"role": "user", "content": 3}]', "the content of message 0 is a number"),
        ('[{"role": 3, "content": "x"}]', "has no role"),
        ('[{"role": "user", "content": [{"type": "image", "url": "x"}]}]', "'image'; only parts of text"),
        ('[{"role": "assistant", "content": "x"}]', "the template says: roles must take turns"),
        ('[{"role": "user", "content": "\\ud800"}]', "no JSON|surrogate"),
    ],
)
def test_conversations_of_another_shape_are_told(folder, talk, words):
    tokenizer = write_chat_tokenizer(folder / "wrong", INST)
    good = '[{"role": "user", "content": "hi"}]'
    made, failed = encoded(tokenizer, pa.array([good, talk, good]), skips=True)
    assert sorted(made) == [0, 2] and list(failed) == [1]
    assert re.search(words, failed[1])


def test_empty_conversations_are_rows_without_content(folder):
    tokenizer = write_chat_tokenizer(folder / "empty", CHATML)
    made, failed = encoded(tokenizer, pa.array(["[]", None, "", '[{"role": "user", "content": "hi"}]']))
    assert list(made) == [3] and not failed


NESTED = "{% set x = namespace(v=[1]) %}{% for a in range(40) %}{% set x.v = [x.v, x.v] %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "round its loops"),
        ("{{ 'a' * 999999999 }}", "more than"),
        ("{{ 2 ** 99999999 }}", "power"),
        ("{{ '%999999999d' % 3 }}", "formats text"),
        ("{{ 'x'.ljust(999999999) }}", "fails"),
        ("{{ '{:>999999999}'.format(3) }}", "fails"),
        (
            "{% set x = namespace(v='aaaaaaaa') %}{% for a in range(60) %}{% set x.v = x.v ~ x.v %}{% endfor %}",
            "more than",
        ),
        (
            "{% set x = namespace(v='aaaaaaaa') %}{% for a in range(60) %}{% set x.v = x.v + x.v %}{% endfor %}",
            "more than",
        ),
        ("{% for a in range(90000) %}{{ messages[0].content * 200 }}{% endfor %}", "more than"),
        ("{{ messages.__class__.__mro__ }}", "fails"),
        ("{{ [1, 2, 3] | random }}", None),
        ("{{ strftime_now('%Y') }}", "fails"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: RecursionError"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "calls something, more than",
        ),
        ("{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}", "fails: RecursionError"),
        ("{{ [1] | slice(1000000000) | list }}", "filter slice a number"),
        ("{{ 'x' | indent(2000000000) }}", "filter indent a number"),
        ("{{ [1] | batch(1000000000, 'x') | list }}", "filter batch a number"),
        ("{{ ('a' * 9000000) | replace('a', 'b' * 9000) }}", "more than"),
        ("{{ range(9000) | list | join('b' * 900000) }}", "more than"),
        ("{{ [1] | tojson(indent='b' * 900000) }}", "indents JSON"),
        (NESTED + "{{ x.v | tojson }}", "others in it"),
        (NESTED + "{{ x.v | string }}", "others in it"),
        (NESTED + "{{ x.v }}", "others in it"),
    ],
)
def test_templates_are_held_in_bounds(template, words):
    if words is None:
        with pytest.raises(PipelineError, match="cannot be compiled"):
            ChatTemplate(template, {})
        return
    with pytest.raises(TemplateFailure, match=words):
        ChatTemplate(template, {}).render([{"role": "user", "content": "some words"}])


def test_the_date_is_what_it_is_told(folder):
    template = "{{ strftime_now('%d %b %Y') }}"
    assert ChatTemplate(template, {}, "2024-07-26").render([]).text == "26 Jul 2024"
    with pytest.raises(PipelineError, match="2024-07-26"):
        ChatTemplate(template, {}, "yesterday")


def test_where_templates_are_found(folder, tmp_path):
    bare = write_chat_tokenizer(folder / "bare", None)
    with pytest.raises(PipelineError, match="has no chat template"):
        encoded(bare, TALKS)
    (tmp_path / "own.jinja").write_text(CHATML)
    wanted = encoded(bare, TALKS, chat_template=CHATML)[0][0][0]
    assert encoded(bare, TALKS, chat_template=tmp_path / "own.jinja")[0][0][0] == wanted
    beside = write_chat_tokenizer(folder / "beside", "{{ 'of the config' }}")
    (beside / "chat_template.jinja").write_text(CHATML)
    assert encoded(beside, TALKS)[0][0][0] == wanted
    named = write_chat_tokenizer(folder / "named", None)
    config = json.loads((named / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": THINKING}]
    (named / "tokenizer_config.json").write_text(json.dumps(config))
    assert encoded(named, TALKS)[0][0][0] == wanted
    with pytest.raises(PipelineError, match=r"cannot be compiled \(line 2\)"):
        encoded(bare, TALKS, chat_template="fine\n{% for %}")


def test_a_pipeline_masks_labels_and_names_the_row_that_it_cannot_use(folder):
    tokenizer = write_chat_tokenizer(folder / "pipeline", CHATML)
    talks = [json.dumps(TALKS[0])] * 50
    source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("talks", {"conversations": talks})])
    pipeline = Pipeline(source).options(runner="inline").tokenize_chat(tokenizer).pack_flat(63).batch(2)
    fields = next(iter(pipeline)).to_training(as_numpy=True, return_loss_mask=True)
    trained = fields["labels"][fields["loss_mask"] > 0]
    assert (fields["labels"][fields["loss_mask"] == 0] == -100).all() and 0 < len(trained) < fields["labels"].size
    talks[7] = "[3]"
    source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("talks", {"conversations": talks})])
    pipeline = Pipeline(source).options(runner="inline").tokenize_chat(tokenizer).pack_flat(63).batch(2)
    with pytest.raises(Exception, match='tokenize_chat failed on dataset "talks", shard memory, row 7: message 0 is'):
        next(iter(pipeline))
