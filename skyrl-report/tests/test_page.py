import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image
from report_kit.pages import Page
from report_kit.runs import picture, write_images, write_metrics, write_rows

from skyrl_gym.images import EncodedImage, read_image
from skyrl_report.page import write_report
from skyrl_report.run_folder import RunFolder, format_marker
from skyrl_report.text import MAX_THUMBNAILS

METRICS = {
    "reward/avg_raw_reward": 0.5,
    "environment/catch_rate": 0.5,
    "policy/policy_kl": 0.01,
    "policy/policy_entropy": 1.0,
    "policy/grad_norm": 0.7,
    "policy/policy_lr": 1e-6,
    "generate/avg_num_tokens": 12.0,
    "timing/generate": 1.0,
    "timing/step": 2.0,
    "trainer/tokens_per_second": 4000.0,
    "eval/all/avg_score": 0.5,
    "eval/all/pass_at_1": 0.5,
    "eval/environment/catch_rate": 0.5,
    "eval/synthetic_catch/avg_score": 0.5,
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    path = tmp_path / "catch/shaped"
    path.mkdir(parents=True)
    return RunFolder(path)


def _write(folder: RunFolder, **kwargs: Any) -> tuple[Page, str]:
    text = write_report(folder, **kwargs).read_text("utf-8")
    return Page(text), text


def test_an_empty_run_has_a_page(folder: RunFolder) -> None:
    page, text = _write(folder)
    assert page.headings == ["shaped"]
    assert "No metrics yet." in text


def test_a_complete_run_has_every_section_and_loads_no_urls(folder: RunFolder) -> None:
    write_metrics(folder.metrics, [METRICS] * 3)
    folder.config_yaml.write_text("trainer: {seed: 7, policy: {model: {path: tiny}}}\n")
    for step in (0, 2):
        row = {"input_prompt": "Catch!", "output_response": "L", "score": [1.0], "env_class": "catch"}
        write_rows(folder.evals(step) / "synthetic_catch.jsonl", [row])
    page, text = _write(
        folder, command="make catch SEED=7", baselines={"eval/environment/catch_rate": {"random play": 0.2}}
    )
    assert page.headings == [
        "shaped",
        "Learning curves",
        "Training metrics",
        "Time",
        "Evaluations",
        "Sample episodes",
        "Settings",
        "All metrics",
    ]
    assert page.loads == []
    assert set(re.findall(r"https?://[^\s\"')]*", text)) == {"https://github.com/leeoniya/uPlot"}, "in a comment"
    assert not re.search(r"url\(|@import", text)
    for expected in (
        "environment: catch",
        "make catch SEED=7",
        "random play 20%",
        "response at step 0",
        "are in evals/",
        "seed: 7",
    ):
        assert expected in text


@hypothesis_settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.dictionaries(st.sampled_from(sorted(METRICS)), st.floats(allow_subnormal=False, width=32)), max_size=4
    )
)
def test_any_metrics_and_values_give_a_valid_page(tmp_path_factory: Any, rows: list[dict[str, float]]) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    write_metrics(folder.metrics, rows)
    _write(folder)


def test_a_rewritten_page_keeps_the_command(folder: RunFolder) -> None:
    command = "python train.py 'a=<b> & \"c\"'"
    _write(folder, command=command)
    write_metrics(folder.metrics, [METRICS])
    _, text = _write(folder)
    assert command in html.unescape(text)
    assert _write(folder)[1] == text


def test_responses_are_escaped(folder: RunFolder) -> None:
    row = {
        "input_prompt": "<|im_start|>user\n<b>hi</b>",
        "output_response": "<script>alert(1)</script><|im_end|>",
        "score": None,
        "error": "<i>bad</i>",
        "env_extras": {"answer": "<u>"},
        "data_source": "<s>",
    }
    scored = row | {"score": 1.0}
    write_rows(folder.evals(0) / "a.jsonl", (row, scored))
    _, text = _write(folder)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert not re.search("<(script|b|i|u)>", text)
    assert '<span class="token">&lt;|im_end|&gt;</span>' in text
    assert "1 of 2 rollouts failed and have no score; the first: &lt;i&gt;bad&lt;/i&gt;" in text


