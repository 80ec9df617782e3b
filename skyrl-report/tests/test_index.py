import doctest
import json
from pathlib import Path

import pytest
from report_kit.example import N_STEPS, row, write_example
from report_kit.runs import write_rows

from skyrl_report import episodes
from skyrl_report.episodes import split_messages
from skyrl_report.errors import DataError
from skyrl_report.index import CHUNK_ROWS, TrajectoryIndex, describe_chunk, describe_row
from skyrl_report.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return write_example(tmp_path / "catch/shaped")


def _index(folder: RunFolder, last_step: int | None = None) -> TrajectoryIndex:
    index = TrajectoryIndex()
    assert index.update(folder, last_step)
    return index


def test_all_trajectories_are_indexed_in_columns(folder: RunFolder) -> None:
    write_rows(folder.trajectories(9), [row("7_0", None, stop_reason="env_error", error="boom", data_source="other")])
    index = _index(folder)
    assert len(index) == 2 * 2 + N_STEPS * 4 + 1
    assert [(file.phase, file.step, file.n_rows) for file in index.files][:3] == [
        ("eval", 0, 2),
        ("eval", 8, 2),
        ("train", 1, 4),
    ]
    columns = {name: index.columns[name][-1] for name in ("uid", "reward", "success", "turns", "tokens")}
    assert columns == {"uid": "7_0", "reward": None, "success": 0, "turns": 2, "tokens": 2}
    assert index.tables["category"] == ["", "other", "invalid: env_error"]
    assert index.tables["prompt"][-1] == "other/7", "a row of another dataset with the same number is another prompt"
    assert index.previews[0] == "Where is <the> ball?"
    assert TrajectoryIndex.from_json(index.to_json()) == index
    assert len(TrajectoryIndex.from_json('{"version": 0}')) == 0


def test_an_update_reads_new_files_and_starts_again_after_a_rewind(folder: RunFolder) -> None:
    index = _index(folder)
    before = len(index)
    write_rows(folder.trajectories(9), [row("7_0", 1.0)])
    assert not index.update(folder, limit_s=-1.0), "out of time"
    assert index.update(folder)
    assert len(index) == before + 1
    assert index.update(folder, last_step=7)
    assert {file.step for file in index.files} == set(range(8))
    write_rows(folder.trajectories(1), [row("8_0", 1.0)] * 3)
    assert index.update(folder, last_step=1)
    assert [file.n_rows for file in index.files] == [2, 3]


def test_chunks_have_the_texts_of_their_rows(folder: RunFolder) -> None:
    rows = [row(f"{i}_0", 1.0, output_response=f"answer {i} ü\u2028") for i in range(2 * CHUNK_ROWS + 1)]
    write_rows(folder.trajectories(9), rows)
    file = _index(folder).files[-1]
    assert [n_rows for _, n_rows in file.chunks] == [CHUNK_ROWS, CHUNK_ROWS, 1]
    texts = [t["messages"][0]["text"] for i in range(3) for t in describe_chunk(folder, file, i)]
    assert texts == [f"answer {i} ü" for i in range(len(rows))]


def test_a_trajectory_is_described_as_a_conversation() -> None:
    reply = '<think>Look.</think>I look.<tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call><|im_end|>'
    last = row(
        "0_0", 1.0, output_response=reply, tokens=["I", "look"], logprobs=[-0.5, -1.0], images=["ab" * 16 + ".png"]
    )
    described = describe_row(last | {"earlier": [{"output_response": "first", "score": [0.5]}]})
    assert described["prompt"] == [{"role": "user", "text": "Where is <the> ball?"}]
    assert described["messages"] == [
        {"role": "assistant", "thought": "", "text": "first", "calls": [], "fault": None},
        {
            "role": "assistant",
            "thought": "Look.",
            "text": "I look.",
            "calls": [{"name": "look", "arguments": {"at": 3}}],
            "fault": None,
        },
    ]
    assert described["tokens"] == [{}, {"tokens": ["I", "look"], "logprobs": [-0.5, -1.0]}]
    assert described["rewards"] == [[0.5], [0.0, 1.0]]
    assert described["ending"] == "The environment was done, or the model ended its last turn."
    assert json.dumps(described)


def test_messages_of_several_templates() -> None:
    gemma = "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHo<end_of_turn>\n"
    assert split_messages(gemma, "user") == [("user", "Hi"), ("assistant", "Ho")]
    assert split_messages("no template", "user") == [("user", "no template")]
    assert split_messages("<|image:0b1f2c3d|>Look!<|im_end|>", "user") == [("user", "<|image:0b1f2c3d|>Look!")]


def test_a_broken_line_is_named(folder: RunFolder) -> None:
    folder.trajectories(9).write_text('{"uid": "0_0"}\n[1]\n')
    with pytest.raises(DataError, match=r"global_step_9\.jsonl:2 is not a JSON object"):
        _index(folder)


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(episodes).failed == 0
