import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from report_kit.example import N_STEPS, row, write_example
from report_kit.runs import write_rows

from skyrl_report import browser
from skyrl_report.browser import read_index, write_browser
from skyrl_report.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return write_example(tmp_path / "catch/shaped")


def _unpack(script: Path) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(script.read_text().split('"')[-2])))


def _files(folder: RunFolder) -> set[str]:
    return {path.name for path in (folder.path / "report_files").iterdir()}


def test_the_page_has_the_index_and_all_texts(folder: RunFolder) -> None:
    assert write_browser(folder) == folder.browser
    assert "catch / shaped" in folder.browser.read_text()
    index = read_index(folder)
    assert len(index) == 2 * 2 + N_STEPS * 4
    assert _files(folder) == {"index.js", *(f"{file.name}-0.js" for file in index.files)}
    (described, _) = _unpack(folder.path / f"report_files/{index.files[0].name}-0.js")
    assert described["messages"][0]["text"] == "L"


def test_a_second_call_reads_only_new_files(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_browser(folder)
    before = _files(folder)
    encoded = []
    monkeypatch.setattr(browser, "encode_chunk", lambda *arguments: encoded.append(arguments[1].path) or b'x("y")')
    write_rows(folder.trajectories(8), [row("5_0", 1.0)])
    write_browser(folder)
    assert encoded == ["trajectories/global_step_8.jsonl"]
    assert len(_files(folder)) == len(before), "the chunk of the replaced file is removed"


def test_texts_beyond_the_limit_are_left_out(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(folder.evals(4) / "synthetic.jsonl", [row("0_0", 1.0)] * 40)
    monkeypatch.setattr(browser, "MAX_BYTES", 1200)
    write_browser(folder)
    assert 3 <= len(_files(folder)) < N_STEPS
    names = {file.name: (file.phase, file.step) for file in read_index(folder).files}
    kept = [names[name.partition("-")[0]] for name in _files(folder) - {"index.js"}]
    assert {("eval", 0), ("eval", 8)} <= set(kept), "the last and the first evaluation come first"
    script = (folder.path / "report_files/index.js").read_text()
    assert len(json.loads(script.partition("(")[2].partition(', "H4s')[0])["written"]) == len(kept)


def test_without_trajectories_there_is_no_page(tmp_path: Path) -> None:
    assert write_browser(RunFolder(tmp_path)) is None
    assert list(tmp_path.iterdir()) == []
