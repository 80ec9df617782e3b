"""The pages in a browser, driven by the keyboard and the mouse."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_kit.example import row, write_example
from report_kit.runs import picture, write_images, write_metrics, write_rows

from skyrl_gym.envs.browser.chromium import find_executable
from skyrl_gym.error import InvalidSettings
from skyrl_gym.images import read_image
from skyrl_report.comparison import compare_runs
from skyrl_report.page import report_run
from skyrl_report.run_folder import RunFolder, format_marker
from skyrl_report.watch.server import Site, serving

try:
    EXECUTABLE = find_executable(None)
except InvalidSettings:
    pytest.skip("Chromium is not installed", allow_module_level=True)

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a page. The test fails if a page has an error or is wider than the window."""
    problems: list[str] = []
    pages: list[Any] = []

    def open_page(url: str, width: int = 1440) -> Any:
        page = chromium.new_page(viewport={"width": width, "height": 900})
        page.set_default_timeout(20_000)
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(url)
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.close()
    assert problems == []


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return write_example(tmp_path / "catch/shaped")


@pytest.mark.parametrize("width", [1440, 390])
def test_curves(folder: RunFolder, open_page: Callable[..., Any], width: int) -> None:
    report_run(folder)
    page = open_page(folder.report.as_uri(), width)
    card = page.locator("article", has=page.get_by_role("heading", name="Training reward"))
    assert card.locator("canvas").count() == 1
    assert card.locator("svg").count() == 0, "the static chart is replaced"
    plot = card.locator(".u-over")
    plot.hover(position={"x": 1, "y": 20})
    expect(card.locator(".legend")).to_contain_text("step 1")
    page.mouse.down()
    plot.hover(position={"x": 100, "y": 20})
    page.mouse.up()
    page.get_by_label("Horizontal axis").select_option("tokens")
    expect(card.locator(".legend")).to_contain_text("tokens")
    page.get_by_label("Any metric").fill("policy entr")
    page.wait_for_selector("#found canvas")
    assert page.locator("#found h3").all_inner_texts() == ["policy/policy_entropy"]
    page.get_by_role("link", name="response at step 8").first.click()
    expect(page.locator("#detail h2")).to_have_text("Evaluation at step 8, #0_0")


def test_seeds_are_bands(folder: RunFolder, tmp_path: Path, open_page: Callable[..., Any]) -> None:
    others = [write_example(tmp_path / f"catch/shaped{i}").path for i in range(2)]
    (others[1] / "config.yaml").write_text("trainer: {seed: 7, algorithm: {eps_clip_low: 0.1}}\n")
    page = open_page(compare_runs([folder.path, *others], tmp_path / "comparison.html").as_uri())
    legend = page.locator("article", has=page.get_by_role("heading", name="Entropy")).locator(".legend")
    assert legend.inner_text().split("\n")[:2] == ["shaped: mean of 2 0.6", "shaped1 0.6"]
    page.get_by_label("Seeds as bands").uncheck()
    expect(legend).not_to_contain_text("mean of")


@pytest.mark.parametrize("width", [1440, 390])
def test_trajectories_are_filtered_and_read_with_the_keyboard(
    folder: RunFolder, open_page: Callable[..., Any], width: int
) -> None:
    image = read_image(picture(0))
    write_images(folder.path / "trajectories/images", [image])
    call = '<tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call>'
    text = f"<think>Hm.</think>{format_marker(image.file_name)}<b>No</b>{call}"
    tokens = {"tokens": ["a", "b\n"], "logprobs": [-0.1, -2.0], "loss_mask": [1, 1], "advantages": [0.5, -0.5]}
    last = row(
        "99_0", -3.0, output_response=text, images=[image.file_name], env_metrics={"failure": "missed by 2"}, **tokens
    )
    write_rows(folder.trajectories(9), [last])
    write_metrics(folder.metrics, [{"reward/avg_raw_reward": 0.5}] * 10)
    report_run(folder)
    page = open_page(folder.browser.as_uri(), width)
    page.wait_for_selector(".entry")
    page.keyboard.press("/")
    page.keyboard.type("99")
    page.locator("[name=category]").select_option("missed by 2")
    assert page.locator("#count").inner_text() == "1 of 37 trajectories"
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector("#chat")
    assert page.locator("#detail h2").inner_text() == "Training at step 9, #99_0"
    chat = page.locator("#chat")
    assert "<b>No</b>" in chat.inner_text(), "text is not markup"
    assert chat.locator(".call b").inner_text() == "look"
    assert not chat.get_by_text("Hm.").is_visible(), "thoughts are folded"
    assert chat.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 48
    assert page.locator(".chip").count() == 17
    page.locator(".tools select").select_option("logprobs")
    assert page.locator(".tokens span").nth(1).get_attribute("title") == "logprobs: -2, probability 0.1353"
    page.keyboard.press("[")
    expect(page.locator("#detail h2")).to_contain_text("step 8")
    linked = open_page(page.url, width)
    linked.wait_for_selector("#chat")
    assert linked.locator("#detail h2").inner_text() == "Training at step 8, #99_1"


def test_a_watched_run_is_fresh(folder: RunFolder, open_page: Callable[..., Any]) -> None:
    with serving(Site(folder)) as server:
        page = open_page(server.address)
        expect(page.locator("#live")).to_contain_text("step 8 of 20 · running")
        page.get_by_label("Smoothing").fill("30")
        write_metrics(folder.metrics, [{"reward/avg_raw_reward": 0.5}] * 12)
        expect(page.locator("#live")).to_contain_text("step 11 of 20", timeout=20_000)
        expect(page.locator("#title")).to_contain_text("11 training steps")
        assert page.get_by_label("Smoothing").input_value() == "30", "the reader's settings stay"
        assert page.locator("article canvas").count() == 1
        browser = open_page(f"{server.address}trajectories.html")
        browser.wait_for_selector(".entry")
        browser.locator(".entry").first.click()
        browser.wait_for_selector("#chat")
        write_rows(folder.trajectories(9), [row("7_0", 1.0)])
        expect(browser.locator("#count")).to_have_text("37 trajectories", timeout=20_000)
        assert browser.locator(".entry.cursor").inner_text().startswith("eval 8"), "the opened one stays"
