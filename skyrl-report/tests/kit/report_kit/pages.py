"""HTML pages of reports."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """A parser that collects headings and loaded URLs, and fails on unclosed tags."""

    _VOID = ("meta", "link", "img", "br", "hr", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.loads: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self._VOID:
            self._open.append(tag)
        self.loads += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("h1", "h2"):
            self.headings.append(data)
