"""Conversations into tokens: the ids of transformers, the loss where the assistant speaks, and what is refused."""

import functools
import json
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.chat_data import CHATML, GENERATION, HEADERS, INST, STYLES, THINKING, chat_tokenizer, write_chat_tokenizer
from zephon import Pipeline, PipelineError
from zephon.io import Dataset
from zephon.ops.chat import TokenizeChat
from zephon.ops.chat_template import ChatTemplate
from zephon.ops.rows import Rows
from zephon.tokenizer.tokenizer import load_tokenizer
from zephon.work import StaticMixtureWorkSource


def talk(*texts, system=None):
    """A conversation of user and assistant in turn."""
    start = [] if system is None else [{"role": "system", "content": system}]
    return start + [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


FINE = talk("Hello there, how are you?", "I am fine.\n\nThanks!", " And é木 now? ", "  spaced out \n")
TALKS = [FINE, talk("x", ""), talk("\n\nlead", "\nnewlines first")]


def deep(names, *everyday):
    """Parameters, all but some of them for the deep tests."""
    return [name if name in everyday else pytest.param(name, marks=pytest.mark.deep) for name in names]


load = functools.cache(load_tokenizer)


@functools.cache
def encoder_of(folder, options):
    options = dict(options)
    return TokenizeChat(folder, field="messages", **options).encoder(load(folder), None, None)


def encoded(talks, template=CHATML, folder=None, skips=False, tools=None, **options):
    """Ids, loss and trained text of each conversation, and the reasons of those that cannot be used."""
    folder = folder or chat_tokenizer()
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    encoder = encoder_of(folder, tuple({"chat_template": template, **given}.items()))
    column = talks if isinstance(talks, pa.Array) else pa.array(talks)
    columns = {"messages": column} | ({} if tools is None else {"tools": tools})
    rows = Rows(pa.table(columns), np.arange(len(column)), skips)
    documents = encoder.encode(rows)
    out = {}
    for n, place in enumerate(documents.places.tolist()):
        a, b = documents.offsets[n], documents.offsets[n + 1]
        loss = np.ones(b - a, bool) if documents.loss is None else documents.loss[a:b]
        ids = documents.tokens[a:b]
        out[place] = ids.tolist(), loss, load(folder).decode(ids[loss])
    return out, {place: reason for place, _, reason in rows.failed}


def ids_and_text(*args, **options):
    """Of the first conversation."""
    ids, _, text = encoded(*args, **options)[0][0]
    return ids, text


@functools.cache
def transformers_tokenizer(folder):
    return pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(folder)


def reference(folder, talk, template, **options):
    options = {"tokenize": True, "return_dict": True, "chat_template": template} | options
    return transformers_tokenizer(folder).apply_chat_template(talk, **options)


def assert_as_in_transformers(folder, talk, template, **options):
    marked = "generation %}" in template.replace("add_generation", "")
    wanted = reference(folder, talk, template, return_assistant_tokens_mask=marked)
    ids, loss, _ = encoded([talk], template, folder, **options)[0][0]
    assert ids == wanted["input_ids"]
    if marked:
        assert loss.astype(int).tolist() == wanted["assistant_masks"]


@pytest.mark.frameworks
@pytest.mark.parametrize("family", deep(("gpt2", "qwen", "llama2", "gemma", "metaspace"), "gpt2", "metaspace"))
def test_ids_and_masks_are_those_of_transformers(family):
    folder = chat_tokenizer(family, rstrip=True)
    for template in (CHATML, HEADERS, INST, GENERATION, THINKING):
        for each in TALKS:
            assert_as_in_transformers(folder, each, template)


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
def test_the_assistants_words_and_ends_of_turns_are_trained_on_and_nothing_else(template, trained):
    assert ids_and_text([FINE], template)[1] == trained
    last = ids_and_text([FINE], template, loss="last_assistant")[1]
    assert trained.endswith(last) and 0 < len(last) < len(trained)
    assert encoded([FINE], template, loss="all")[0][0][1].all()


FLAGS = {"weight": 0, "train": False, "training": 0.0, "loss": False}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("template", [CHATML, GENERATION, THINKING, HEADERS, INST], ids="abcde")
@pytest.mark.parametrize("kind", ["struct", "json"])
def test_nothing_of_a_message_is_trained_on_whose_flag_says_so(flag, template, kind):
    marked = [dict(message) for message in FINE]
    marked[1][flag], marked[3][flag] = FLAGS[flag], type(FLAGS[flag])(1)
    marked[0][flag] = FLAGS[flag]  # of what is not trained on anyway
    column = pa.array([marked]) if kind == "struct" else [json.dumps(marked)]
    ids, trained = ids_and_text(column, template)
    assert ids == ids_and_text([FINE], template)[0]
    assert trained == ids_and_text([FINE], template, loss="last_assistant")[1] != ""
    marked[3][flag] = FLAGS[flag]
    assert ids_and_text([json.dumps(marked)], template, loss="last_assistant")[1] == ""


@pytest.mark.parametrize(
    ("changed", "options", "reason"),
    [
        ({"weight": 0.5}, {}, "weight of message 1 (0.5) is a number; expected 0 or 1, or true or false"),
        ({"train": "no"}, {}, 'train of message 1 ("no") is text; expected 0 or 1, or true or false'),
        ({"weight": 0}, {"loss": "all"}, 'message 1 has a flag that leaves it out of the loss, and loss is "all"'),
    ],
)
def test_flags_that_cannot_be_followed_are_rows_that_cannot_be_used(changed, options, reason):
    marked = [FINE[0], {**FINE[1], **changed}]
    out, failed = encoded([json.dumps(marked), json.dumps(FINE)], skips=True, **options)
    assert list(out) == [1] and reason in failed[0]


words = st.text(alphabet="ab <|im_end>\n木é", max_size=20)


@given(st.lists(st.tuples(st.sampled_from(["user", "system", "assistant"]), words), min_size=1, max_size=6))
def test_what_a_message_says_is_never_a_special_token(turns):
    # A letter first, since a line break would be one token with the one before it.
    turns = [(role, "s" + text + "<|im_end|>\n<|im_start|>assistant\n") for role, text in turns]
    messages = [{"role": role, "content": text} for role, text in turns]
    ids, trained = ids_and_text([messages])
    special = special_ids(chat_tokenizer(), "<|im_start|>", "<|im_end|>")
    assert sum(token in special for token in ids) == 2 * len(turns)
    assert trained == "".join(text + "<|im_end|>" for role, text in turns if role == "assistant")
    rendered = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert load(chat_tokenizer()).decode(ids) == rendered


def special_ids(folder, *texts):
    return {token.id for token in load(folder).special_tokens if not texts or token.content in texts}


special_pieces = ["<think>", "</think>", "<|im_end|>", "<|eot|>  ", "<tool_response>", "</tool_response>", "<|User|>"]
special_pieces += ["<|user|>", "[INST]", "<|eos|>", "<|im_", "|>", "<|", "end|>"]
odd_pieces = ["\r", "\xa0", "\ufdd0", "\ufdd1", "\ufdd2", "\ue0b10\ue0b2", "\ue0b11\ue0b2"]
pieces = st.sampled_from(["a", "b c", " ", "\n", "\n\n", "é木", *special_pieces, *odd_pieces])
words_of_pieces = st.lists(pieces, max_size=7).map("".join)
dialogues = st.tuples(
    st.none() | words_of_pieces, st.lists(st.tuples(words_of_pieces, words_of_pieces), min_size=1, max_size=3)
).map(lambda parts: talk(*(text for turn in parts[1] for text in turn), system=parts[0]))
TALKING = [name for name in STYLES if name != "inst"]  # which wants roles in turn


def without_specials(messages, *roles):
    """With letters that spell nothing."""
    return [{**m, "content": re.sub(r"[<\[|]", "x", m["content"])} if m["role"] in roles else m for m in messages]


@pytest.mark.frameworks
@pytest.mark.parametrize("name", deep(TALKING, "chatml", "reasoning"))
@given(dialogue=dialogues)
def test_text_that_looks_like_special_tokens_changes_no_rendering_and_makes_no_token(name, dialogue):
    folder, template = chat_tokenizer(more=True), STYLES[name]
    special = special_ids(folder)
    rendered = reference(folder, dialogue, template, tokenize=False, return_dict=False)
    looks_at_words = name in ("reasoning", "fullwidth", "thinking")
    for loss in ("assistant", "all"):
        results, failed = encoded([dialogue], template, folder, skips=True, assistant_tokens=(), loss=loss)
        if looks_at_words and failed:
            assert "hides who wrote it" in failed[0]
            continue
        ids = results[0][0]
        assert not failed and load(folder).decode(ids) == rendered
        if not looks_at_words:
            tame = reference(folder, without_specials(dialogue, "system", "user", "assistant"), template)["input_ids"]
            assert [token for token in ids if token in special] == [token for token in tame if token in special]


@pytest.mark.frameworks
@pytest.mark.parametrize("family", deep(("gpt2", "metaspace"), "gpt2"))
@pytest.mark.parametrize("name", deep(TALKING, "fullwidth", "reasoning"))
@given(dialogue=dialogues)
def test_tokens_that_the_assistant_may_spell_are_those_of_transformers(family, name, dialogue):
    folder = chat_tokenizer(family, more=True, rstrip=True, lstrip=True)
    tame = without_specials(dialogue, "system", "user")
    assert_as_in_transformers(folder, tame, STYLES[name], assistant_tokens="all")


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None, "c": {"d": None}}}}


