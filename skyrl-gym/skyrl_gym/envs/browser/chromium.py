"""Chromium, shared by the episodes of a process and driven by Playwright in a separate thread.

Chromium takes a second to start, so it keeps running for `LINGER_S` after the last episode. Every episode has its own
page, with its own history. Pages of equal size share a browser context, because a new one takes as long as the rest of
a short episode. A context also holds cookies and stored data, but the sites set no cookies and their pages run no
scripts.

Chromium reaches only the server of the sites. It connects to that server whatever the address of a page is, and the
server refuses all addresses except those of its sites.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import shutil
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_gym.adapters.background_loop import BackgroundLoop
from skyrl_gym.envs.browser.actions import Action, Click, Press, Scroll, Type, Wait
from skyrl_gym.envs.browser.server import SiteServer
from skyrl_gym.envs.browser.sites.base import Site
from skyrl_gym.error import InvalidSettings, ToolFailure
from skyrl_gym.images import EncodedImage, read_image
from skyrl_gym.tools.screen import Screen

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page, Playwright, Request

LINGER_S = 30.0
CLOSE_S = 10.0  # maximum time to close Chromium or a page
EXECUTABLES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")

logger = logging.getLogger(__name__)
T = TypeVar("T")

TWO_FRAMES = """() => new Promise(done => {
    requestAnimationFrame(() => requestAnimationFrame(done));
    setTimeout(done, 1000);
})"""
"""Waits for two frames, or for a second if a busy machine draws none."""


def find_executable(executable: str | None) -> str:
    """Return the path of Chromium. Raise InvalidSettings if it does not exist."""
    found = next(filter(None, map(shutil.which, [executable] if executable else EXECUTABLES)), None)
    if found is None:
        problem = f"{executable!r} is not a program" if executable else f"none of {', '.join(EXECUTABLES)} is installed"
        raise InvalidSettings(
            f"environment.skyrl_gym.browser.executable: {problem}; run apt install chromium, or set the path of a "
            "browser based on Chromium"
        )
    return found


class Tab:
    """An episode's page. Its methods run in Chromium's event loop."""

    def __init__(self, page: Page, slots: asyncio.Semaphore, timeout_s: float) -> None:
        """Own a page. An action takes one of the `slots`, and at most `timeout_s` from then on."""
        self.page = page
        self._slots = slots
        self._timeout_s = timeout_s
        self._requests: set[Request] = set()  # under way
        page.on("request", lambda request: self._requests.add(request))
        for event in ("requestfinished", "requestfailed"):
            page.on(event, lambda request: self._requests.discard(request))

    async def open(self, url: str) -> None:
        """Open a page. Raise ToolFailure if Chromium fails."""
        async with self._slots, _limit("open a page", self._timeout_s):
            await self.page.goto(url)
            await self._settle()

    async def perform(self, action: Action) -> None:
        """Perform an action and wait for its effect. Raise ToolFailure if Chromium fails."""
        async with self._slots, _limit(f"perform {action}", self._timeout_s):
            match action:
                case Click(x, y):
                    await self.page.mouse.click(x, y)
                case Type(text):
                    await self.page.keyboard.type(text)
                case Press(key):
                    await self.page.keyboard.press(key)
                case Scroll(pixels):
                    await self.page.evaluate("y => window.scrollBy({top: y, behavior: 'instant'})", pixels)
                case Wait(seconds):
                    await asyncio.sleep(seconds)
            await self._settle()

    async def take_screenshot(self) -> EncodedImage:
        """Return a screenshot. Raise ToolFailure if Chromium fails."""
        async with self._slots, _limit("take a screenshot", self._timeout_s):
            return read_image(await self.page.screenshot(type="png", animations="disabled", caret="hide"))

    async def close(self) -> None:
        """Close the page. Chromium may be gone."""
        from playwright.async_api import Error

        with suppress(Error, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.page.close()

    async def _settle(self) -> None:
        """Wait until no request is under way and two frames were drawn.

        The browser reports a click as done before it loads the next page. Two frames later, the request has started.
        """
        from playwright.async_api import Error

        while True:
            try:
                await self.page.evaluate(TWO_FRAMES)
            except Error:  # the page was replaced meanwhile
                if self.page.is_closed():
                    raise
                await self.page.wait_for_load_state()
            else:
                if not self._requests:
                    return


@asynccontextmanager
async def _limit(purpose: str, timeout_s: float) -> AsyncIterator[None]:
    """Raise ToolFailure if Chromium fails or takes too long: the model has not caused it."""
    from playwright.async_api import Error

    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise ToolFailure(
            f"Chromium could not {purpose} within {timeout_s:g} s; raise environment.skyrl_gym.browser.timeout_seconds"
        ) from error
    except Error as error:
        raise ToolFailure(f"Chromium could not {purpose}: {error.message.partition(chr(10))[0]}") from error


class Chromium:
    """A Chromium process, the server of its sites, and the thread that drives both."""

    def __init__(self, executable: str) -> None:
        self.executable = executable
        self.n_episodes = 0
        self.timer: threading.Timer | None = None  # ends it, if no episode needs it
        self.is_ended = False
        self._loop = BackgroundLoop("chromium")
        self._slots = asyncio.Semaphore(max(2, os.cpu_count() or 1))
        self._is_starting = asyncio.Lock()
        self._server: SiteServer | None = None
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._contexts: dict[Screen, BrowserContext] = {}

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the event loop of the thread."""
        return self._loop.submit(coroutine)

    async def open_site(self, site: Site, screen: Screen, timeout_s: float) -> Tab:
        """Serve a site and open it in a new tab. Raise ToolFailure if Chromium fails."""
        async with self._slots, _limit(f"start ({self.executable})", timeout_s):
            tab = Tab(await self._new_page(screen), self._slots, timeout_s)
        assert self._server is not None
        try:
            await tab.open(self._server.add(site))
        except BaseException:
            await self.close_site(site, tab)
            raise
        return tab

    async def close_site(self, site: Site, tab: Tab) -> None:
        """Close a site's tab and stop serving it."""
        assert self._server is not None
        self._server.remove(site)
        await tab.close()

    def end(self) -> None:
        """End the process, the server and the thread."""
        self.is_ended = True
        try:
            self._loop.run(self._stop())
        finally:
            self._loop.close()

    async def _new_page(self, screen: Screen) -> Page:
        """Open a page. Start what is not running: the server, Playwright and Chromium."""
        from playwright.async_api import Error, async_playwright

        async with self._is_starting:
            if self._server is None:
                self._server = SiteServer()
                await self._server.start()
            try:
                self._playwright = self._playwright or await async_playwright().start()
                if self._browser is None or not self._browser.is_connected():
                    self._contexts.clear()
                    self._browser = await self._playwright.chromium.launch(
                        executable_path=self.executable,
                        handle_sigint=False,  # the first Ctrl-C lets the trainer finish its step
                        args=[f"--host-resolver-rules=MAP * {self._server.host}", "--no-proxy-server"],
                    )
                if screen not in self._contexts:
                    self._contexts[screen] = await self._browser.new_context(
                        viewport={"width": screen.width, "height": screen.height},
                        accept_downloads=False,
                        locale="en-US",
                        service_workers="block",
                    )
                return await self._contexts[screen].new_page()
            except Error:  # Playwright does not report all crashes, so the next episode starts both again
                await self._stop_browser()
                raise

    async def _stop_browser(self) -> None:
        playwright, self._playwright, self._browser = self._playwright, None, None
        self._contexts.clear()
        if playwright is not None:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await playwright.stop()  # closes the browser
            except Exception as error:  # noqa: BLE001, its driver or Chromium has crashed, and raises anything
                logger.debug("Playwright did not stop: %r", error)

    async def _stop(self) -> None:
        await self._stop_browser()
        if self._server is not None:
            await self._server.close()


