"""A list to sort and select from."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from skyrl_gym.envs.browser.sites.base import Answer, Html, Redirect, Site, escape_html, hidden, render
from skyrl_gym.envs.browser.sites.people import FIRST_NAMES, LAST_NAMES

TITLE = "Library"
N_AUTHORS, N_BOOKS = 4, 24
ADJECTIVES = ("Silent", "Golden", "Broken", "Hidden", "Distant", "Winter", "Little", "Last")
NOUNS = ("Garden", "Letter", "Island", "Mirror", "Bridge", "Orchard")
COLUMNS = ("title", "author", "year", "price")


@dataclass(frozen=True, slots=True)
class Book:
    """A row of the list. `price` is in cents."""

    title: str
    author: str
    year: int
    price: int


QUESTIONS = {
    "cheapest": lambda book: -book.price,
    "most expensive": lambda book: book.price,
    "newest": lambda book: book.year,
    "oldest": lambda book: -book.year,
}


class BooksSite(Site):
    """A list of books. The right one must be selected and confirmed, once."""

    def __init__(self, random: Random) -> None:
        authors = [
            f"{first} {last}"
            for first, last in zip(
                random.sample(FIRST_NAMES, N_AUTHORS), random.sample(LAST_NAMES, N_AUTHORS), strict=True
            )
        ]
        titles = random.sample([f"The {adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS], N_BOOKS)
        years, prices = random.sample(range(1950, 2025), N_BOOKS), random.sample(range(500, 4000, 5), N_BOOKS)
        self._books = [
            Book(title, authors[i % N_AUTHORS], year, price)
            for i, (title, year, price) in enumerate(zip(titles, years, prices, strict=True))
        ]
        random.shuffle(self._books)
        question, author = random.choice(list(QUESTIONS)), random.choice(authors)
        self._expected = max((book for book in self._books if book.author == author), key=QUESTIONS[question])
        self.task = f"Reserve the {question} book by {author}: select it, confirm once, then terminate."
        self._selected: Book | None = None
        self._confirmed: list[Book] = []

    def get(self, path: str, query: Mapping[str, str]) -> Answer:
        if path == "confirmed":
            return render("message", TITLE, message="Your book is reserved.") if self._confirmed else Redirect("./")
        return self._list(query.get("sort", ""), "") if path == "" else None

    def post(self, path: str, form: Mapping[str, str]) -> Answer:
        sort = form.get("sort", "")
        if path == "select":
            self._selected = next((book for book in self._books if book.title == form.get("title")), self._selected)
            return Redirect(f"./?sort={sort}" if sort in COLUMNS else "./")
        if path == "confirm":
            if self._selected is None:
                return self._list(sort, "Please select a book.")
            self._confirmed.append(self._selected)
            return Redirect("confirmed")
        return None

    def checks(self) -> list[bool]:
        return [self._confirmed == [self._expected]]

    def _list(self, sort: str, error: str) -> Html:
        books = sorted(self._books, key=lambda book: getattr(book, sort)) if sort in COLUMNS else self._books
        return render(
            "books",
            TITLE,
            error=error,
            selected=self._selected.title if self._selected else "nothing",
            sort=hidden(sort=sort),
            rows=Html("".join(self._row(book, sort) for book in books)),
        )

    def _row(self, book: Book, sort: str) -> Html:
        cells = (book.title, book.author, book.year, f"{book.price / 100:.2f}")
        form = (
            f'<form method="post" action="select">{hidden(title=book.title, sort=sort)}<button>Select</button></form>'
        )
        is_selected = " class=selected" if book == self._selected else ""
        return Html(f"<tr{is_selected}>{''.join(f'<td>{escape_html(cell)}' for cell in cells)}<td>{form}")