@pytest.mark.frameworks
@pytest.mark.parametrize("name", deep(("reasoning", "llama", "thinking"), "reasoning", "llama"))
def test_conversations_with_tools_are_those_of_transformers(name):
    folder, template = chat_tokenizer(more=True), STYLES[name]
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "name": None},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two.", "reasoning": "so it is"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [CALL]},
    ]
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "default": None, "description": "<é>"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]

    def ids():
        return ids_and_text(pa.array([json.dumps(messages)]), template, folder, tools=pa.array([json.dumps(tools)]))[0]

    plain = ids()
    assert plain == reference(folder, messages, template, tools=tools)["input_ids"]
    parameters["properties"]["a"]["description"] = messages[2]["content"] = "never <|im_end|> mind </think>"
    spelled, special = ids(), special_ids(folder)
    rendered = reference(folder, messages, template, tools=tools, tokenize=False, return_dict=False)
    assert load(folder).decode(spelled) == rendered
    assert [token for token in spelled if token in special] == [token for token in plain if token in special]


def test_thoughts_that_an_assistant_spells_are_special_tokens_and_those_of_others_are_text():
    folder, text = chat_tokenizer(more=True), "<think>hm</think>ok<|im_end|>"
    messages = [{"role": role, "content": text} for role in ("system", "user", "assistant", "user")]
    thoughts, end = special_ids(folder, "<think>", "</think>"), special_ids(folder, "<|im_end|>")

    def counts(**options):
        ids, _ = ids_and_text([messages], CHATML, folder, **options)
        return sum(token in thoughts for token in ids), sum(token in end for token in ids)

    for loss in ("assistant", "all"):
        assert counts(loss=loss) == (2, 4)
        assert counts(loss=loss, assistant_tokens=[]) == (0, 4)
        assert counts(loss=loss, assistant_tokens="all") == (2, 5)
        assert counts(loss=loss, assistant_tokens=["<|im_end|>"]) == (0, 5)
    with pytest.raises(PipelineError, match="assistant_tokens is 3"):
        TokenizeChat(folder, assistant_tokens=3)


