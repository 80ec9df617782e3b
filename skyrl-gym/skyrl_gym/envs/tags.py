"""Extraction of tagged text, e.g. `<search>…</search>`, in time linear in the length of the text."""


def first_between(text: str, opening: str, closing: str) -> str | None:
    """Return the text between the first `opening` and the next `closing`, or None.

    >>> first_between("<a>1</a><a>2</a>", "<a>", "</a>")
    '1'
    """
    _, found, rest = text.partition(opening)
    inside, ended, _ = rest.partition(closing)
    return inside if found and ended else None


def last_between(text: str, opening: str, closing: str) -> str | None:
    """Return the text between the last closed `opening` and the next `closing`, or None.

    >>> last_between("<a>1</a><a>2</a><a>3", "<a>", "</a>")
    '2'
    """
    before, _, _ = text.rpartition(closing)
    start = before.rfind(opening)
    if start < 0:
        return None
    inside, _, _ = text[start + len(opening) :].partition(closing)
    return inside


def all_between(text: str, opening: str, closing: str) -> list[str]:
    """Return the texts between each `opening` and the next `closing`, in order.

    >>> all_between("<a>1</a><a>2</a><a>3", "<a>", "</a>")
    ['1', '2']
    """
    found = []
    end = 0
    while (start := text.find(opening, end)) >= 0 and (stop := text.find(closing, start + len(opening))) >= 0:
        found.append(text[start + len(opening) : stop])
        end = stop + len(closing)
    return found
