# ruff: noqa: RUF001 (characters that look like others are the point)
"""The texts on which a fast library is compared with the reference before it is trusted.

About 2,000 of them, the same in every process: hand-picked ones for what has been seen to differ, random mixtures of
scripts, digits, marks and white space, the tokenizer's own vocabulary put together at random, and text that spells
its special and added tokens. About 100 kB, because the reference encodes 4 to 8 MB/s and a start should not wait.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

N_RANDOM = 1000
N_VOCABULARY = 250
MAX_ADDED = 100

_T = TypeVar("_T")

_PROSE = [
    "Hello, world! It's 12345 o'clock; I'LL we've 1234567890 2024-01-02 3.14159",
    "She said: “don't” – and they'd've gone… 'tis O'Neill's 'S 'T 'RE 've'm'll'd '' 's's 'ſ 'K \u2019s",
    "ABCdef iPhone HTTPServer snake_case_name kebab-case XMLHttpRequest2 ǅ ªº ß İı ſK",
    "今天天气很好。東京都に行きます、カタカナ。서울 1234년 ﾊﾝｶｸ 々〆〇",
    "مرحبا بالعالم ١٢٣ नमस्ते दुनिया १२३ สวัสดีชาวโลก שָׁלוֹם Привет, мир! Γειά σου ἀρχή",
    "e\u0301 Å \u212b A\u030a ﬁ ½ ² Ⅷ ① café cafe\u0301 각 \u1112\u1161\u11ab q\u0307\u0323 q\u0323\u0307 \u0301x",
    "👨‍👩‍👧‍👦🏽\u200d x\ufe0fy 🇩🇪🇫🇷 🤷🏿‍♀️ ☃️ ✔ №5 ©2024™ → ∑∫√ 𝔘𝔫𝔦 𐍈",
    "$1,000.00 + 50% = £3.5e-10; ~user/.config <a href='x'>&amp;</a> #tag @me C++ C# .NET a/b\\c",
    "!!!??...---___*** ((())) \\\\ \"\"\" ''' ``` ||| &&& ;;; ,,, ==== >>>> <<<< ^^^ ~~~~",
    "1 22 333 4444 55555 666666 7777777 88888888 12a34b 1,234,567.89 0x1F 1e10 ٣٤٥٦ ２３４５ ⅣⅤ ¼½¾ ²³¹",
]
_CODE = [
    "    def f(x):\n\t\treturn x\t# c\n\n\n\n   \n",
    "if (a<=b && !c) { x[i++] -= *p->q; } // done\r\n\r\n\r\n/* ** */\n",
    "https://ex.com/a?b=c&d=%20#e//\n/ \n\n//\n //\n",
    "<s></s> <unk> <pad> [CLS] [SEP] <|endoftext|> <|im_start|>user\n<|im_end|> <0x41> <0x0A>",
    '{"key": [1, 2.0, null, true], "s": "a\\nb\\u00e9"}\n',
    "SELECT * FROM t WHERE a='b';--x\n\tGROUP BY 1\n",
]
_WHITE = [
    "", " ", "  ", "\n", "\n\n \n", "\t\tx\r\n\r\n y", " a b  c   d    e     f", "a \n b \n\n c\n \n  d \t e\t\n",
    "x \r y\r\rz \r\n ", " \u00a0 x\u00a0y \u3000z\u2003\u2003w ", "    \u180ex\u180e  \u180e\n\u180e",
    "a    \u180e\u180e9\n  \u180e!",
    "\x00\x01\x7f\u0085\u00a0\u2003\u3000\u2028\ufeff\u180e\ue000\U0010ffff x\u180e y \u180e",
    "a\U00011de0b1\U00011de52 \U00011de9  !",  # letters and digits of Unicode 17
    "▁ ▁a a▁b ▁▁ ▁▁▁x x▁ ▁\n▁", " leading", "trailing ", "trailing\n",
]  # fmt: skip
_REPEATS = {
    "a": 300, "A": 70, " ": 70, "\n": 40, "\t": 33, "\r\n": 9, "ab": 100, "é": 40, "1": 40, "-": 80, "中文": 30, "👍": 9
}  # fmt: skip
_SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2007\u200a\u200b\u2028\u2029\u202f\u205f\u2060\u3000\ufeff"


def _characters(low: int, high: int) -> str:
    return "".join(map(chr, range(low, high)))


# Blocks of characters that have been in Unicode for long; the newest are not the same in all libraries.
_SOURCES: list[Sequence[str]] = [
    _characters(0x20, 0x7F),
    " \n\t\r\u00a0\u3000",
    "'’sStTrReEvVmMlLdD",
    "0123456789²½Ⅷ٣",
    _characters(0x80, 0x600),
    _characters(0x900, 0x1700),
    _characters(0x3040, 0x9FA5),
    _characters(0xAC00, 0xD7A3),
    _characters(0x1F300, 0x1F700),
    "\u0300\u0301\u0308\u0323\u200d\ufe0f",
    "ABCdefgh",
    ["the ", " and", "ing", " of", "://", "\r\n", "    ", "self.", "return ", " self", "\n\n", "tion", "123"],
]


class _Rng:
    """Chance from `random()` alone, which is promised to give the same sequence in every version of Python."""

    def __init__(self) -> None:
        self._random = random.Random(0).random

    def below(self, stop: int) -> int:
        return int(self._random() * stop)

    def pick(self, items: Sequence[_T]) -> _T:
        return items[self.below(len(items))]


def probe_texts(tree: dict[str, Any]) -> list[str]:
    """The probes for a tokenizer.json; a function of the file alone."""
    rng = _Rng()
    return [
        *_fixed_texts(),
        *(_random_text(rng) for _ in range(N_RANDOM)),
        *_vocabulary_texts(tree["model"]["vocab"], rng),
        *_added_token_texts([t["content"] for t in tree["added_tokens"]], rng),
    ]


def look_alikes(token: str) -> list[str]:
    """Texts that spell a special token."""
    return [token, f" {token}", f"a{token}b", f"a {token} b", f"x\n{token}\n{token}{token}"]


def _fixed_texts() -> list[str]:
    lines = [*_PROSE, *_CODE, *_WHITE, *(text * count for text, count in _REPEATS.items())]
    shapes = ["a{}b", " {} ", "{}", "1{}{}1", "!{}a", "\n{}x", " {}\n", "a{} b"]
    spaces = [shape.replace("{}", space) for space in _SPACES for shape in shapes]
    ascii_pairs = [f"a{chr(c)}b {chr(c)}{chr(c)} 1{chr(c)}2{chr(c)}\n" for c in range(0x20, 0x7F)]
    contractions = [
        f"x{quote}{suffix}{end}"
        for quote in "'’"
        for suffix in ("s", "t", "re", "ve", "m", "ll", "d", "S", "T", "RE", "Ve", "lL", "D", "x", "sx")
        for end in ("", " y")
    ]
    # Every byte that UTF-8 uses, in characters from everywhere.
    points = [*range(0x800), *(c for c in range(0x800, 0x110000, 0x2F1) if not 0xD800 <= c < 0xE000)]
    every_byte = ["".join(map(chr, points[n : n + 32])) for n in range(0, len(points), 32)]
    return [*lines, "".join(_PROSE + _CODE), "\n".join(lines), *spaces, *ascii_pairs, *contractions, *every_byte]


def _random_text(rng: _Rng) -> str:
    sources = [rng.pick(_SOURCES) for _ in range(1 + rng.below(4))]
    return "".join(rng.pick(rng.pick(sources)) for _ in range(1 + rng.below(40)))


def _vocabulary_texts(vocab: dict[str, int] | list[Any], rng: _Rng) -> list[str]:
    """What the merges were learned from, so that they all have a chance to be wrong."""
    tokens = list(vocab) if isinstance(vocab, dict) else [entry[0] for entry in vocab]
    texts = []
    for _ in range(N_VOCABULARY):
        text = "".join(rng.pick(tokens)[:64] for _ in range(1 + rng.below(8)))
        texts += [text, text.replace("Ġ", " ").replace("Ċ", "\n").replace("▁", " ")]
    return texts


def _added_token_texts(added: list[str], rng: _Rng) -> list[str]:
    if len(added) > MAX_ADDED:
        added = added[: MAX_ADDED // 4] + [rng.pick(added) for _ in range(MAX_ADDED * 3 // 4)]
    texts = []
    for token in (content[:256] for content in added):
        other = rng.pick(added)[:256]
        texts += look_alikes(token)
        texts += [f"{token} \n{token}  ", f"\t {token}{other}", f"{token[:-1]}{other}", f"{other}{token[1:]}"]
        texts += [f"{token}\u0301 {token}\u0338", f"{token.lower()}{token.upper()}"]
    return texts
