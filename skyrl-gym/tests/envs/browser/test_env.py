import asyncio
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from gym_kit.messages import user
from gym_kit.processes import KIT, is_running, kill, no_leaks, wait_until

from skyrl_gym.checkup.rules import Checkup
from skyrl_gym.envs.browser import chromium
from skyrl_gym.envs.browser.env import BrowserEnv
from skyrl_gym.envs.browser.sites import SITES
from skyrl_gym.envs.registration import EnvSpec
from skyrl_gym.error import ToolFailure
from skyrl_gym.images import find_images, join_texts
from skyrl_gym.runtime.validation import validate_prompt, validate_step_output

pytest.importorskip("playwright")
if not any(map(chromium.shutil.which, chromium.EXECUTABLES)):
    pytest.skip("Chromium is not installed", allow_module_level=True)

from gym_kit.browser_expert import Expert, act

pytestmark = pytest.mark.usefixtures("frozen_objects")  # tests that start many pages run every night


@pytest.fixture(scope="module", autouse=True)
def no_chromium_left() -> Iterator[None]:
    """Check that nothing runs after the tests."""
    with no_leaks():
        yield
        chromium.end_all()


@pytest.fixture
def start() -> Iterator[Callable[..., Expert]]:
    """Return a function that starts an episode and returns its expert. The episodes are closed afterwards."""
    envs: list[BrowserEnv] = []

    def start(site: str = "registration", seed: int = 1, max_turns: int = 40, **settings: Any) -> Expert:
        env = BrowserEnv(settings, {"extra_info": {"site": site, "seed": seed}, "max_turns": max_turns})
        envs.append(env)
        env.init(user(env.site.task))
        return Expert(env)

    yield start
    for env in envs:
        env.close()


@pytest.mark.parametrize(
    ("site", "seed"),
    [
        pytest.param(site, seed, marks=() if (site, seed) == ("registration", 1) else pytest.mark.nightly)
        for site in SITES
        for seed in (1, 2)
    ],
)
def test_the_expert_solves_every_site_and_an_empty_policy_none(
    site: str, seed: int, start: Callable[..., Expert]
) -> None:
    last = start(site, seed).solve()
    assert (last["reward"], last["done"], last["observations"]) == (1.0, True, [])
    for partial_credit in (False, True):
        env = start(site, seed, max_turns=2, partial_credit=partial_credit).env
        assert [env.step("")["reward"] for _ in range(2)] == [0.0, 0.0]
        assert env.get_metrics() == {"steps": 2, "actions": 0, "invalid_actions": 2, "solved": 0}


@pytest.mark.nightly
def test_coordinates_in_thousandths(start: Callable[..., Expert]) -> None:
    expert = start(coordinates="thousandths", width=800, height=300)
    assert expert.solve()["reward"] == 1.0


def test_observations_are_screenshots_with_a_line_of_text() -> None:
    with BrowserEnv({}, {"site": "shop", "seed": 1}) as env:
        prompt = validate_prompt(env.init(user(env.site.task)))
        assert '"name": "computer"' in prompt[0]["content"]
        (first,) = find_images(prompt)
        assert (first.width, first.height, first.mime_type) == (640, 480, "image/png")
        assert first.open().mode == "RGB"
        (same,) = find_images(validate_step_output(env.step("I look around."))["observations"])
        assert same == first
        output = validate_step_output(env.step(act("scroll", pixels=-300)))
        (scrolled,) = find_images(output["observations"])
        assert scrolled != first
        text = join_texts(output["observations"][0]["content"])
        assert text == "<tool_response>\n\nScrolled down by 300 pixels.\n</tool_response>"


@pytest.mark.nightly
def test_several_calls_run_in_order_up_to_an_invalid_one(start: Callable[..., Expert]) -> None:
    expert = start()
    calls = act("left_click", coordinate=[200, 75]) + act("type", text="Ada") + act("fly") + act("type", text="!")
    output = expert.env.step(calls)
    assert "action='fly' is unknown" in join_texts(output["observations"][0]["content"])
    assert expert.run(expert.page.input_value("input[name=first_name]")) == "Ada"


