"""Tasks on web pages, seen as screenshots: computer use without an account.

    environment.env_class=browser generator.max_turns=30

A row names a site (`button`, `registration`, `books` or `shop`) and a seed. The verifier reads the site's state on the
server, so text on the screen counts for nothing.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from skyrl_gym.adapters.actions import ActionError, parse_calls
from skyrl_gym.adapters.async_env import AsyncEnv
from skyrl_gym.adapters.observations import append_observation, user_message
from skyrl_gym.adapters.settings import read_settings
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.browser.actions import Click, Press, Scroll, Terminate, Type, describe_tool, parse_action
from skyrl_gym.envs.browser.chromium import Chromium, Tab, acquire, find_executable, release
from skyrl_gym.envs.browser.sites import Site, make_site
from skyrl_gym.envs.row import NO_ROW, read_extra_info, read_max_turns, whole_number
from skyrl_gym.error import InvalidSettings
from skyrl_gym.images import EncodedImage
from skyrl_gym.optional import require
from skyrl_gym.tools.messages import Content, append_to_system, format_tool_response, format_tools_prompt, join_contents
from skyrl_gym.tools.screen import Coordinates, Screen

T = TypeVar("T")

MAX_TURNS = 30
MIN_SIDE, MAX_SIDE = 200, 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserSettings:
    """The section `environment.skyrl_gym.browser`.

    width, height: size of a screenshot in pixels.
    coordinates: unit of the model's coordinates, ``pixels`` of the screenshot or ``thousandths`` of its size.
    executable: name or path of Chromium, or of a browser based on it. By default, the first that is installed.
    timeout_seconds: time limit of an action. An action that takes longer makes the rollout invalid.
    partial_credit: True to reward the fraction of conditions that the final state fulfills, instead of 0 or 1.
    """

    width: int = 640
    height: int = 480
    coordinates: Coordinates = "pixels"
    executable: str | None = None
    timeout_seconds: float | int = 30.0
    partial_credit: bool = False

    def __post_init__(self) -> None:
        """Raise InvalidSettings for a value out of range."""
        for name in ("width", "height"):
            if not MIN_SIDE <= getattr(self, name) <= MAX_SIDE:
                raise InvalidSettings(
                    f"environment.skyrl_gym.browser.{name}={getattr(self, name)} must be between {MIN_SIDE} and "
                    f"{MAX_SIDE}"
                )
        if not self.timeout_seconds > 0:
            raise InvalidSettings(
                f"environment.skyrl_gym.browser.timeout_seconds={self.timeout_seconds} must be above 0"
            )


class BrowserEnv(AsyncEnv):
    """A task on a site, from its first page until the model calls `terminate`.

    Every observation is a screenshot and a line of text. The reward is 1 if the site's state is right at the end, else
    0. A model that terminates with the status `failure` gets 0.

    Raises:
        InvalidSettings: the configuration is invalid, or Chromium is not installed.
        ValueError: the row has no seed, or its site is unknown.
        ToolFailure: Chromium fails.
    """

    validates_rows = True

    @classmethod
    def check_packages(cls) -> None:
        """Raise ImportError, with the install command, if Playwright is missing."""
        require("playwright", "browser", "pages in a browser")

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] = NO_ROW) -> None:
        super().__init__()
        self.check_packages()
        self.settings = read_settings(BrowserSettings, "browser", env_config, extras)
        self.max_turns = read_max_turns(extras, MAX_TURNS)
        self.screen = Screen(self.settings.width, self.settings.height, self.settings.coordinates)
        site, seed = _read_field(extras, "site"), _read_field(extras, "seed")
        self.site = make_site(site, whole_number(seed, "seed"))
        self._executable = find_executable(self.settings.executable)
        self._chromium: Chromium | None = None
        self._opening: Future[Tab] | None = None
        self._screenshot: EncodedImage | None = None
        self._is_over = False
        self._reward = 0.0
        self._n_actions = 0
        self._n_invalid = 0

    async def init_async(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Open the site. Return the prompt with the tool and the first screenshot."""
        if self._chromium is not None:
            raise RuntimeError("this episode has started; create a new BrowserEnv for the next episode")
        self._chromium = acquire(self._executable)
        self._opening = self._chromium.submit(
            self._chromium.open_site(self.site, self.screen, self.settings.timeout_seconds)
        )
        try:
            # A tab that is cancelled while it opens would be lost. `_release` waits for it instead.
            await asyncio.shield(asyncio.wrap_future(self._opening))
            await self._take_screenshot()
        except BaseException:
            await self._release()
            raise
        prompt = append_to_system(prompt, format_tools_prompt([describe_tool(self.screen)]))
        return append_observation(prompt, self._show(self.screen.description)), {}

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        """Perform the actions in a reply, in order, until one is invalid."""
        if self._opening is None or self._is_over:
            raise RuntimeError("this episode is over" if self._is_over else "call init before step")
        self.turns += 1
        metadata: dict[str, Any] = {"answer": None}
        try:
            calls = parse_calls(action)
            if not calls:
                raise ActionError("Your reply calls no tool.")
            for call in calls:
                parsed = parse_action(call, self.screen)
                self._n_actions += 1
                if isinstance(parsed, Terminate):
                    return self._end(parsed.status == "success", metadata | {"answer": parsed.answer})
                text = await self._perform(parsed)
        except ActionError as error:
            self._n_invalid += 1
            text = f"Error: {error}"
        if self.turns >= self.max_turns:
            return self._end(True, metadata)
        await self._take_screenshot()
        observation = user_message(format_tool_response(self._show(text)))
        return BaseTextEnvStepOutput(observations=[observation], reward=0.0, done=False, metadata=metadata)

    async def grade_unfinished_async(self) -> float:
        """Grade an episode that the trainer ended."""
        return float(self._end(True, {})["reward"] or 0.0)

    def get_metrics(self) -> dict[str, Any]:
        """Return the numbers of turns, actions and invalid replies, and 1 if the task was solved."""
        return {
            "steps": self.turns,
            "actions": self._n_actions,
            "invalid_actions": self._n_invalid,
            "solved": int(self._reward == 1.0),
        }

    async def _perform(self, action: Any) -> str:
        """Perform an action and return a line of text for the model."""
        await self._run(self._tab.perform(action))
        match action:
            case Click(x, y):
                return f"Clicked at ({x}, {y})."
            case Type(text):
                return f"Typed {len(text)} characters."
            case Press(key):
                return f"Pressed {key}."
            case Scroll(pixels):
                return f"Scrolled {'down' if pixels >= 0 else 'up'} by {abs(pixels)} pixels."
        return "Waited."

    async def _take_screenshot(self) -> None:
        self._screenshot = await self._run(self._tab.take_screenshot())

    @property
    def _tab(self) -> Tab:
        assert self._opening is not None
        return self._opening.result()

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in Chromium's event loop."""
        assert self._chromium is not None
        return await asyncio.wrap_future(self._chromium.submit(coroutine))

    def _show(self, text: str) -> Content:
        """Return the current screenshot with a line of text."""
        return join_contents([[{"type": "image", "image": self._screenshot}], text])

    def _end(self, is_claimed: bool, metadata: dict[str, Any]) -> BaseTextEnvStepOutput:
        """Grade the state of the site. `is_claimed` is False if the model gave up."""
        self._is_over = True
        checks = self.site.checks()
        score = fmean(checks) if self.settings.partial_credit else float(all(checks))
        self._reward = score if is_claimed else 0.0
        return BaseTextEnvStepOutput(
            observations=[], reward=self._reward, done=True, metadata=metadata | {"checks": checks}
        )

    async def _release(self) -> None:
        if (closing := self._start_closing()) is not None:
            await asyncio.wrap_future(closing)

    def _abandon(self) -> None:
        if (closing := self._start_closing()) is not None:
            closing.result()

    def _start_closing(self) -> Future[None] | None:
        chromium, opening = self._chromium, self._opening
        self._opening = None
        if chromium is None or opening is None or chromium.is_ended:
            return None
        return chromium.submit(_close(chromium, opening, self.site))


async def _close(chromium: Chromium, opening: Future[Tab], site: Site) -> None:
    """Close an episode's tab, once it is open. Runs in Chromium's event loop."""
    try:
        await asyncio.gather(asyncio.wrap_future(opening), return_exceptions=True)
        if opening.exception() is None:
            await chromium.close_site(site, opening.result())
    finally:
        release(chromium)


def _read_field(extras: Mapping[str, Any], name: str) -> Any:
    """Return a column of a row, or else a field of its `extra_info`."""
    value = extras.get(name)
    return read_extra_info(extras).get(name) if value is None else value
