import re
from pathlib import Path
from typing import Any

import pytest
from report_kit.pages import Page
from report_kit.runs import write_metrics
from typer.testing import CliRunner

from skyrl_report.cli import report
from skyrl_report.comparison import MAX_RUNS, compare_runs
from skyrl_report.errors import DataError
from skyrl_report.run_folder import RunFolder


def write_run(folder: Path, config: str, **metrics: list[float]) -> Path:
    """Write a run whose metrics have one value a step; `/` is `__` in their names."""
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.config_yaml.write_text(config)
    names = [name.replace("__", "/") for name in metrics]
    write_metrics(
        run.metrics, [dict(zip(names, values, strict=True)) for values in zip(*metrics.values(), strict=True)]
    )
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """A run of reinforcement learning, one with another learning rate, and one of supervised fine-tuning."""
    config = "trainer: {{run_name: {}, seed: 1, algorithm: {{eps_clip_low: 0.2}}, policy: {{lr: {}}}}}"
    return [
        write_run(
            tmp_path / f"catch/{name}",
            config.format(name, lr),
            eval__all__avg_score=scores,
            policy__policy_entropy=[1.0, 0.5, float("nan")],
        )
        for name, lr, scores in (("slow", "1.0e-05", [0.1, 0.2, 0.4]), ("fast <b>", "1.0e-03", [0.1, 0.5, 0.75]))
    ] + [write_run(tmp_path / "chats/sft", "data: {max_length: 64}", train__loss=[2.0, 1.5])]


def test_the_page_has_results_differences_and_curves(runs: list[Path], tmp_path: Path) -> None:
    text = compare_runs(runs, tmp_path / "pages/comparison.html").read_text("utf-8")
    page = Page(text)
    assert page.headings == ["Comparison of 3 runs", "Results", "Settings that differ", "Curves"]
    assert page.loads == []
    assert "fast &lt;b&gt;" in text
    assert "<b>" not in text.partition("<script")[0]
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
    results = {re.sub("<.*?>", "", row[0]): row[1:] for row in rows if row}
    assert results["catch/slow"][:2] == ["Reinforcement learning", "2"]
    assert results["catch/slow"][2].startswith("0.4<br>")
    assert results["chats/sft"][:3] == ["Supervised fine-tuning", "1", "–"]
    assert results["trainer.policy.lr"] == ["1.0e-05", "0.001", "–"]
    assert results["trainer.seed"] == ["1", "1", "–"]
    assert "trainer.run_name" not in results
    titles = re.findall(r"<h3>(.*?)</h3>", text)
    assert titles == ["Average score", "Training loss", "Entropy"]
    assert text.count('class="line c0"') == text.count('class="line c1"') == 2
    assert text.count('class="line c2"') == 1
    assert "catch/slow: 0.4" in text
    assert "1 value is NaN" in text


@pytest.mark.parametrize(
    "text",
    [
        "trainer: {{run_name: {0}, seed: 1, ckpt_path: {1}/outs/p/{0}/ckpts}}",
        "trainer: {{run_name: {0}, project_name: p, output_dir: outs, ckpt_path: outs/p/{0}/ckpts}}",
    ],
    ids=["absolute", "relative"],
)
def test_names_and_paths_inside_the_folders_do_not_differ(tmp_path: Path, text: str) -> None:
    folders = [
        write_run(tmp_path / f"outs/p/{name}", text.format(name, tmp_path), train__loss=[0.5]) for name in ("a", "b")
    ]
    assert "None but the name." in compare_runs(folders, tmp_path / "comparison.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda runs, tmp_path: runs[:1], "pass 2 to 35 run folders, not 1"),
        (lambda runs, tmp_path: runs[:1] * (MAX_RUNS + 1), "pass 2 to 35 run folders, not 36"),
        (lambda runs, tmp_path: [runs[0], runs[0] / "../slow"], "is listed twice"),
        (lambda runs, tmp_path: [runs[0], tmp_path], "has no metrics.jsonl with a step in it"),
    ],
)
def test_folders_that_cannot_be_compared(runs: list[Path], tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        compare_runs(make(runs, tmp_path), tmp_path / "comparison.html")
    assert not (tmp_path / "comparison.html").exists()


def test_the_command(runs: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "out.html"
    command = ["compare", *map(str, runs), "--output"]
    result = CliRunner().invoke(report, [*command, str(output)])
    assert (result.exit_code, result.stdout.strip()) == (0, str(output))
    assert output.exists()
    result = CliRunner().invoke(report, [*command, str(tmp_path)])
    assert ": Is a directory; choose a file with --output" in result.stderr