def test_text_on_the_screen_does_not_pass(start: Callable[..., Expert]) -> None:
    expert = start("shop")
    expert.fill("q", "Your order was placed. <script>document.title = 'solved'</script>")
    expert.play("key", keys=["enter"])
    assert expert.run(expert.page.title()) == "Corner shop · 0 in the cart"
    last = expert.play("terminate", status="success", answer="Your order was placed. reward=1")
    assert (last["reward"], last["metadata"]["answer"]) == (0.0, "Your order was placed. reward=1")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("site", "page"), [("button", "open"), ("registration", "sent"), ("books", "confirmed"), ("shop", "ordered")]
)
def test_the_address_of_the_success_page_does_not_pass(site: str, page: str, start: Callable[..., Expert]) -> None:
    expert = start(site, partial_credit=True)
    expert.run(expert.page.goto(expert.page.url + page))
    assert not expert.page.url.endswith(page)
    assert expert.play("terminate", status="success")["reward"] == 0.0


@pytest.mark.nightly
def test_a_second_submission_and_a_declared_failure_do_not_pass(start: Callable[..., Expert]) -> None:
    expert = start("books")
    expert.env.step = lambda reply: {} if "terminate" in reply else BrowserEnv.step(expert.env, reply)  # type: ignore
    expert.solve()
    expert.run(expert.page.go_back())
    expert.click("text=Confirm")
    del expert.env.step
    assert expert.play("terminate", status="success")["reward"] == 0.0

    expert = start("registration")
    expert.env.step = lambda reply: BrowserEnv.step(expert.env, reply.replace("success", "failure"))  # type: ignore
    assert expert.solve()["reward"] == 0.0
    with pytest.raises(RuntimeError, match="this episode is over"):
        expert.play("wait")


@pytest.mark.nightly
def test_partial_credit_and_the_last_turn(start: Callable[..., Expert]) -> None:
    expert = start("registration", partial_credit=True, max_turns=40)
    for name in ("first_name", "last_name", "email"):
        expert.fill(name, "?")
    expert.click("input[value=S]")
    expert.click("text=Send")
    expert.env.max_turns = expert.env.turns + 1
    last = expert.play("wait")
    assert last["done"]
    assert last["reward"] == sum(last["metadata"]["checks"]) / 6 < 1
    assert asyncio.run(expert.env.grade_unfinished_async()) == last["reward"]


ATTEMPTS = """async port => Promise.all([
    fetch(`http://127.0.0.1:${port}/`, {mode: "no-cors"}).then(answer => answer.type, () => "failed"),
    new Promise(done => {
        const socket = new WebSocket(`ws://127.0.0.1:${port}/`);
        socket.onopen = socket.onerror = event => done(event.type);
    }),
    new Promise(done => {
        const image = new Image();
        image.onload = image.onerror = event => done(event.type);
        image.src = `http://127.0.0.1:${port}/a.png`;
    }),
])"""


@pytest.mark.nightly
def test_pages_reach_only_their_own_server(start: Callable[..., Expert]) -> None:
    expert = start()

    async def visit(url: str) -> int:
        response = await expert.page.goto(url)
        return response.status if response is not None else 0

    with socket.create_server(("127.0.0.1", 0)) as outside:
        port = outside.getsockname()[1]
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", "example.com", "93.184.216.34"):
            assert expert.run(visit(f"http://{host}/")) == 404, host
        expert.run(visit("about:blank"))  # without the policy of the sites' pages
        assert "open" not in expert.run(expert.page.evaluate(ATTEMPTS, port))
        outside.settimeout(0)
        with pytest.raises(BlockingIOError):
            outside.accept()


@pytest.mark.nightly
def test_an_episode_cannot_open_the_site_of_a_different_one(start: Callable[..., Expert]) -> None:
    expert = start()
    server = expert.page.url.rpartition("/")[0].rpartition("/")[0]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{server}/{'0' * 32}/")
    url = expert.page.url
    expert.env.close()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url)


@pytest.mark.nightly
def test_episodes_share_a_chromium_that_ends_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    chromium.end_all()
    monkeypatch.setattr(chromium, "LINGER_S", 0.2)
    row = {"site": "shop", "seed": 1}
    with no_leaks():
        with BrowserEnv({}, row) as first, BrowserEnv({}, row) as second:
            first.init(user("Begin."))
            (browser,) = _find_browsers()
            second.init(user("Begin."))
            assert _find_browsers() == [browser]
        with BrowserEnv({}, row) as third:
            third.init(user("Begin."))
            assert third._chromium is first._chromium


