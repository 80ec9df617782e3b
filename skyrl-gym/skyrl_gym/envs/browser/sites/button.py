"""A single button: the simplest task of computer use."""

from collections.abc import Mapping
from random import Random

from skyrl_gym.envs.browser.sites.base import Answer, Redirect, Site, render

TITLE = "Door"
WIDTH, HEIGHT = 28, 24
"""Size of the button in percent of the screenshot."""
TOP = 18
"""Where the space for the button starts, below the page's header, in percent."""


class ButtonSite(Site):
    """A page with one button, which is in a different place in each task. It must be pressed once."""

    task = "Press the button, then terminate."

    def __init__(self, random: Random) -> None:
        self.left = round(random.uniform(0, 100 - WIDTH), 1)
        self.top = round(random.uniform(TOP, 100 - HEIGHT), 1)
        self._n_presses = 0

    def get(self, path: str, query: Mapping[str, str]) -> Answer:
        if path == "open":
            return render("message", TITLE, message="The door is open.") if self._n_presses else Redirect("./")
        if path != "":
            return None
        return render("button", TITLE, left=self.left, top=self.top, width=WIDTH, height=HEIGHT)

    def post(self, path: str, form: Mapping[str, str]) -> Answer:
        if path != "press":
            return None
        self._n_presses += 1
        return Redirect("open")

    def checks(self) -> list[bool]:
        return [self._n_presses == 1]
