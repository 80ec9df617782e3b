"""Three small made-up SQLite databases, in the folder layout that the environment `text2sql` expects for Spider.

Their rows are always the same, so the correct answers to questions about them do not depend on a seed.
"""

import random
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import permutations
from pathlib import Path
from typing import Any

from skyrl_gym.envs.sql.env import FOLDERS

DATA = "spider"
"""The environment's database set (one of three) in whose folder these databases are written."""

Tables = Mapping[str, Sequence[tuple[Any, ...]]]

NAMES = ("Amara", "Bruno", "Chen", "Dalia", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kadri", "Lena")
SURNAMES = ("Abel", "Birk", "Cole", "Dorn", "Egede", "Frost", "Glas", "Holm", "Iversen", "Jansen", "Kern", "Lund")

SHOP = """
CREATE TABLE customers (customer_id INTEGER PRIMARY KEY, name TEXT, city TEXT, joined INTEGER);
CREATE TABLE products (product_id INTEGER PRIMARY KEY, name TEXT, category TEXT, price INTEGER);
CREATE TABLE orders (
    order_id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers (customer_id), ordered_on TEXT
);
CREATE TABLE order_items (
    order_id INTEGER REFERENCES orders (order_id),
    product_id INTEGER REFERENCES products (product_id),
    quantity INTEGER,
    PRIMARY KEY (order_id, product_id)
);
"""
LIBRARY = """
CREATE TABLE authors (author_id INTEGER PRIMARY KEY, name TEXT, country TEXT, born INTEGER);
CREATE TABLE books (
    book_id INTEGER PRIMARY KEY,
    title TEXT,
    author_id INTEGER REFERENCES authors (author_id),
    genre TEXT,
    published INTEGER,
    pages INTEGER
);
CREATE TABLE members (member_id INTEGER PRIMARY KEY, name TEXT, town TEXT);
CREATE TABLE loans (
    loan_id INTEGER PRIMARY KEY,
    book_id INTEGER REFERENCES books (book_id),
    member_id INTEGER REFERENCES members (member_id),
    lent_on TEXT,
    returned_on TEXT -- NULL while the book is out
);
"""
LEAGUE = """
CREATE TABLE teams (team_id INTEGER PRIMARY KEY, name TEXT, city TEXT, founded INTEGER);
CREATE TABLE players (
    player_id INTEGER PRIMARY KEY, name TEXT, team_id INTEGER REFERENCES teams (team_id), position TEXT, goals INTEGER
);
CREATE TABLE matches (
    match_id INTEGER PRIMARY KEY,
    home_id INTEGER REFERENCES teams (team_id),
    away_id INTEGER REFERENCES teams (team_id),
    home_goals INTEGER,
    away_goals INTEGER
);
"""


def shop(rng: random.Random) -> Tables:
    """Customers, products and orders."""
    cities = ("Oslo", "Porto", "Graz", "Turku")
    goods = {
        "garden": {"spade": 24, "watering can": 13, "hose": 37, "rake": 19},
        "kitchen": {"kettle": 32, "pan": 45, "bread knife": 17, "scale": 21},
        "office": {"desk lamp": 39, "stapler": 8, "notebook": 4, "chair": 120},
        "toys": {"kite": 15, "puzzle": 11, "yo-yo": 5},
    }
    products = [(name, category, price) for category, prices in goods.items() for name, price in prices.items()]
    n_orders = 40
    return {
        "customers": _number((name, rng.choice(cities), rng.randint(2015, 2023)) for name in NAMES),
        "products": _number(products),
        "orders": _number((rng.randint(1, len(NAMES) - 2), _day(rng, 2024)) for _ in range(n_orders)),
        "order_items": [
            (order, product, rng.randint(1, 5))
            for order in range(1, n_orders + 1)
            for product in rng.sample(range(1, len(products) + 1), rng.randint(1, 4))
        ],
    }


def library(rng: random.Random) -> Tables:
    """Authors, books and loans."""
    countries = rng.choices(("Norway", "Ghana", "Chile", "Japan"), k=len(SURNAMES))
    authors = zip(SURNAMES, countries, rng.sample(range(1900, 1990), len(SURNAMES)), strict=True)
    subjects = ("River", "Lighthouse", "Orchard", "Clock", "Harbour", "Letter", "Winter", "Garden", "Mirror", "Bridge")
    kinds = ("Old", "Last", "Hidden")
    titles = [f"The {kind} {subject}" for kind in kinds for subject in subjects]
    genres = ("novel", "poetry", "travel", "history")
    pages = rng.sample(range(90, 700), len(titles))
    books = [
        (title, rng.randint(1, 10), rng.choice(genres), rng.randint(1990, 2023), n)
        for title, n in zip(titles, pages, strict=True)
    ]
    loans = []
    for _ in range(50):
        lent_on = _day(rng, 2023)
        returned_on = None if rng.random() < 0.3 else _day(rng, 2024)
        loans.append((rng.randint(1, len(titles) - 3), rng.randint(1, len(NAMES) - 1), lent_on, returned_on))
    return {
        "authors": _number(authors),
        "books": _number(books),
        "members": _number((name, rng.choice(("Hill", "Ford", "Bay"))) for name in NAMES),
        "loans": _number(loans),
    }


def league(rng: random.Random) -> Tables:
    """Teams, players, and a season in which each pair of teams meets twice."""
    teams = ("Comets", "Foxes", "Gulls", "Herons", "Larks", "Otters")
    cities = ("Graz", "Porto", "Graz", "Turku", "Oslo", "Porto")
    positions = ("goalkeeper", "defender", "midfielder", "forward")
    names = rng.sample([f"{name} {surname}" for name in NAMES for surname in SURNAMES], 8 * len(teams))
    players = [
        (name, i // 8 + 1, positions[i % 4], 0 if i % 4 == 0 else rng.randint(0, 5 * (i % 4)))
        for i, name in enumerate(names)
    ]
    meetings = permutations(range(1, len(teams) + 1), 2)
    matches = [(*pair, rng.choice((0, 0, 1, 1, 2, 3, 4)), rng.choice((0, 0, 1, 1, 2, 3))) for pair in meetings]
    return {
        "teams": _number(zip(teams, cities, rng.sample(range(1890, 1990), len(teams)), strict=True)),
        "players": _number(players),
        "matches": _number(matches),
    }


DATABASES: Mapping[str, tuple[str, Callable[[random.Random], Tables]]] = {
    "sample_shop": (SHOP, shop),
    "sample_library": (LIBRARY, library),
    "sample_league": (LEAGUE, league),
}


def make_databases(folder: Path) -> list[Path]:
    """Write the databases below `folder`, for `environment.skyrl_gym.text2sql.db_path`. Return their files."""
    files = []
    for db_id, (schema, rows_of) in DATABASES.items():
        file = folder / FOLDERS[DATA] / db_id / f"{db_id}.sqlite"
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.partial")
        partial.unlink(missing_ok=True)
        with closing(sqlite3.connect(partial)) as connection, connection:
            connection.executescript(schema)
            for table, rows in rows_of(random.Random(db_id)).items():
                marks = ", ".join("?" * len(rows[0]))
                connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        partial.replace(file)
        files.append(file)
    return files


def _number(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(number, *row) for number, row in enumerate(rows, start=1)]


def _day(rng: random.Random, year: int) -> str:
    return f"{year}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
