import copy
from typing import Any

import pytest

from skyrl_gym.envs.browser.sites import SITES, make_site
from skyrl_gym.envs.browser.sites.base import Html, Redirect, Site
from skyrl_gym.envs.browser.sites.books import QUESTIONS, BooksSite
from skyrl_gym.envs.browser.sites.registration import RegistrationSite
from skyrl_gym.envs.browser.sites.shop import ShopSite

PAGES = ("", "sent", "confirmed", "ordered", "cart", "checkout", "send", "select", "confirm", "add", "order", "open")
HOSTILE = "</td><script>alert('$title')</script>\""


@pytest.mark.parametrize("name", SITES)
def test_a_seed_decides_the_task(name: str) -> None:
    """The task's text or the start page differs."""

    def describe(seed: int) -> tuple[str, Any]:
        site = make_site(name, seed)
        return site.task, site.get("", {})

    tasks = [describe(seed) for seed in range(20)]
    assert tasks == [describe(seed) for seed in range(20)]
    assert len(set(tasks)) == 20
    assert not any(make_site(name, 0).checks())


@pytest.mark.parametrize("name", SITES)
def test_pages_change_no_state(name: str) -> None:
    site = make_site(name, 0)
    before = copy.deepcopy(vars(site))
    for page in PAGES:
        site.get(page, {"title": "x", "product": "x", "q": "x", "sort": "price"})
        assert vars(site) == before
    assert site.get("no/such/page", {}) is None
    assert site.post("no/such/page", {}) is None


def test_typed_text_is_escaped() -> None:
    def pages(site: Site, path: str, form: dict[str, str]) -> list[Any]:
        return [site.post(path, form), site.get("", {"q": HOSTILE, "sort": HOSTILE})]

    shop = make_site("shop", 0)
    shop.post("add", {"product": next(iter(shop._prices))})  # type: ignore[attr-defined]
    forms = [
        *pages(make_site("registration", 0), "send", {"first_name": HOSTILE}),
        *pages(make_site("books", 0), "confirm", {"sort": HOSTILE}),
        *pages(shop, "order", {"name": HOSTILE}),
    ]
    assert all(isinstance(page, Html) for page in forms)
    assert not any("<script" in page for page in forms)
    assert "&lt;script" in forms[0]


def test_registration_is_sent_once() -> None:
    site = make_site("registration", 0)
    assert isinstance(site, RegistrationSite)
    values = site._expected
    incomplete = site.post("send", values | {"email": " "})
    assert "Please fill in all fields." in str(incomplete)
    assert f'value="{values["first_name"]}"' in str(incomplete)
    assert site.get("sent", {}) == Redirect("./")
    assert not any(site.checks())
    assert site.post("send", {name: f" {value} " for name, value in values.items()}) == Redirect("sent")
    assert all(site.checks())
    site.post("send", values)
    assert site.checks() == [False, *[True] * 5]


@pytest.mark.parametrize("seed", range(8))
def test_the_right_book_is_the_only_one(seed: int) -> None:
    site = make_site("books", seed)
    assert isinstance(site, BooksSite)
    question = next(question for question in QUESTIONS if f" {question} " in site.task)
    books = [book for book in site._books if f"by {book.author}:" in site.task]
    assert len(books) == 6
    assert sorted(books, key=QUESTIONS[question])[-1] == site._expected
    assert len({QUESTIONS[question](book) for book in books}) == 6
    assert "Please select a book." in str(site.post("confirm", {}))
    wrong = next(book for book in site._books if book != site._expected)
    for book in (wrong, site._expected):
        assert site.post("select", {"title": book.title, "sort": "year"}) == Redirect("./?sort=year")
    site.post("select", {"title": "no such book"})
    assert f"<b>{site._expected.title}</b>" in str(site.get("", {"sort": "price"}))
    assert site.post("confirm", {}) == Redirect("confirmed")
    assert site.checks() == [True]


def test_the_shop_takes_exactly_what_was_ordered() -> None:
    site = make_site("shop", 0)
    assert isinstance(site, ShopSite)
    order = site._expected
    address = {"name": order.name, "address": order.address}
    assert site.post("order", address) == Redirect("cart")
    assert site.get("checkout", {}) == Redirect("cart")
    extra = next(name for name in site._prices if name not in order.items)
    for product in (extra, *(name for name, n in order.items.items() for _ in range(n)), "no such product"):
        site.post("add", {"product": product, "q": "a b"})
    assert f"1 x {extra}" in str(site.get("cart", {}))
    assert site.post("remove", {"product": extra}) == Redirect("cart")
    assert site.post("order", address) == Redirect("ordered")
    assert all(site.checks())
    site.post("add", {"product": extra})
    site.post("order", address)
    assert site.checks() == [False, False, True, True]
