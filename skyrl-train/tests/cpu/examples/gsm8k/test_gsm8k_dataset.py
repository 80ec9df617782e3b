from typing import Any

from examples.gsm8k.gsm8k_dataset import main

HUB_ROWS = [
    {"question": "Ann has 3 apples and gets 4. How many?", "answer": "Ann has 3+4=<<3+4=7>>7 apples.\n#### 7"},
    {"question": "What is 1,000 more than 200?", "answer": "1000+200=<<1000+200=1200>>1,200\n#### 1,200"},
    {"question": "What is 3 less than 1?", "answer": "1-3=<<1-3=-2>>-2\n#### -2"},
]


def test_every_row_of_the_sample_can_be_played(prepare: Any, play: Any) -> None:
    splits = prepare(main, "--source", "sample")
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 1600, "validation": 400}
    for row in splits["train"] + splits["validation"]:
        assert row.data_source == "sample_gsm8k"
        assert play(row, row.env_extras["extra_info"]["answer"]) == 1.0
        wrong = int(row.env_extras["reward_spec"]["ground_truth"]) + 1
        assert play(row, f"#### {wrong}") == 0.0
        assert play(row, "I do not know.") == 0.0
    questions = [row.env_extras["extra_info"]["question"] for rows in splits.values() for row in rows]
    assert len(set(questions)) == 2000, "no question is in both files"


def test_rows_of_the_hub_are_converted(prepare: Any, source: Any) -> None:
    splits = prepare(main, "--source", source(HUB_ROWS, [HUB_ROWS[1]]))
    row = splits["train"][0]
    assert row.prompt == [
        {
            "role": "user",
            "content": "Ann has 3 apples and gets 4. How many? "
            'Let\'s think step by step and output the final answer after "####".',
        }
    ]
    assert row.env_class == "gsm8k"
    assert row.env_extras == {
        "data_source": "openai/gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": "7"},
        "extra_info": {"split": "train", "index": 0, **HUB_ROWS[0]},
    }
    assert [row.env_extras["reward_spec"]["ground_truth"] for row in splits["train"]] == ["7", "1200", "-2"]
    assert splits["validation"][0].env_extras["extra_info"]["split"] == "validation"


def test_rows_for_several_turns_and_for_tools(prepare: Any, play: Any) -> None:
    flags = ("--source", "sample", "--max_rows", "1", "--env_class")
    turns, tools = (prepare(main, *flags, name)["train"][0] for name in ("gsm8k_multi_turn", "searchcode"))
    assert (turns.env_class, tools.env_class) == ("gsm8k_multi_turn", "searchcode")
    assert play(turns, "Hm.", turns.env_extras["extra_info"]["answer"], max_turns=3) == 1.0
    assert play(turns, "Hm.", "#### 0.5", max_turns=2) == 0.2
    answer = tools.env_extras["reward_spec"]["ground_truth"]
    program = f"<tool><python>print({answer})</python></tool>"
    assert "<tool><python>" in tools.prompt[0]["content"]
    assert play(tools, program, f"<solution>#### {answer}</solution>") == 1.0
    assert play(tools, program, f"<solution>#### {answer}1</solution>") == 0.0


def test_an_answer_without_a_number_is_refused(source: Any, refuse: Any) -> None:
    row = {"question": "Why?", "answer": "Because."}
    message = refuse(main, "--source", source([row], [row]))
    assert "row 0 of the train split" in message
    assert "the answer 'Because.' does not end in '#### ' and a number" in message
