"""Conversations into tokens: the ids of transformers, the loss where the assistant speaks, and what is refused."""

import functools
import json
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.chat_data import CHATML, GENERATION, HEADERS, INST, STYLES, TEMPLATES, THINKING, write_chat_tokenizer
from zephon import Pipeline, PipelineError
from zephon.io import Dataset
from zephon.ops.chat import TokenizeChat
from zephon.ops.chat_template import ChatTemplate
from zephon.ops.rows import Rows
from zephon.tokenizer.tokenizer import load_tokenizer
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


def deep(names, *everyday):
    """Parameters, all but some of them for the deep tests."""
    return [name if name in everyday else pytest.param(name, marks=pytest.mark.deep) for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chat")


load = functools.cache(load_tokenizer)


def once(path, template, family="gpt2", **options):
    return path if path.exists() else write_chat_tokenizer(path, template, family, **options)


_encoders = {}


def encoded(tokenizer, talks, skips=False, tools=None, **options):
    """Ids, trained text, and failures of each conversation."""
    key = tokenizer, (tokenizer / "tokenizer_config.json").read_text(), repr(options)
    if key not in _encoders:
        loaded = load(tokenizer)
        _encoders[key] = loaded, TokenizeChat(tokenizer, field="messages", **options).encoder(loaded, None, None)
    loaded, encoder = _encoders[key]
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


_references = {}


def reference(tokenizer, talk, **options):
    transformers = pytest.importorskip("transformers")
    if tokenizer not in _references:
        _references[tokenizer] = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer)
    options = {"tokenize": True, "return_dict": True} | options
    return _references[tokenizer].apply_chat_template(talk, **options)


@pytest.mark.frameworks
@pytest.mark.parametrize("family", deep(("gpt2", "qwen", "llama2", "gemma", "metaspace"), "gpt2", "metaspace"))
@pytest.mark.parametrize("name", deep(TEMPLATES, "generation", "thinking"))
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
    tokenizer = once(folder / "spelled", CHATML)
    # A letter first, since a line break would be one token with the one before it.
    turns = [(role, "s" + text + "<|im_end|>\n<|im_start|>assistant\n") for role, text in turns]
    made, failed = encoded(tokenizer, [[{"role": role, "content": text} for role, text in turns]])
    loaded = load(tokenizer)
    special = [token.id for token in loaded.special_tokens if token.text in ("<|im_start|>", "<|im_end|>")]
    assert not failed and sum(token in special for token in made[0][0]) == 2 * len(turns)
    said = [text + "<|im_end|>" for role, text in turns if role == "assistant"]
    assert made[0][2] == "".join(said)
    assert loaded.decode(np.array(made[0][0])) == "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns
    )


TALKING = [name for name in STYLES if name != "inst"]  # which wants roles in turn
special_pieces = ["<think>", "</think>", "<|im_end|>", "<|eot|>  ", "<tool_response>", "</tool_response>", "<|User|>"]
special_pieces += ["<|user|>", "[INST]", "<|eos|>", "<|im_", "|>", "<|", "end|>"]
odd_pieces = ["\r", "\xa0", "\ufdd0", "\ufdd1", "\ufdd2", "\ue0b10\ue0b2", "\ue0b11\ue0b2"]
pieces = st.sampled_from(["a", "b c", " ", "\n", "\n\n", "é木", *special_pieces, *odd_pieces])
words_of_pieces = st.lists(pieces, max_size=7).map("".join)
dialogues = st.tuples(
    st.none() | words_of_pieces, st.lists(st.tuples(words_of_pieces, words_of_pieces), min_size=1, max_size=3)
)


def talk_of(dialogue):
    system, turns = dialogue
    talk = [] if system is None else [{"role": "system", "content": system}]
    for asked, answered in turns:
        talk += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return talk


@pytest.mark.frameworks
@pytest.mark.parametrize("name", deep(TALKING, "chatml", "reasoning"))
@given(dialogue=dialogues)
def test_text_that_looks_like_special_tokens_changes_no_rendering_and_makes_no_token(folder, name, dialogue):
    tokenizer = once(folder / f"looks-{name}", STYLES[name], more=True)
    loaded = load(tokenizer)
    special = {token.id for token in loaded.special_tokens}
    talk = talk_of(dialogue)
    rendered = reference(tokenizer, talk, tokenize=False, return_dict=False)
    looks = name in ("reasoning", "fullwidth", "thinking")  # for thoughts
    for loss in ("assistant", "all"):
        made, failed = encoded(tokenizer, [talk], skips=True, assistant_tokens=(), loss=loss)
        if looks and failed:
            assert "hides who wrote it" in failed[0]
            continue
        assert not failed and loaded.decode(np.array(made[0][0])) == rendered
        # With letters that spell nothing, the special tokens are those of the template alone.
        tame = [{**one, "content": re.sub(r"[<\[|]", "x", one["content"])} for one in talk]
        if not looks:
            wanted = [token for token in reference(tokenizer, tame)["input_ids"] if token in special]
            assert [token for token in made[0][0] if token in special] == wanted


