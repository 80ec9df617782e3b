"""A player that solves every task of the environment `browser` with clicks and keys, as a model would.

It knows the right values and finds elements in the page. A model reads both from the task and the screenshot.
"""

import json
from typing import Any

from playwright.async_api import Page

from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from skyrl_gym.envs.browser.env import BrowserEnv
from skyrl_gym.envs.browser.sites.books import BooksSite
from skyrl_gym.envs.browser.sites.button import ButtonSite
from skyrl_gym.envs.browser.sites.registration import RegistrationSite
from skyrl_gym.envs.browser.sites.shop import ShopSite


def act(action: str, **arguments: Any) -> str:
    """Return a reply with one call."""
    call = {"name": "computer", "arguments": {"action": action, **arguments}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


class Expert:
    """A player of an episode that has been started with `init`."""

    def __init__(self, env: BrowserEnv) -> None:
        self.env = env

    @property
    def page(self) -> Page:
        return self.env._tab.page

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine of Playwright."""
        assert self.env._chromium is not None
        return self.env._chromium.submit(coroutine).result()

    def play(self, action: str, **arguments: Any) -> BaseTextEnvStepOutput:
        return self.env.step(act(action, **arguments))

    def click(self, selector: str) -> BaseTextEnvStepOutput:
        """Click the first element that matches, after scrolling to it."""
        element, screen = self.page.locator(selector).first, self.env.screen
        if (y := self._center(element)[1]) > screen.height or y < 0:
            self.play("scroll", pixels=screen.height // 2 - y)
        x, y = self._center(element)
        if screen.coordinates == "thousandths":
            x, y = 1000 * x / screen.width, 1000 * y / screen.height
        return self.play("left_click", coordinate=[round(x), round(y)])

    def fill(self, name: str, text: str) -> None:
        self.click(f"input[name={name}]")
        self.play("type", text=text)

    def solve(self) -> BaseTextEnvStepOutput:
        """Play the episode to its end."""
        match self.env.site:
            case ButtonSite():
                self.click("button")
            case RegistrationSite(_expected=values):
                for name in ("first_name", "last_name", "email"):
                    self.fill(name, values[name])
                self.click(f"input[value={values['size']}]")
                if values["newsletter"]:
                    self.click("input[name=newsletter]")
                self.click("text=Send")
            case BooksSite(_expected=book):
                self.click("th >> text=Price")
                self.click(f"tr:has-text('{book.title}') button")
                self.click("text=Confirm")
            case ShopSite(_expected=order):
                for product, quantity in order.items.items():
                    self.click("input[name=q]")
                    self.play("key", keys=["ctrl", "a"])
                    self.play("type", text=product)
                    self.play("key", keys=["enter"])
                    for _ in range(quantity):
                        self.click(f"tr:has-text('{product}') button")
                self.click("nav >> text=Cart")
                self.click("text=Check out")
                self.fill("name", order.name)
                self.fill("address", order.address)
                self.click("text=Place order")
        return self.play("terminate", status="success")

    def _center(self, element: Any) -> tuple[float, float]:
        box = self.run(element.bounding_box())
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
