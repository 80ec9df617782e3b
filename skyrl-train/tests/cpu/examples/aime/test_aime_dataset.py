from typing import Any

import pytest

from examples.aime.aime_dataset import main


def hub_row(problem: str, answer: str, index: Any = "a-b-c") -> dict[str, Any]:
    """Return a row in the format of DAPO-Math-17k."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"Solve it.\n\n{problem}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def test_every_row_of_the_sample_can_be_played(prepare: Any, play: Any) -> None:
    splits = prepare(main, "--source", "sample")
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 240, "validation": 60}
    for row in splits["train"] + splits["validation"]:
        answer = row.env_extras["reward_model"]["ground_truth"]
        assert row.data_source == "sample_math"
        assert play(row, f"So it is clear.\nAnswer: {answer}") == 1.0
        assert play(row, f"Answer: {answer}1") == -1.0
        assert play(row, answer) == -1.0
    assert len({row.prompt[0]["content"] for rows in splits.values() for row in rows}) == 300


def test_rows_of_the_hub_are_converted(prepare: Any, play: Any, source: Any) -> None:
    """AIME-2024 has integer indices and more columns in `extra_info`; otherwise both datasets have the same format."""
    aime = hub_row("What is 6 * 7?", "42", index=0)
    aime["extra_info"] |= {"raw_problem": "What is 6 * 7?", "split": "test"}
    splits = prepare(main, "--source", source([hub_row("What is 2 * 3?", "6")], [aime]))
    (train,), (validation,) = splits["train"], splits["validation"]
    assert train.prompt == [{"role": "user", "content": "Solve it.\n\nWhat is 2 * 3?"}]
    assert train.env_class == "aime"
    assert train.env_extras == {
        "data_source": "math_dapo",
        "ability": "MATH",
        "reward_model": {"ground_truth": "6", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"split": "train", "index": "a-b-c"},
    }
    assert validation.env_extras["extra_info"] == {"split": "validation", "index": "0"}
    assert (play(train, "Answer: 6"), play(validation, "Answer: 41")) == (1.0, -1.0)


def test_duplicates_and_prompts_with_conflicting_answers_are_dropped(
    prepare: Any, source: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    train = [hub_row("one", "1"), hub_row("two", "2"), hub_row("one", "1"), hub_row("two", "3"), hub_row("two", "2")]
    train += [hub_row("four", "4")]
    splits = prepare(main, "--source", source(train, [hub_row("five", "5")] * 32))
    assert [row.env_extras["reward_model"]["ground_truth"] for row in splits["train"]] == ["1", "4"]
    assert len(splits["validation"]) == 1
    output = capsys.readouterr().out
    assert "6 rows have 3 prompts; 1 with several answers are dropped" in output
    assert "32 rows have 1 prompts; 0 with several answers are dropped" in output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward_model": None}, "it has no 'reward_model'"),
        ({"reward_model": {"style": "rule"}}, "it has no 'ground_truth'; its columns are style"),
        ({"reward_model": {"ground_truth": 1.5}}, "ground_truth='1.5' is of the type float, not str"),
        ({"reward_model": {"ground_truth": True}}, "ground_truth='True' is of the type bool, not str"),
        ({"prompt": "What?"}, "prompt='What?' is of the type str, not list"),
    ],
)
def test_rows_of_another_format_are_refused(change: dict[str, Any], message: str, source: Any, refuse: Any) -> None:
    folder = source([hub_row("one", "1") | change], [hub_row("two", "2")])
    assert message in refuse(main, "--source", folder)