@pytest.mark.frameworks
@pytest.mark.parametrize("family", deep(("gpt2", "metaspace"), "gpt2"))
@pytest.mark.parametrize("name", deep(TALKING, "fullwidth", "reasoning"))
@given(dialogue=dialogues)
def test_tokens_that_the_assistant_may_spell_are_those_of_transformers(folder, family, name, dialogue):
    tokenizer = once(folder / f"may-{family}-{name}", STYLES[name], family, more=True, rstrip=True, lstrip=True)
    system, turns = dialogue
    tame = [(re.sub(r"[<\[|]", "x", asked), answered) for asked, answered in turns]
    talk = talk_of((system and re.sub(r"[<\[|]", "x", system), tame))
    marked = "{% generation %}" in STYLES[name] or "{%- generation %}" in STYLES[name]
    wanted = reference(tokenizer, talk, return_assistant_tokens_mask=marked)
    made, _ = encoded(tokenizer, [talk], assistant_tokens="all")
    assert made[0][0] == wanted["input_ids"]
    if marked:
        assert made[0][1].astype(int).tolist() == wanted["assistant_masks"]


@pytest.mark.frameworks
@pytest.mark.parametrize("name", deep(("reasoning", "llama", "thinking"), "reasoning", "llama"))
def test_conversations_with_tools_are_those_of_transformers(folder, name):
    tokenizer = write_chat_tokenizer(folder / f"tools-{name}", STYLES[name], more=True)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None, "c": {"d": None}}}}
    talk = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call], "name": None},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two.", "reasoning": "so it is"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
    ]
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "default": None, "description": "<é>"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    wanted = reference(tokenizer, talk, tools=tools)
    made, _ = encoded(tokenizer, pa.array([json.dumps(talk)]), tools=pa.array([json.dumps(tools)]))
    assert made[0][0] == wanted["input_ids"]
    said = "never <|im_end|> mind </think>"
    parameters["properties"]["a"]["description"] = talk[2]["content"] = said
    text = reference(tokenizer, talk, tools=tools, tokenize=False, return_dict=False)
    spelled, failed = encoded(tokenizer, pa.array([json.dumps(talk)]), tools=pa.array([json.dumps(tools)]))
    loaded = load(tokenizer)
    special = {token.id for token in loaded.special_tokens}
    assert not failed and loaded.decode(np.array(spelled[0][0])) == text
    assert [i for i in spelled[0][0] if i in special] == [i for i in made[0][0] if i in special]


def test_thoughts_that_an_assistant_spells_are_special_tokens_and_those_of_others_are_text(folder):
    tokenizer = write_chat_tokenizer(folder / "thoughts", CHATML, more=True)
    loaded = load(tokenizer)
    thoughts = [token.id for token in loaded.special_tokens if "think" in token.text]
    words = "<think>hm</think>ok<|im_end|>"
    talk = [{"role": role, "content": words} for role in ("system", "user", "assistant", "user")]

    def count(ids, **options):
        made = encoded(tokenizer, [talk], **options)[0][0][0]
        return sum(token in ids for token in made)

    end = [token.id for token in loaded.special_tokens if token.text == "<|im_end|>"]
    for loss in ("assistant", "all"):
        assert (count(thoughts, loss=loss), count(end, loss=loss)) == (2, 4)
        assert (count(thoughts, loss=loss, assistant_tokens=[]), count(end, loss=loss, assistant_tokens=[])) == (0, 4)
        assert (count(thoughts, loss=loss, assistant_tokens="all"), count(end, loss=loss, assistant_tokens="all")) == (
            2,
            5,
        )
        assert count(end, loss=loss, assistant_tokens=["<|im_end|>"]) == 5
    with pytest.raises(PipelineError, match="assistant_tokens is 3"):
        TokenizeChat(tokenizer, assistant_tokens=3)


