"""Modules of a user's own with one place in each, @@, that changes what the function F does, or must not be told apart.

Run as a script it prints the identities of them all, for comparison between processes and versions of Python.
"""

import importlib.util
import json
import pathlib
import sys
import tempfile
import textwrap

# By name: (source, two texts for @@).
CHANGES = {
    "a later line of a lambda": ("F = keep(\n    lambda row: row['a'] > 1\n    and row['b'] < @@\n)", "3", "30"),
    "which lambda of a line": ("fs = [lambda r: r['a'] > r['b'], lambda r: r['a'] < r['b']]\nF = fs[@@]", "0", "1"),
    "which of equal texts": ("fs = [lambda r: (lambda s: s)(r), lambda r: (lambda t: t)(r)]\nF = fs[@@]", "0", "1"),
    "a lambda in a lambda": ("outer = lambda n: lambda row: row + n - 1\nF = [outer, outer(1)][@@]", "0", "1"),
    "a text in a lambda": ("F = (lambda row: '''é\n  @@''' + row)", "a", " a"),
    "code of a wrapper": (
        """
        def deco(f):
            @functools.wraps(f)
            def inner(row):
                return {"text": f(row)["text"].@@()}
            return inner
        @deco
        def F(row): return row
        """,
        "upper",
        "lower",
    ),
    "what is wrapped": (
        """
        def deco(f):
            @functools.wraps(f)
            def inner(row): return f(row)
            return inner
        @deco
        @deco
        def F(row): return row + @@
        """,
        "1",
        "2",
    ),
    "what a cache wraps": (
        "def deco(f): return functools.wraps(f)(lambda row: f(row) + @@)\n"
        "@functools.lru_cache(maxsize=9)\n@deco\ndef F(row): return 1",
        "1",
        "2",
    ),
    "a handler for a type": (
        """
        @functools.singledispatch
        def F(row): return 1
        @F.register(dict)
        def _(row): return @@
        """,
        "1",
        "2",
    ),
    "which type a handler is for": (
        "@functools.singledispatch\ndef F(row): return 1\nF.register(@@, lambda row: 2)",
        "dict",
        "list",
    ),
    "a handler of a method": (
        """
        class C:
            @functools.singledispatchmethod
            def go(self, row): return 1
            def __call__(self, row): return self.go(row)
        C.go.register(dict, lambda self, row: @@)
        F = C()
        """,
        "1",
        "2",
    ),
    "a class attribute set later": (
        "class C:\n    n = 1\n    def __call__(self, row): return row\nC.n = @@\nF = C()",
        "1",
        "2",
    ),
    "a class attribute that is a list": (
        "class C:\n    n = []\n    def __call__(self, row): return row\nC.n += [@@]\nF = C()",
        "1",
        "2",
    ),
    "a method set later": (
        "class C:\n    def __call__(self, row): return self.go(row)\n"
        "def go(self, row): return row + @@\nC.go = go\nF = C()",
        "1",
        "2",
    ),
    "a method by setattr": (
        "class C:\n    def __call__(self, row): return self.go(row)\n"
        "setattr(C, 'go', (lambda self, row: row + 1, lambda self, row: row + 2)[@@])\nF = C()",
        "0",
        "1",
    ),
    "a class that a decorator made": (
        """
        def deco(cls):
            class W(cls):
                def __call__(self, row): return super().__call__(row) + @@
            W.__name__, W.__qualname__ = cls.__name__, cls.__qualname__
            return W
        @deco
        class C:
            def __call__(self, row): return 1
        F = C()
        """,
        "1",
        "2",
    ),
    "a value in the class that a decorator made": (
        """
        def deco(n):
            def inner(cls): return type(cls.__name__, (cls,), {"n": n})
            return inner
        @deco(int("@@"))
        class C:
            def __call__(self, row): return self.n
        F = C()
        """,
        "1",
        "2",
    ),
    "which classes of one name": (
        "def make(n):\n    if n:\n        class C:\n            def __call__(self, row): return 1\n"
        "    else:\n        class C:\n            def __call__(self, row): return 2\n    return C\nF = make(@@)()",
        "0",
        "1",
    ),
    "a base": (
        "class B:\n    def go(self): return @@\nclass C(B):\n    def __call__(self, row): return self.go()\nF = C()",
        "1",
        "2",
    ),
    "an attribute of a base of a base": (
        "class A: pass\nclass B(A): pass\nclass C(B):\n    def __call__(self, row): return self.n\nA.n = @@\nF = C()",
        "1",
        "2",
    ),
    "a metaclass": (
        "class M(type):\n    def __getattr__(cls, name): return @@\nclass C(metaclass=M):\n"
        "    def __call__(self, row): return C.n\nF = C()",
        "1",
        "2",
    ),
    "a static method": ("class C:\n    @staticmethod\n    def f(row): return @@\nF = C.f", "1", "2"),
    "a class method": (
        "class C:\n    n = 1\n    @classmethod\n    def f(cls, row): return cls.n\nC.n = @@\nF = C.f",
        "1",
        "2",
    ),
    "a property set later": (
        "class C:\n    def __call__(self, row): return self.n\ndef n(self): return @@\nC.n = property(n)\nF = C()",
        "1",
        "2",
    ),
    "a cached property": (
        "class C:\n    def __call__(self, row): return self.n\n"
        "C.n = functools.cached_property(lambda self: @@)\nF = C()",
        "1",
        "2",
    ),
    "a slot": (
        "class C:\n    __slots__ = ('n',)\n    def __call__(self, row): return self.n\nF = C()\nF.n = @@",
        "1",
        "2",
    ),
    "a partial of a method": (
        "class C:\n    n = 0\n    def f(self, k, row): return k\nc = C()\nc.n = @@\nF = functools.partial(c.f, 1)",
        "1",
        "2",
    ),
    "a partial method": (
        "class C:\n    def f(self, k, row): return k\n    def __call__(self, row): return self.g(row)\n"
        "C.g = functools.partialmethod(C.f, @@)\nF = C()",
        "1",
        "2",
    ),
    "a function on an object": (
        "class C:\n    def __call__(self, row): return self.h(row)\nF = C()\nF.h = lambda row: (row,\n    @@)",
        "1",
        "2",
    ),
    "an attribute of a function": ("def F(row): return F.n\nF.n = @@", "1", "2"),
    "a default that is computed": ("def F(row, n=int('@@')): return n", "1", "2"),
    "a nested function": ("def F(row):\n    def inner(): return @@\n    return inner()", "1", "2"),
    "a constant of the module": ("LIMIT = @@\ndef F(row): return row > LIMIT", "1", "2"),
    "one that only a nested lambda names": (
        "LIMIT = @@\ndef F(row): return [(lambda s: s > LIMIT)(r) for r in row]",
        "1",
        "2",
    ),
    "one set from elsewhere": ("LIMIT = 0\ndef F(row): return row > LIMIT\nglobals()['LIMIT'] = @@", "1", "2"),
    "a pattern of the module": ("import re\nFORM = re.compile('@@')\nF = lambda row: FORM.sub('', row)", "a", "b"),
    "a table of the module": ("TABLE = {\n    'a': @@,\n}\nF = lambda row: TABLE[row]", "1", "2"),
    "a table that the module adds to": ("TABLE = {}\nTABLE[1] = @@\ndef F(row): return TABLE[row]", "1", "2"),
    "a function of the module": (
        "def F(row): return first(row)\ndef first(row): return then(row)\ndef then(row): return @@",
        "1",
        "2",
    ),
    "a class of the module": ("class C:\n    def go(self): return @@\ndef F(row): return C().go()", "1", "2"),
    "where a name comes from": ("from @@ import join\ndef F(row): return join(row)", "posixpath", "ntpath"),
    "code typed in": ("scope = {}\nexec('def f(row): return row + @@', scope)\nF = scope['f']", "1", "2"),
    "a class typed in": (
        "scope = {}\nexec('class C:\\n    def __call__(self, row): return row + @@', scope)\nF = scope['C']()",
        "1",
        "2",
    ),
    "a dataclass": (
        "import dataclasses\n@dataclasses.dataclass(frozen=True, slots=True, order=True)\nclass D:\n    n: int = 1\n"
        "    m: list = dataclasses.field(default_factory=list)\n    def go(self, row): return row + @@\nF = D(2).go",
        "1",
        "2",
    ),
    "a named tuple": (
        "import collections, typing\nclass D(typing.NamedTuple):\n    n: int = 1\n"
        "    def go(self, row): return row + @@\n"
        "F = functools.partial(D(2).go, collections.namedtuple('N', 'a b')(1, 2))",
        "1",
        "2",
    ),
    "a protocol": (
        "import typing\n@typing.runtime_checkable\nclass P(typing.Protocol):\n    def __call__(self, row): ...\n"
        "@functools.total_ordering\nclass C(P):\n    def __lt__(self, other): return True\n"
        "    def __eq__(self, other): return True\n    def __call__(self, row): return row + @@\nF = C()",
        "1",
        "2",
    ),
    "an abstract and generic class": (
        "import abc, typing\nT = typing.TypeVar('T')\nclass B(abc.ABC, typing.Generic[T]):\n    n = @@\n"
        "    @abc.abstractmethod\n    def __call__(self, row): ...\nclass C(B[int]):\n"
        "    def __call__(self, row): return self.n\nF = C()",
        "1",
        "2",
    ),
    "a class of enums": (
        "import enum\nclass E(enum.Flag):\n    A = 1\n    B = enum.auto()\n    def go(self): return @@\n"
        "class C:\n    kinds = E\n    def __call__(self, row): return self.kinds.A.go()\nF = C()",
        "1",
        "2",
    ),
    "a class of arrays": (
        "import numpy\nclass A(numpy.ndarray): pass\na = numpy.zeros(3).view(A)\na.n = @@\nF = lambda row, a=a: a.n",
        "1",
        "2",
    ),
    "a method of an enum": (
        "import enum\nclass E(enum.Enum):\n    A = 1\n    def go(self): return @@\nF = lambda row, e=E.A: e.go()",
        "1",
        "2",
    ),
    "a class of partials": (
        "class P(functools.partial):\n    def __call__(self, row): return @@\nF = P(keep, 1)",
        "1",
        "2",
    ),
    "a mask": ("import numpy\nm = numpy.ma.masked_array([1, 2], mask=[0, @@])\nF = lambda row, m=m: m", "0", "1"),
}
# What must make no difference.
SAME = {
    "other code": ("OTHER = @@\ndef F(row): return row", "1", "2"),
    "a local of that name": ("text = @@\ndef F(text):\n    row = text\n    return row", "1", "2"),
    "where it stands": ("@@\ndef F(row): return row", "", "\n# more\n"),
    "where a lambda stands": ("F = @@", "lambda row: (row +\n  1)", "(\n\n  lambda row: (row +\n            1)\n  )"),
    "what every process has of its own": (
        "import os\nPID = os.getpid()  # @@\ndef F(row): return (row, PID)[0]",
        "",
        "",
    ),
    "a global that a function sets": (
        "RANK = 0\ndef begin(n):\n    global RANK\n    RANK = n\ndef F(row): return (row, RANK)[0]\nbegin(@@)",
        "1",
        "2",
    ),
    "a table that fills": ("SEEN = {}\ndef F(row): return SEEN.setdefault(row, row)\nSEEN.update({1: @@})", "1", "2"),
}


def load(source, path):
    """F of a module with that source."""
    path.write_text("import functools\ndef keep(f): return f\n" + textwrap.dedent(source) + "\n")
    spec = importlib.util.spec_from_file_location("mine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.F


def identities(folder):
    """Those of all modules, by name and variant."""
    from zephon.ops.identity import identity_of

    made = {}
    for name, (source, *texts) in {**CHANGES, **SAME}.items():
        for text in texts:
            function = load(source.replace("@@", text), pathlib.Path(folder) / f"module{len(made)}.py")
            made[f"{name}: {text}"] = identity_of(function)
    return made


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = identities(folder)
    # What is of bytecode is of one version of Python.
    print(json.dumps({name: each.text for name, each in made.items() if sys.argv[1:] or not each.unsourced}))