def _find_children(is_wanted: Callable[[list[str]], bool]) -> list[int]:
    """Return the processes that descend from this one and have such a command line."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if is_wanted(process.cmdline()):
                found.append(process.pid)
    return found


def _find_browsers() -> list[int]:
    """Return the processes of Chromium without its helpers."""
    return _find_children(lambda line: "--remote-debugging-pipe" in line and not any("--type=" in arg for arg in line))


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["init", "step"])
async def test_a_cancelled_episode_leaves_no_page(method: str) -> None:
    env = BrowserEnv({}, {"site": "shop", "seed": 1})
    if method == "step":
        await env.init_async(user("Begin."))
        task = asyncio.create_task(env.step_async(act("wait", time=1)))
    else:
        task = asyncio.create_task(env.init_async(user("Begin.")))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await env.close_async()
    await env.close_async()
    assert env._chromium is not None
    assert env._chromium._browser is not None
    assert [context.pages for context in env._chromium._browser.contexts] in ([], [[]])
    assert env._chromium._server is not None
    assert env._chromium._server._sites == {}


PROGRAM = """
from gym_kit.browser_expert import act
from skyrl_gym.envs.browser.env import BrowserEnv
env = BrowserEnv({}, {"site": "shop", "seed": 1})
env.init([{"role": "user", "content": "Begin."}])
print("ready", flush=True)
while True:
    env.step(act("wait", time=1))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_leaves_no_chromium(end: signal.Signals, tmp_path: Path) -> None:
    paths = os.pathsep.join([str(KIT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"ready\n"
        started = psutil.Process(program.pid).children(recursive=True)
        assert len(started) > 2
        os.killpg(program.pid, end)
    wait_until(lambda: not any(is_running(process.pid) for process in started))


@pytest.mark.nightly
def test_a_crash_ends_its_episodes_and_the_next_one_starts_a_chromium(
    start: Callable[..., Expert], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chromium.end_all()
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a crash leaves its temporary files
    expert = start()
    kill(_find_browsers())
    with pytest.raises(ToolFailure, match="Chromium could not perform Wait"):
        expert.play("wait")
    assert start("books").solve()["reward"] == 1.0
    kill(_find_children(lambda line: "run-driver" in line))
    with pytest.raises(ToolFailure, match="Chromium could not start"):
        start("books")
    assert start("books").solve()["reward"] == 1.0
    chromium.end_all()


@pytest.mark.nightly
def test_an_action_that_takes_too_long_is_not_the_model_s_fault(start: Callable[..., Expert]) -> None:
    expert = start()
    expert.env._tab._timeout_s = 0.5
    with pytest.raises(ToolFailure, match=r"within 0\.5 s; raise environment\.skyrl_gym\.browser\.timeout_seconds"):
        expert.play("wait", time=1)


@pytest.mark.nightly
def test_equal_replies_have_equal_screenshots(start: Callable[..., Expert]) -> None:
    experts = [start("books", 1), start("books", 1)]
    replies = [act("left_click", coordinate=[380, 90]), act("scroll", pixels=-200), act("key", keys=["tab"])]
    for reply in replies:
        with ThreadPoolExecutor(2) as threads:
            outputs = list(threads.map(lambda expert, reply=reply: expert.env.step(reply), experts))
        first, second = (find_images(output["observations"]) for output in outputs)
        assert first == second


@pytest.mark.nightly
@pytest.mark.nightly
def test_the_environment_follows_the_rules_of_training() -> None:
    row = {"site": "books", "seed": 1, "max_turns": 2, "prompt": user("Begin.")}
    findings = list(Checkup(EnvSpec("browser", BrowserEnv), row).run())
    assert [finding for finding in findings if finding.verdict != "passed"] == []


@pytest.mark.parametrize(
    ("settings", "row", "message"),
    [
        ({"width": 100}, {}, r"browser\.width=100 must be between 200 and 4000"),
        ({"timeout_seconds": 0}, {}, r"browser\.timeout_seconds=0 must be above 0"),
        ({"coordinates": "percent"}, {}, r"browser\.coordinates='percent'"),
        ({"executable": "no-such-browser"}, {}, "'no-such-browser' is not a program; run apt install chromium"),
        ({}, {"seed": None}, "seed=None must be a whole number"),
        ({}, {"site": "bank"}, "site='bank' is unknown; use one of button, registration, books, shop"),
    ],
)
def test_settings_and_rows_are_checked(settings: dict[str, Any], row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BrowserEnv(settings, {"site": "shop", "seed": 1, **row})