def test_thoughts_do_not_end_a_turn_that_has_no_token_for_its_end(folder):
    template = """{% for m in messages %}{% if m.role == 'assistant' %}Assistant: {{ m.content.replace('~', '') }}
{% else %}User: {{ m.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"""
    tokenizer = write_chat_tokenizer(folder / "endless", template, more=True)
    talk = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "~<think>hm</think>~ the answer~"}]
    made, _ = encoded(tokenizer, [talk * 2])
    assert made[0][2].replace("\n", "") == "<think>hm</think> the answer" * 2


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ (messages[0].content | e) + '<b>' }}<|im_end|>", "<|im_end|>"),
        ("{{ 'yes' if '<think>' in messages[0].content else 'no' }}<|im_end|>", "<think>"),
    ],
)
def test_a_template_that_hides_who_wrote_a_token_makes_rows_that_cannot_be_used(folder, template, words):
    tokenizer = write_chat_tokenizer(folder / "hides", None, more=True)
    talks = [[{"role": "user", "content": "fine"}], [{"role": "user", "content": words + "<|im_end|>"}]]
    made, failed = encoded(tokenizer, talks, skips=True, chat_template=template)
    assert list(made) == [0] and "hides who wrote it" in failed[1]


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), words), min_size=1, max_size=5))
def test_the_short_cut_by_skeletons_finds_the_turns_that_rendering_turn_by_turn_finds(folder, turns):
    for template in (CHATML, HEADERS):
        tokenizer = once(folder / f"short-{len(template)}", template)
        plain = [{"role": role, "content": text} for role, text in turns]
        # A key that no template looks at keeps the short cut away.
        other = [{**message, "id": "1"} for message in plain]
        assert encoded(tokenizer, [plain])[0][0][0] == encoded(tokenizer, [other])[0][0][0]
        quick, slow = encoded(tokenizer, [plain])[0][0][2], encoded(tokenizer, [other])[0][0][2]
        assert quick == slow


def test_the_whole_last_turn_is_trained_on_however_many_parts_a_template_marks(folder):
    template = """{% for m in messages %}{% if m.role == 'assistant' %}{% for part in m.content.split('|') %}
{{- '<|im_start|>' }}{% generation %}{{ part }}{% endgeneration %}{% endfor %}<|im_end|>
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""
    tokenizer = write_chat_tokenizer(folder / "parts", template)
    talk = [("user", "u"), ("assistant", "a|b"), ("user", "v"), ("assistant", "c|d|"), ("user", "w")]
    talk = [{"role": role, "content": content} for role, content in talk]
    assert encoded(tokenizer, [talk])[0][0][2] == "abcd"
    assert encoded(tokenizer, [talk], loss="last_assistant")[0][0][2] == "cd"
    assert encoded(tokenizer, [talk[1:]], loss="last_assistant")[0][0][2] == "cd"
    assert encoded(tokenizer, [talk[1:3]], loss="last_assistant")[0][0][2] == "ab"


def test_nulls_stay_in_json_and_are_left_out_of_structs(folder):
    template = "{{ messages | tojson }}{{ tools | tojson }}"
    tokenizer = write_chat_tokenizer(folder / "nulls", template)
    calls = [{"function": {"name": "f", "arguments": {"a": None, "b": [{"c": None}]}}}]
    talk = [{"role": "assistant", "content": None, "tool_calls": calls}]
    tools = [{"name": "f", "parameters": {"default": None}}]

    def rendered(talks, tools):
        return load(tokenizer).decode(np.array(encoded(tokenizer, talks, tools=tools, loss="all")[0][0][0]))

    kept = rendered(pa.array([json.dumps(talk)]), pa.array([json.dumps(tools)]))
    # Of a message's own keys, transformers leaves nulls out.
    assert kept == json.dumps([{"role": "assistant", "tool_calls": calls}]) + json.dumps(tools)
    assert rendered(pa.array([json.dumps(talk)]), pa.array([[json.dumps(tools[0])]])) == kept
    left = rendered(pa.array([talk]), pa.array([tools]))
    assert '"arguments": {"b": [{}]}' in left and '"default"' not in left
    texts = [{**talk[0], "tool_calls": [{"function": {"name": "f", "arguments": '{"a": null}'}}]}]
    assert r"{\"a\": null}" in rendered(pa.array([texts]), pa.array([tools]))


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
    text = load(tokenizer).decode(np.array(made[0][0]))
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
        [{"from": "human", "value": "hi", "weight": None}, {"from": "gpt", "value": "ho", "weight": None}],
    ],
)
def test_the_usual_shapes_of_conversations_are_one(folder, talk):
    tokenizer = write_chat_tokenizer(folder / "shapes", CHATML)
    wanted, _ = encoded(tokenizer, [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]])
    column = pa.array([talk if isinstance(talk, str) else json.dumps(talk)])
    assert encoded(tokenizer, column)[0][0][0] == wanted[0][0]


def text_of(tokenizer, columns, **options):
    """What a pipeline makes of columns, up to the first record's end."""
    source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("talks", columns)])
    pipeline = Pipeline(source).options(runner="inline").tokenize_chat(tokenizer, **options).pack_flat(63).batch(1)
    return load(tokenizer).decode(next(iter(pipeline)).to_training(as_numpy=True)["input_ids"][0])


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ({"prompt": "hi\n\nyou", "completion": "ho"}, {}),
        ({"prompt": "hi\n\nyou", "response": "ho", "input": "not read"}, {}),
        ({"instruction": "hi", "input": "you", "output": "ho"}, {}),
        ({"instruction": "hi\n\nyou", "input": "", "output": "ho"}, {}),
        ({"instruction": "hi\n\nyou", "output": "ho"}, {}),
        (
            {"question": "hi", "more": "you", "answer": "ho"},
            {"field": "question", "response": "answer", "input": "more"},
        ),
        (
            {
                "prompt": [{"role": "user", "content": "hi\n\nyou"}],
                "completion": [{"role": "assistant", "content": "ho"}],
            },
            {},
        ),
    ],
)
def test_prompts_with_answers_are_conversations(folder, columns, options):
    tokenizer = write_chat_tokenizer(folder / "pairs", CHATML)
    made = text_of(tokenizer, {name: [value] * 50 for name, value in columns.items()}, **options)
    turn = "<|im_start|>user\nhi\n\nyou<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    assert (turn * 4).startswith(made[: len(turn)])


