"""Conversion of ANSI colors to brackets, for models that cannot see color."""

import re

ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def strip_colors(text: str) -> str:
    r"""Replace escape sequences by brackets: `[S]` for an S on a colored background, `<blue S>` for a blue S.

    >>> strip_colors("\x1b[41mS\x1b[0mFF")
    '[S]FF'
    """
    pieces: list[str] = []
    opening = closing = ""
    position = 0
    for escape in ESCAPE.finditer(text):
        pieces.append(_bracket(text[position : escape.start()], opening, closing))
        if escape[2] == "m":
            opening, closing = _brackets(escape[1])
        position = escape.end()
    pieces.append(_bracket(text[position:], opening, closing))
    return "".join(pieces)


def _bracket(piece: str, opening: str, closing: str) -> str:
    return f"{opening}{piece}{closing}" if piece else ""


def _brackets(codes: str) -> tuple[str, str]:
    """Return the brackets for the codes of one escape sequence, e.g. ``34;1``."""
    numbers = [int(code) for code in codes.split(";") if code.isdecimal()]
    if any(40 <= number <= 47 or 100 <= number <= 107 for number in numbers):
        return "[", "]"
    for number in numbers:
        if 30 <= number <= 37 or 90 <= number <= 97:
            return f"<{COLORS[number % 10]} ", ">"
    return "", ""