def _write_episode(folder: RunFolder, images: Sequence[EncodedImage], text: str, n_files: int | None = None) -> None:
    """Write an evaluation at step 0 with one episode, and the files of its first `n_files` images (default: all)."""
    row = {"input_prompt": "Look!", "output_response": text, "score": 1.0, "images": [i.file_name for i in images]}
    write_rows(folder.evals(0) / "a.jsonl", [row])
    write_images(folder.path / "evals/images", images[:n_files])


def test_images_are_shown_in_place_and_link_to_their_files(folder: RunFolder, tmp_path: Path) -> None:
    """The page is self-contained, and its links are relative, so that the run folder may be moved."""
    wide, tiny = read_image(picture(0, 400, 300)), read_image(Image.new("RGB", (20, 30), "red"))
    markers = [format_marker(image.file_name) for image in (wide, tiny)]
    _write_episode(folder, [wide, tiny], f"one {markers[0]}<|im_end|> two {markers[1]} <|image:01234567|>")
    page, text = _write(folder)
    response = re.findall("<pre>(.*?)</pre>", text, re.DOTALL)[1]
    link = r'<a class="image" href="evals/images/{}" title="image {}, {} x {}" [^>]*><img src="([^"]+)" [^>]*></a>'
    parts = [link.format(i.file_name, i.digest[:8], i.width, i.height) for i in (wide, tiny)]
    found = re.fullmatch(
        rf'one {parts[0]}<span class="token">&lt;\|im_end\|&gt;</span> two {parts[1]} '
        r'<span class="token">&lt;\|image:01234567\|&gt;</span>',
        response,
    )
    assert found, response
    shown = [read_image(url) for url in found.groups()]
    assert [(image.width, image.height) for image in shown] == [(160, 120), (100, 150)]
    assert len(shown[0].content) < len(wide.content) / 4
    files = [address for address in page.loads if not address.startswith("data:")]
    moved = folder.path.rename(tmp_path / "moved")
    assert [read_image(moved / file) for file in files] == [wide, tiny]


def test_a_page_has_few_thumbnails(folder: RunFolder) -> None:
    """Later images of a text are links in words, also if they repeat."""
    images = [read_image(picture(seed % 30)) for seed in range(40)]
    _write_episode(folder, images, " ".join(format_marker(image.file_name) for image in images))
    _, text = _write(folder)
    assert text.count("<img ") == MAX_THUMBNAILS
    assert text.count('<a class="image"') == 40
    assert f">image {images[-1].digest[:8]}, 48 x 32</a>" in text


def test_an_image_without_a_file_stays_a_marker(folder: RunFolder) -> None:
    """A name that is not an image's, or a damaged file, does not break the page."""
    image = read_image(picture(0))
    _write_episode(folder, [image], format_marker(image.file_name), n_files=0)
    marker = f'<pre><span class="token">&lt;|image:{image.digest[:8]}|&gt;</span></pre>'
    assert marker in _write(folder)[1]
    (folder.path / "evals/images").mkdir(exist_ok=True)
    (folder.path / "evals/images" / image.file_name).write_bytes(image.content[:100])
    assert marker in _write(folder)[1]
    row = {"output_response": "<|image:../../..|>", "score": 1.0, "images": ["../../../secret.png", 7]}
    write_rows(folder.evals(0) / "a.jsonl", [row])
    assert "secret.png" not in _write(folder)[1]


def test_without_an_evaluation_the_rate_of_the_environment_is_shown(folder: RunFolder) -> None:
    write_metrics(folder.metrics, [{"environment/catch_rate": 0.25}])
    page, text = _write(folder)
    assert page.headings == ["shaped", "Training metrics", "All metrics"]
    assert "<h3>Catch rate</h3>" in text