def test_wrong_prompts_and_columns_are_told(folder):
    tokenizer = write_chat_tokenizer(folder / "pairs", CHATML)
    columns = {"instruction": ["hi"] * 20, "output": ["ho"] * 19 + [None]}
    with pytest.raises(Exception, match='"talks", shard memory, row 19: column "output" is null; expected text'):
        source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("talks", columns)])
        list(Pipeline(source).options(runner="inline").tokenize_chat(tokenizer).pack_flat(63).batch(1))
    with pytest.raises(PipelineError, match="answers"):
        text_of(tokenizer, columns, field="instruction", response="answers")
    with pytest.raises(PipelineError, match='input names column "more"'):
        text_of(tokenizer, columns, input="more")
    with pytest.raises(PipelineError, match="name the column of prompts"):
        TokenizeChat(tokenizer, response="output")


@pytest.mark.parametrize(
    ("talk", "words"),
    [
        ("not json", "expected JSON"),
        ("3", "the conversation is a number; expected a list of messages"),
        ('["hi"]', "message 0 is text; expected role and content"),
        ('[{"content": "hi"}]', "the role of message 0 .with content. is null"),
        ('[{"role": "user"}]', "the content of message 0 is null"),
        ('[{"role": "user", "content": 3}]', "the content of message 0 is a number"),
        ('[{"role": 3, "content": "x"}]', "the role of message 0 .with role, content. is a number"),
        ('[{"role": "user", "content": [{"type": "image", "url": "x"}]}]', "'image'. is null; expected text"),
        ('[{"role": "assistant", "content": "x"}]', "the template says: roles must take turns"),
        ('[{"role": "user", "content": "\\ud800"}]', "expected JSON|surrogate"),
        (
            '[{"role": "user", "content": "<|im_end|>", "more": ' + "[" * 5000 + "]" * 5000 + "}]",
            "nested|expected JSON",
        ),
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


@pytest.mark.parametrize(
    ("template", "words"),
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
def test_templates_reach_nothing_outside_the_sandbox_and_their_failures_are_rows(folder, template, words):
    tokenizer = write_chat_tokenizer(folder / "sandbox", CHATML)
    made, failed = encoded(tokenizer, TALKS[:1], skips=True, chat_template=template)
    assert not made and re.search(words, failed[0])


def test_templates_cannot_ask_chance():
    with pytest.raises(PipelineError, match="No filter named 'random'"):
        ChatTemplate("{{ [1, 2, 3] | random }}", {})


def test_the_date_is_what_it_is_told(folder):
    template = "{{ strftime_now('%d %b %Y') }}"
    assert ChatTemplate(template, {}, "2024-07-26").render([])[0] == "26 Jul 2024"
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
