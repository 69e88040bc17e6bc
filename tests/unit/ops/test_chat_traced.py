"""Traced text: it reads like any other, and each character keeps who wrote it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.ops.chat_template import ChatTemplate
from zephon.ops.chat_traced import SAID, Traced, holds_traced, joined, merged, said, traced, without

# Conversations say small letters and what surrounds them, templates the others: so each character shows whose it is.
SAYS, WRITES = "ab \n<", "XY-\t>"
texts = st.lists(
    st.text(SAYS, max_size=6).map(said) | st.text(WRITES, max_size=6).map(traced) | st.text(WRITES, max_size=6),
    max_size=5,
).map(joined)
OPERATIONS = [
    lambda text, other, n: text + other,
    lambda text, other, n: other + text,
    lambda text, other, n: text[n:],
    lambda text, other, n: text[:n],
    lambda text, other, n: text[::-1],
    lambda text, other, n: text[n] if -len(text) <= n < len(text) else text,
    lambda text, other, n: text * (n % 3),
    lambda text, other, n: text.strip(),
    lambda text, other, n: text.strip(other),
    lambda text, other, n: text.lstrip("a<"),
    lambda text, other, n: text.rstrip("\n->"),
    lambda text, other, n: text.removeprefix("a"),
    lambda text, other, n: text.removesuffix(">"),
    lambda text, other, n: text.split(),
    lambda text, other, n: text.split(None, n),
    lambda text, other, n: text.rsplit(None, n),
    lambda text, other, n: text.split("a", n),
    lambda text, other, n: text.rsplit("- ", n),
    lambda text, other, n: text.rsplit("\n", n),
    lambda text, other, n: text.splitlines(),
    lambda text, other, n: text.splitlines(True),
    lambda text, other, n: list(text.partition(other or "a")),
    lambda text, other, n: list(text.rpartition("<")),
    lambda text, other, n: text.replace("a", other),
    lambda text, other, n: text.replace(other or "<", "X", n),
    lambda text, other, n: text.join([other, text, other]),
    lambda text, other, n: list(text),
    lambda text, other, n: str(text),
]


def whose(text):
    return b"" if type(text) is not Traced else text._marks


@given(texts, texts, st.integers(-4, 4), st.sampled_from(OPERATIONS))
def test_what_is_made_of_traced_text_is_the_same_and_keeps_who_wrote_it(text, other, n, operation):
    made = operation(text, other, n)
    wanted = operation("".join((text,)), "".join((other,)), n)
    assert made == wanted
    if type(text) is Traced:
        for piece in made if isinstance(made, list) else [made]:
            if piece:
                marks = whose(piece) or bytes(len(piece))
                assert marks == bytes(SAID if char in SAYS else 0 for char in piece)


@given(texts.filter(lambda text: type(text) is Traced))
def test_what_is_not_followed_counts_as_the_conversations(text):
    for made in (text.replace("", "X"), (text + traced("ß")).upper()):
        assert not whose(made).strip(bytes((SAID,))) and len(whose(made)) == len(made)
    assert text.lower() == str.lower(text) and whose(text.swapcase()) == whose(text)
    assert hash(text) == hash("".join((text,))) and {text: 1}["".join((text,))] == 1
    assert holds_traced([{"a": [text]}]) and not holds_traced([{"a": ["x"]}])


@given(st.lists(st.integers(0, 60), min_size=2, max_size=12, unique=True).map(sorted), st.sets(st.integers(0, 59)))
def test_spans_without_others_hold_the_characters_of_the_one_and_not_of_the_other(edges, characters):
    spans = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    inside = {place for a, b in spans for place in range(a, b)}
    holes = merged([(place, place + 1) for place in sorted(characters & inside)])
    left = without(spans, holes)
    assert [place for a, b in left for place in range(a, b)] == sorted(inside - characters)


@pytest.mark.parametrize(
    "expression",
    [
        "x + 'T'",
        "'T' + x",
        "'T' ~ x ~ 3",
        "x * 2",
        "x[1:-1]",
        "x[0]",
        "x | trim",
        "x | upper | lower",
        "x | replace('-', 'T')",
        "'T-T' | replace('-', x)",
        "'T-T'.replace('-', x)",
        "[x, 'T'] | join('|')",
        "'|'.join([x, 'T'])",
        "messages | join(attribute='content')",
        "messages | map(attribute='content') | map('trim') | join",
        "x | list | join",
        "x | reverse",
        "x | first",
        "x | string",
        "x | safe",
        "x.split('-') | last",
        "x | default('T')",
        "x if x else 'T'",
    ],
)
def test_expressions_of_templates_keep_who_wrote_what(expression):
    words = "a<x> - b<y>\n"
    template = ChatTemplate("{% set x = messages[0].content %}{{ " + expression + " }}", {})
    made = template.trace([{"role": said("u"), "content": said(words)}])
    assert made.text == template.render([{"role": "u", "content": words}]).text
    told = {place for begin, end in made.said for place in range(begin, end)}
    assert told == {place for place, char in enumerate(made.text) if char not in "T|3"} and told


@pytest.mark.parametrize(
    "template",
    [
        "{{ x | tojson }}",
        "{{ messages }}",
        "{{ messages | tojson(indent=2) }}",
        "{{ messages ~ '' }}",
        "{{ [messages] | join }}",
        "{{ x | indent(2) }}",
        "{{ x | title }}",
        "{{ x | e }}",
        "{{ x | truncate(9) }}",
        "{{ x | urlencode }}",
        "{{ x | striptags }}",
        "{{ strftime_now(x) }}",
        "{{ namespace(v=x) }}",
        "{% macro f() %}{{ x }}{% endmacro %}{{ f() }}",
        "{% set y %}{{ x }}{% endset %}{{ y }}",
        "{% filter lower %}{{ x }}{% endfilter %}",
        "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}{{ x }}{% endcall %}",
        "{% for c in x %}{{ c }}{% endfor %}",
        "{% generation %}{{ x }}{% endgeneration %}",
    ],
)
def test_whatever_a_template_does_with_words_alone_is_the_conversations(template):
    compiled = ChatTemplate("{% set x = messages[0].content %}" + template, {}, "2024-07-26")
    words = "a<x> - b<y>\nc <|z|> d"
    made = compiled.trace([{"content": said(words)}])
    assert made.text == compiled.render([{"content": words}]).text
    assert made.said == [(0, len(made.text))]
    if "generation" in template:
        assert made.blocks == [(0, len(made.text))]


def test_no_method_of_text_goes_unnoticed():
    # One that a new Python or Jinja brings has to be thought about.
    followed = {name for name in vars(Traced) if not name.startswith("_")}
    refused = {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate"}
    sample = Traced("a", b"\1")
    makes_no_text = {"count", "endswith", "find", "index", "rfind", "rindex", "startswith", "maketrans"}
    makes_no_text |= {name for name in dir(str) if name.startswith("is")}
    assert {name for name in dir(str) if not name.startswith("_")} <= followed | refused | makes_no_text
    for name in refused:  # by the sandbox of templates
        with pytest.raises(Exception, match="fails"):
            ChatTemplate("{{ x." + name + "(9) }}", {}, variables={"x": sample}).render([])
