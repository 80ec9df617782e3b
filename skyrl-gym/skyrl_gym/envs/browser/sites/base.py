"""Base class for sites, and the rendering of their pages."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from random import Random
from string import Template


class Html(str):
    """Text that is already HTML. `render` escapes all other text, so that typed text never becomes part of a page."""


@dataclass(frozen=True, slots=True)
class Redirect:
    """An answer that sends the browser to another page of the site, relative to the current one."""

    path: str


Answer = Html | Redirect | None
"""A page, a redirect, or None if there is no such page."""


class Site(ABC):
    """A site in memory: a task, pages, and the state that they change.

    The server calls `get` and `post` in one thread. A site must not change its state in `get`, because anyone may open
    any of its addresses.
    """

    task: str
    """Instruction for the model."""

    @abstractmethod
    def __init__(self, random: Random) -> None:
        """Create the site with a task that `random` decides."""

    @abstractmethod
    def get(self, path: str, query: Mapping[str, str]) -> Answer:
        """Return the page at a path, e.g. "cart". The start page is ""."""

    @abstractmethod
    def post(self, path: str, form: Mapping[str, str]) -> Answer:
        """Change the state with a form that was sent to a path."""

    @abstractmethod
    def checks(self) -> list[bool]:
        """Return the conditions of success, each True if the state fulfills it. An untouched site fulfills none."""


def render(page: str, title: str, **values: object) -> Html:
    """Return a page from `pages/<page>.html`, with escaped values for its placeholders."""
    body = Html(_template(page).substitute({name: escape_html(value) for name, value in values.items()}))
    return Html(_template("base").substitute(title=escape(title), body=body))


def escape_html(value: object) -> Html:
    """Return a value as HTML."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def hidden(**values: object) -> Html:
    """Return the hidden fields of a form."""
    fields = (f'<input type="hidden" name="{name}" value="{escape_html(value)}">' for name, value in values.items())
    return Html("".join(fields))


@cache
def _template(page: str) -> Template:
    return Template(files(__package__).joinpath("pages", f"{page}.html").read_text(encoding="utf-8"))