def test_thoughts_do_not_end_a_turn_that_has_no_token_for_its_end():
    template = """{% for m in messages %}{% if m.role == 'assistant' %}Assistant: {{ m.content.replace('~', '') }}
{% else %}User: {{ m.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"""
    messages = talk("u", "~<think>hm</think>~ the answer~") * 2
    trained = ids_and_text([messages], template, chat_tokenizer(more=True))[1]
    assert trained.replace("\n", "") == "<think>hm</think> the answer" * 2


@pytest.mark.parametrize(
    ("template", "spelled"),
    [
        ("{{ (messages[0].content | e) + '<b>' }}<|im_end|>", "<|im_end|>"),
        ("{{ 'yes' if '<think>' in messages[0].content else 'no' }}<|im_end|>", "<think>"),
    ],
)
def test_a_template_that_hides_who_wrote_a_token_makes_rows_that_cannot_be_used(template, spelled):
    talks = [talk("fine"), talk(spelled + "<|im_end|>")]
    results, failed = encoded(talks, template, chat_tokenizer(more=True), skips=True)
    assert list(results) == [0] and "hides who wrote it" in failed[1]


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), words), min_size=1, max_size=5))
def test_the_short_cut_by_skeletons_finds_the_turns_that_rendering_turn_by_turn_finds(turns):
    messages = [{"role": role, "content": text} for role, text in turns]
    # A key that no template looks at keeps the short cut away.
    others = [{**message, "id": "1"} for message in messages]
    for template in (CHATML, HEADERS):
        assert ids_and_text([messages], template) == ids_and_text([others], template)