_lock = threading.Lock()
_running: dict[str, Chromium] = {}
"""The Chromium of each executable. `_lock` guards it, and the episodes and timers of its values."""


def acquire(executable: str) -> Chromium:
    """Return the process's Chromium for an episode. The caller must `release` it."""
    with _lock:
        chromium = _running.get(executable) or Chromium(executable)
        _running[executable] = chromium
        chromium.n_episodes += 1
        if chromium.timer is not None:
            chromium.timer.cancel()
            chromium.timer = None
        return chromium


def release(chromium: Chromium) -> None:
    """End an episode's use. The last one ends Chromium after `LINGER_S`."""
    with _lock:
        chromium.n_episodes -= 1
        if chromium.n_episodes == 0:
            chromium.timer = threading.Timer(LINGER_S, _end_idle, [chromium])
            chromium.timer.daemon = True
            chromium.timer.start()


def end_all() -> None:
    """End every Chromium of this process now, also those that episodes use."""
    with _lock:
        ended = list(_running.values())
        _running.clear()
    for chromium in ended:
        if chromium.timer is not None:
            chromium.timer.cancel()
        chromium.end()


def _end_idle(chromium: Chromium) -> None:
    with _lock:
        if chromium.n_episodes or _running.get(chromium.executable) is not chromium:
            return
        del _running[chromium.executable]
    chromium.end()


def _forget() -> None:
    """Drop every Chromium in a forked child: they belong to the parent."""
    global _lock
    _lock = threading.Lock()
    _running.clear()


atexit.register(end_all)
os.register_at_fork(after_in_child=_forget)
