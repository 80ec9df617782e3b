"""A form to fill in."""

from collections.abc import Mapping
from random import Random

from skyrl_gym.envs.browser.sites.base import Answer, Html, Redirect, Site, render
from skyrl_gym.envs.browser.sites.people import draw_name

SIZES = ("S", "M", "L", "XL")
TITLE = "Summer run"
TEXTS = ("first_name", "last_name", "email")
FIELDS = (*TEXTS, "size", "newsletter")


class RegistrationSite(Site):
    """The registration for a run. It must be sent once, with the right values."""

    def __init__(self, random: Random) -> None:
        first, last = draw_name(random)
        self._expected = {
            "first_name": first,
            "last_name": last,
            "email": f"{first}.{last}{random.randint(10, 99)}@example.com".lower(),
            "size": random.choice(SIZES),
            "newsletter": random.choice(("", "yes")),
        }
        newsletter = "with the newsletter" if self._expected["newsletter"] else "without the newsletter"
        self.task = (
            f"Register {first} {last} for the run: e-mail {self._expected['email']}, shirt size "
            f"{self._expected['size']}, {newsletter}. Send the form once, then terminate."
        )
        self._sent: list[dict[str, str]] = []

    def get(self, path: str, query: Mapping[str, str]) -> Answer:
        if path == "sent":
            return render("message", TITLE, message="Your registration was sent.") if self._sent else Redirect("./")
        return _form("", {}) if path == "" else None

    def post(self, path: str, form: Mapping[str, str]) -> Answer:
        if path != "send":
            return None
        values = {name: form.get(name, "").strip() for name in FIELDS}
        if not all(values[name] for name in (*TEXTS, "size")):
            return _form("Please fill in all fields.", values)
        self._sent.append(values)
        return Redirect("sent")

    def checks(self) -> list[bool]:
        last = self._sent[-1] if self._sent else {}
        return [len(self._sent) == 1, *(last.get(name) == value for name, value in self._expected.items())]


def _form(error: str, values: Mapping[str, str]) -> Html:
    sizes = [
        f'<label><input type="radio" name="size" value="{size}"{_checked(values.get("size") == size)}>{size}</label>'
        for size in SIZES
    ]
    return render(
        "registration",
        TITLE,
        error=error,
        sizes=Html(" ".join(sizes)),
        newsletter=_checked(bool(values.get("newsletter"))),
        **{name: values.get(name, "") for name in TEXTS},
    )


def _checked(is_checked: bool) -> Html:
    return Html(" checked" if is_checked else "")
