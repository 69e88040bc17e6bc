"""Which names of a flat listing a path or pattern means; the rules are those of local folders."""

import re
from collections.abc import Callable

__all__ = ["MAGIC", "matcher", "split_pattern", "visible"]

MAGIC = re.compile(r"[*?\[]")
_VISIBLE = r"[^._/][^/]*"
_ONE_PIECE = re.compile(r"\*+|\?|\[[!^]?\]?[^\]]*\]|.", re.DOTALL)


def visible(name: str) -> bool:
    """Whether no part of a relative path starts with ``.`` or ``_``; names that end in ``/`` only mark a folder."""
    return bool(name) and not any(part[:1] in ("", ".", "_") for part in name.split("/"))


def split_pattern(path: str) -> tuple[str, str]:
    """(the folder before the first wildcard, without a slash at its end; the pattern below it)."""
    parts = path.split("/")
    first = next(i for i, part in enumerate(parts) if MAGIC.search(part))
    return "/".join(parts[:first]), "/".join(parts[first:])


def matcher(pattern: str) -> Callable[[str], object]:
    """Tells whether a name matches: ``*``, ``?``, ``[..]`` within a folder, ``**`` any depth, folders in full."""
    parts = [part for part in pattern.split("/") if part]
    while parts and parts[-1] == "**":
        parts.pop()
    expression = ""
    for part in parts:
        expression += f"(?:{_VISIBLE}/)*" if part == "**" else _part(part) + "/"
    expression = expression.removesuffix("/") + f"(?:/{_VISIBLE})*" if parts else f"{_VISIBLE}(?:/{_VISIBLE})*"
    return re.compile(expression).fullmatch


def _part(part: str) -> str:
    pieces = []
    for piece in _ONE_PIECE.findall(part):
        if piece[0] == "*":
            pieces.append("[^/]*")
        elif piece == "?":
            pieces.append("[^/]")
        elif len(piece) > 2 and piece[0] == "[":
            negated, inner = piece[1] in "!^", piece[1:-1].lstrip("!^").replace("\\", r"\\").replace("[", r"\[")
            pieces.append(f"[^{inner}/]" if negated else f"(?!/)[{inner}]")
        else:
            pieces.append(re.escape(piece))
    return ("(?![._])" if part[0] in "*?[" else "") + "".join(pieces)
