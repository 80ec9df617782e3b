"""Parts of a reply between tags, e.g. `<search>…</search>`. All of it takes time linear in the text."""

from __future__ import annotations


def first_between(text: str, opening: str, closing: str) -> str | None:
    """What the first `opening` and the next `closing` enclose; None without them."""
    _, found, rest = text.partition(opening)
    inside, ended, _ = rest.partition(closing)
    return inside if found and ended else None


def last_between(text: str, opening: str, closing: str) -> str | None:
    """What the last `closing` and the `opening` before it enclose; None without them."""
    before, found, _ = text.rpartition(closing)
    _, started, inside = before.rpartition(opening)
    return inside if found and started else None


def all_between(text: str, opening: str, closing: str) -> list[str]:
    """What each `opening` and the next `closing` enclose, in order."""
    found = []
    end = 0
    while (start := text.find(opening, end)) >= 0 and (stop := text.find(closing, start + len(opening))) >= 0:
        found.append(text[start + len(opening) : stop])
        end = stop + len(closing)
    return found