def test_the_whole_last_turn_is_trained_on_however_many_parts_a_template_marks():
    template = """{% for m in messages %}{% if m.role == 'assistant' %}{% for part in m.content.split('|') %}
{{- '<|im_start|>' }}{% generation %}{{ part }}{% endgeneration %}{% endfor %}<|im_end|>
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""
    messages = talk("u", "a|b", "v", "c|d|", "w")
    assert ids_and_text([messages], template)[1] == "abcd"
    for some, trained in ((messages, "cd"), (messages[1:], "cd"), (messages[1:3], "ab")):
        assert ids_and_text([some], template, loss="last_assistant")[1] == trained


def test_nulls_stay_in_json_and_are_left_out_of_structs():
    calls = [{"function": {"name": "f", "arguments": {"a": None, "b": [{"c": None}]}}}]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    tools = [{"name": "f", "parameters": {"default": None}}]

    def rendered(talks, tools):
        return ids_and_text(talks, "{{ messages | tojson }}{{ tools | tojson }}", tools=tools, loss="all")[1]

    kept = rendered(pa.array([json.dumps(messages)]), pa.array([json.dumps(tools)]))
    # Of a message's own keys, transformers leaves nulls out.
    assert kept == json.dumps([{"role": "assistant", "tool_calls": calls}]) + json.dumps(tools)
    assert rendered(pa.array([json.dumps(messages)]), pa.array([[json.dumps(tools[0])]])) == kept
    left = rendered(pa.array([messages]), pa.array([tools]))
    assert '"arguments": {"b": [{}]}' in left and '"default"' not in left
    texts = [{**messages[0], "tool_calls": [{"function": {"name": "f", "arguments": '{"a": null}'}}]}]
    assert r"{\"a\": null}" in rendered(pa.array([texts]), pa.array([tools]))


def test_thoughts_of_earlier_turns_and_calls_of_tools_are_rendered_as_the_template_says():
    messages = talk("1+1?", "<think>hm</think>\n2", "again")
    messages += [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}]
    messages += [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "<think>\nso</think>2"}]
    tools = pa.array(['[{"type": "function", "function": {"name": "add"}}]'])
    ids, trained = ids_and_text(pa.array([json.dumps(messages)]), THINKING, tools=tools)
    assert load(chat_tokenizer()).decode(ids).startswith('<|im_start|>system\n# Tools\n{"type": "function"')
    called = '<tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>'
    assert trained == f"2<|im_end|>{called}<think>\nso</think>2<|im_end|>"


@pytest.mark.parametrize(
    "shape",
    [
        [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": ["h", "o"]}],
        '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "name": null}]',
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}',
        [{"from": "human", "value": "hi", "weight": None}, {"from": "gpt", "value": "ho", "weight": None}],
    ],
)
def test_the_usual_shapes_of_conversations_are_one(shape):
    column = pa.array([shape if isinstance(shape, str) else json.dumps(shape)])
    assert ids_and_text(column) == ids_and_text([talk("hi", "ho")])


def pipeline_of(columns, before=lambda pipeline: pipeline, **options):
    source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("talks", columns)])
    pipeline = before(Pipeline(source).options(runner="inline"))
    return pipeline.tokenize_chat(chat_tokenizer(), chat_template=CHATML, **options).pack_flat(63).batch(1)


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ({"prompt": "hi\n\nyou", "completion": "ho"}, {}),
        ({"prompt": "hi\n\nyou", "response": "ho", "input": "not read"}, {"ignored": ["input"]}),
        ({"prompt": "hi", "response": "ho", "context": "you"}, {"input": "context"}),
        ({"instruction": "hi", "input": "you", "output": "ho"}, {}),
        ({"instruction": "hi\n\nyou", "input": "", "output": "ho"}, {}),
        (
            {"question": "hi", "more": "you", "answer": "ho"},
            {"field": "question", "response": "answer", "input": "more"},
        ),
        ({"prompt": talk("hi\n\nyou"), "completion": talk("", "ho")[1:]}, {}),
    ],
)
def test_prompts_with_answers_are_conversations(columns, options):
    batch = next(iter(pipeline_of({name: [value] * 50 for name, value in columns.items()}, **options)))
    text = load(chat_tokenizer()).decode(batch.to_training(as_numpy=True)["input_ids"][0])
    turn = "<|im_start|>user\nhi\n\nyou<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    assert (turn * 4).startswith(text[: len(turn)])


TALK_AND_ANSWER = {"messages": talk("hi", "ho")}, {"instruction": "hi", "output": "ho"}


@pytest.mark.parametrize("columns", TALK_AND_ANSWER, ids=["messages", "prompts"])
def test_a_column_of_system_messages_comes_first(columns):
    columns = columns | {"system_prompt": "Be\nbrief.", "history": "[]"}
    options = {"system": "system_prompt", "ignored": ["history"]}
    batch = next(iter(pipeline_of({name: [value] * 50 for name, value in columns.items()}, **options)))
    text = load(chat_tokenizer()).decode(batch.to_training(as_numpy=True)["input_ids"][0])
    assert text.startswith("<|im_start|>system\nBe\nbrief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")


@pytest.mark.parametrize(
    ("name", "columns", "remedy"),
    [
        (
            "system",
            {},
            'name it (system="system", in a recipe system_field), or leave it out by name (ignored=[',
        ),
        ("history", {}, "put it into the messages in a map, or leave"),
        ("functions", {}, 'name it (tools="functions", in a recipe tools_field)'),
        ("chat_template_kwargs", {}, "put it into"),
        ("images", {}, "name it (images="),
        ("reasoning", TALK_AND_ANSWER[1], "put it into"),
        ("context", TALK_AND_ANSWER[1], 'name it (input="context", in'),
    ],
)
def test_a_column_of_conversations_that_is_not_used_is_refused_by_name(name, columns, remedy):
    columns = {key: [value] * 20 for key, value in ({**(columns or TALK_AND_ANSWER[0]), name: "x"}).items()}
    with pytest.raises(PipelineError, match=re.escape(f'does not use column "{name}"')) as info:
        next(iter(pipeline_of(columns)))
    assert remedy in str(info.value)
    next(iter(pipeline_of(columns, ignored=[name])))
    next(iter(pipeline_of(columns, lambda pipeline: pipeline.map_transform(lambda row: row, columns=[name]))))


def test_a_column_that_a_map_makes_is_named_or_refused_and_one_that_it_does_not_make_is_missing():
    def with_system(row):
        return {"messages": row["messages"], "system": "Be brief."}

    columns = {"messages": [talk("hi", "ho")] * 20}
    before = lambda pipeline: pipeline.map_transform(with_system, columns=["messages"])  # noqa: E731
    with pytest.raises(PipelineError, match='tokenize_chat does not use column "system"'):
        next(iter(pipeline_of(columns, before)))
    batch = next(iter(pipeline_of(columns, before, system="system")))
    text = load(chat_tokenizer()).decode(batch.to_training(as_numpy=True)["input_ids"][0])
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    with pytest.raises(PipelineError, match='tokenize_chat needs the column "tone", which is not there'):
        next(iter(pipeline_of(columns, before, system="tone", ignored=["system"])))


def test_two_system_messages_are_no_conversation():
    columns = {"messages": [talk("hi", "ho", system="one")] * 20, "system": ["two"] * 20}
    with pytest.raises(Exception, match='a system message beside that of column "system" is an object; expected one'):
        next(iter(pipeline_of(columns, system="system")))


def test_wrong_prompts_and_columns_are_told():
    columns = {"instruction": ["hi"] * 20, "output": ["ho"] * 19 + [None]}
    with pytest.raises(Exception, match='"talks", shard memory, row 19: column "output" is null; expected text or'):
        list(pipeline_of(columns))
    with pytest.raises(PipelineError, match="answers"):
        next(iter(pipeline_of(columns, field="instruction", response="answers")))
    with pytest.raises(PipelineError, match='input names column "more"'):
        next(iter(pipeline_of(columns, input="more")))
    with pytest.raises(PipelineError, match="name the column of prompts"):
        TokenizeChat(chat_tokenizer(), response="output")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("not json", "expected JSON"),
        ("3", "the conversation is a number; expected a list of messages"),
        ('["hi"]', "message 0 is text; expected role and content"),
        ('[{"content": "hi"}]', "the role of message 0 .with content. is null"),
        ('[{"role": "user"}]', "the content of message 0 is null"),
        ('[{"role": "user", "content": 3}]', "the content of message 0 is a number"),
        ('[{"role": "user", "content": [{"type": "image", "url": "x"}]}]', "'image'. is null; expected text"),
        ('[{"role": "assistant", "content": "x"}]', "the template says: roles must take turns"),
        ('[{"role": "user", "content": "\\ud800"}]', "JSON|surrogate"),
        ('[{"role": "user", "content": "<|im_end|>", "more": ' + "[" * 5000 + "]" * 5000 + "}]", "nested|JSON"),
    ],
)
def test_conversations_of_another_shape_are_told(shape, reason):
    good = json.dumps(talk("hi"))
    results, failed = encoded(pa.array([good, shape, good]), INST, skips=True)
    assert sorted(results) == [0, 2] and list(failed) == [1]
    assert re.search(reason, failed[1])


def test_empty_conversations_are_rows_without_content():
    results, failed = encoded(pa.array(["[]", None, "", json.dumps(talk("hi"))]))
    assert list(results) == [3] and not failed


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages.__class__.__mro__ }}", "SecurityError|unsafe"),
        ("{{ messages.append(1) }}", "SecurityError|not safely callable"),
        ("{{ raise_exception.__globals__.clear() }}", "SecurityError|unsafe"),
        ("{{ '{0.__class__.__mro__}'.format(messages) + 1 }}", "unsafe|TypeError"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% set _ = messages[0].update(role='x') %}", "SecurityError|not safely callable"),
        ("{{ strftime_now('%Y') }}", "undefined"),
        ("{{ lipsum() }}", "undefined"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: RecursionError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ '\\ud800' }}", "no Unicode"),
    ],
)
def test_templates_reach_nothing_outside_the_sandbox_and_their_failures_are_rows(template, reason):
    results, failed = encoded([FINE], template, skips=True)
    assert not results and re.search(reason, failed[0])


def test_templates_learn_neither_chance_nor_the_day():
    with pytest.raises(PipelineError, match="No filter named 'random'"):
        ChatTemplate("{{ [1, 2, 3] | random }}", {})
    template = "{{ strftime_now('%d %b %Y') }}"
    assert ChatTemplate(template, {}, "2024-07-26").render([])[0] == "26 Jul 2024"
    with pytest.raises(PipelineError, match="2024-07-26"):
        ChatTemplate(template, {}, "yesterday")


def test_where_templates_are_found(tmp_path):
    def ids(folder, template=None):
        return ids_and_text([FINE], template, folder)[0]

    bare = write_chat_tokenizer(tmp_path / "bare", None)
    with pytest.raises(PipelineError, match="has no chat template"):
        ids(bare)
    with pytest.raises(PipelineError, match=r"cannot be compiled \(line 2\)"):
        ids(bare, "fine\n{% for %}")
    expected = ids(bare, CHATML)
    (tmp_path / "own.jinja").write_text(CHATML)
    assert ids(bare, tmp_path / "own.jinja") == ids(bare, str(tmp_path / "own.jinja")) == expected
    beside = write_chat_tokenizer(tmp_path / "beside", "{{ 'of the config' }}")
    (beside / "chat_template.jinja").write_text(CHATML)
    assert ids(beside) == ids(write_chat_tokenizer(tmp_path / "config", CHATML)) == expected
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "x" + CHATML}]
    named = write_chat_tokenizer(tmp_path / "named", named)
    assert ids(named) == ids(named, "default") == expected != ids(named, "tool_use")
    with pytest.raises(PipelineError, match=r'"chatml"; expected .* that the tokenizer has \(default, tool_use\)'):
        ids(named, "chatml")


def test_a_pipeline_masks_labels_and_names_the_row_that_it_cannot_use():
    talks = [json.dumps(FINE)] * 50
    fields = next(iter(pipeline_of({"conversations": talks}))).to_training(as_numpy=True, return_loss_mask=True)
    trained = fields["labels"][fields["loss_mask"] > 0]
    assert (fields["labels"][fields["loss_mask"] == 0] == -100).all() and 0 < len(trained) < fields["labels"].size
    talks[7] = "[3]"
    with pytest.raises(Exception, match='tokenize_chat failed on dataset "talks", shard memory, row 7: message 0 is'):
        list(pipeline_of({"conversations": talks}))
