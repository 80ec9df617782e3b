"""A small shop: search, cart and check-out."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from urllib.parse import urlencode

from skyrl_gym.envs.browser.sites.base import Answer, Html, Redirect, Site, escape_html, hidden, render
from skyrl_gym.envs.browser.sites.people import draw_address, draw_name

TITLE = "Corner shop"
KINDS = ("tea", "coffee", "honey", "jam", "soap", "candle")
VARIANTS = ("Green", "Black", "Forest", "Lemon", "Rose")
MAX_QUANTITY = 9


@dataclass(frozen=True, slots=True)
class Order:
    """An order that was placed."""

    items: Mapping[str, int]
    name: str
    address: str


class ShopSite(Site):
    """A shop. The right products must be ordered once, to the right address."""

    def __init__(self, random: Random) -> None:
        names = [f"{variant} {kind}" for kind in KINDS for variant in VARIANTS]
        self._prices = {name: random.randrange(200, 2000, 10) for name in random.sample(names, 20)}
        wanted = random.sample(list(self._prices), random.randint(1, 2))
        first, last = draw_name(random)
        self._expected = Order({name: random.randint(1, 2) for name in wanted}, f"{first} {last}", draw_address(random))
        items = " and ".join(f"{quantity} x {name}" for name, quantity in self._expected.items.items())
        self.task = (
            f"Order {items}. Name: {self._expected.name}. Address: {self._expected.address}. Place the order once, "
            "then terminate."
        )
        self._cart: Counter[str] = Counter()
        self._orders: list[Order] = []

    def get(self, path: str, query: Mapping[str, str]) -> Answer:
        match path:
            case "":
                return self._results(query.get("q", ""))
            case "cart":
                return self._cart_page()
            case "checkout":
                return self._checkout("", "", "") if self._cart else Redirect("cart")
            case "ordered":
                return self._page("message", message="Your order was placed.") if self._orders else Redirect("./")
        return None

    def post(self, path: str, form: Mapping[str, str]) -> Answer:
        product = form.get("product", "")
        match path:
            case "add":
                if product in self._prices and self._cart[product] < MAX_QUANTITY:
                    self._cart[product] += 1
                return Redirect("./?" + urlencode({"q": form.get("q", "")}))
            case "remove":
                self._cart.pop(product, None)
                return Redirect("cart")
            case "order":
                name, address = form.get("name", "").strip(), form.get("address", "").strip()
                if not self._cart:
                    return Redirect("cart")
                if not name or not address:
                    return self._checkout("Please fill in all fields.", name, address)
                self._orders.append(Order(dict(self._cart), name, address))
                self._cart.clear()
                return Redirect("ordered")
        return None

    def checks(self) -> list[bool]:
        if not self._orders:
            return [False] * 4
        last, expected = self._orders[-1], self._expected
        is_same = [last.items == expected.items, last.name == expected.name, last.address == expected.address]
        return [len(self._orders) == 1, *is_same]

    def _page(self, page: str, **values: object) -> Html:
        return render(page, f"{TITLE} · {self._cart.total()} in the cart", **values)

    def _results(self, q: str) -> Html:
        rows = [
            f'<tr><td>{escape_html(name)}<td>{price / 100:.2f}<td><form method="post" action="add">'
            f"{hidden(product=name, q=q)}<button>Add to cart</button></form>"
            for name, price in self._prices.items()
            if q.strip().lower() in name.lower()
        ]
        return self._page("shop", q=q, rows=Html("".join(rows) or "<tr><td>Nothing found."))

    def _cart_page(self) -> Html:
        rows = [
            f"<tr><td>{quantity} x {escape_html(name)}<td>{quantity * self._prices[name] / 100:.2f}<td>"
            f'<form method="post" action="remove">{hidden(product=name)}<button>Remove</button></form>'
            for name, quantity in self._cart.items()
        ]
        return self._page("cart", rows=Html("".join(rows) or "<tr><td>The cart is empty."))

    def _checkout(self, error: str, name: str, address: str) -> Html:
        return self._page("checkout", error=error, name=name, address=address)
