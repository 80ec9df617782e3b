"""The task families: reproducible tasks, right and wrong answers, and replies that tempt a verifier."""

import json
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import pytest
from gym_kit.processes import run_python
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skyrl_gym.tasks import DynamicEnvDataset, Task, TaskFamily, compute_score, read_task, task_family, task_row
from skyrl_gym.tasks.logic import cryptarithm, game_of_24, sudoku
from skyrl_gym.tasks.logic.family import FIRST_NUMBER, SEEDS_PER_TYPE, TYPES

CASES = {"cases": ["hex(board_size=5)", "leduc_poker"], "num_tasks_per_case": 60}
CONFIGS: dict[str, dict[str, Any]] = {"lgc-v2": {}, "trace": {}, "openspiel": CASES, "swe-synth": {}}
IDS = {
    "lgc-v2": [number * SEEDS_PER_TYPE + seed for number in range(9) for seed in (0, 1, 77_777_777)],
    "trace": [0, 1, 123_456],
    "openspiel": [0, 1, 119],
    "swe-synth": [0, 1, 99_999],
}
TASKS = """
import json, sys
from skyrl_gym.tasks import task_family, task_row
configs, ids = json.loads(sys.argv[1])
for env in sorted(configs, reverse=True):
    family = task_family(env, configs[env])
    for task_id in ids[env]:
        task = family.generate(task_id)
        print(json.dumps([task_row(family, task, family.split_of(task_id)), family.solve(task), dict(task.facts)]))
"""

lgc_ids = st.builds(
    lambda number, seed: number * SEEDS_PER_TYPE + seed, st.integers(0, 8), st.integers(0, SEEDS_PER_TYPE - 1)
)


def generate(name: str, seed: int = 3) -> tuple[TaskFamily, Task]:
    """Return the family `lgc-v2` and a task of a type."""
    family = task_family("lgc-v2")
    return family, family.generate(FIRST_NUMBER[name] * SEEDS_PER_TYPE + seed)


def describe(family: TaskFamily, task: Task) -> str:
    row = task_row(family, task, family.split_of(task.task_id))
    return json.dumps([row, family.solve(task), dict(task.facts)])


def test_ids_are_the_tasks_that_they_were_in_every_process() -> None:
    """The file has a hash of each task: of the row, the answer and the facts."""
    lines, hashes = [], {}
    for env in sorted(CONFIGS):
        family, hashes[env] = task_family(env, CONFIGS[env]), {}
        for task_id in reversed(IDS[env]):
            task = family.generate(task_id)
            lines.append(describe(family, task))
            digest = blake2b(lines[-1].encode(), digest_size=6).digest()
            hashes[env][f"{task.task_type} {task_id}"] = int.from_bytes(digest)
    assert hashes == json.loads((Path(__file__).parent / "fingerprints.json").read_text())
    assert len(set(lines)) == sum(map(len, IDS.values()))
    elsewhere = run_python(TASKS, json.dumps([CONFIGS, IDS]), PYTHONHASHSEED="1").stdout
    assert elsewhere.splitlines() == lines[::-1]


@settings(max_examples=12)
@given(lgc_ids)
@example(5 * SEEDS_PER_TYPE)
def test_the_answer_is_accepted_and_a_perturbed_one_refused(task_id: int) -> None:
    family = task_family("lgc-v2")
    task = family.generate(task_id)
    reply = family.solve(task)
    assert family.score(reply, task) == 1
    assert family.score(f"<think>{'x' * 50}</think> So it is\n{reply}", task) == 1
    assert family.score(f"Because.\n\nFinal Answer:\n{reply}", task) == 1
    assert family.score(f"<think>{reply}", task) == 0
    assert family.score(f"{reply}\n\nFinal Answer:\nI do not know", task) == 0
    for wrong in perturbed(task, reply):
        assert family.score(wrong, task) == 0, wrong


def perturbed(task: Task, reply: str) -> list[str]:
    """Return wrong answers in the right format."""
    other = {
        "dyck_language": reply[:-1],
        "dyck_language2": f"`([]){task.ground_truth}`",
        "game_of_24": "```python\n1 + 1\n```" if task.facts.get("is_solvable") else "```python\n2 * 12\n```",
        "operation": f"\\boxed{{{int(task.ground_truth) + 1}}}" if task.task_type == "operation" else "",
        "cryptarithm": "The answer is 1 + 1 = 2",
        "boolean_expressions": f"\\boxed{{{task.ground_truth},Z}}",
        "sudoku": reply.replace("1", "2", 1),
        "dyck_language_reasoning_errors": f"{task.ground_truth}, 1000",
    }
    no_answer = "```python\nNone\n```" if task.facts.get("is_solvable", True) else ""
    return ["", " ", "None", no_answer, other[task.task_type]]


@settings(max_examples=12)
@given(lgc_ids, st.text())
def test_any_text_has_a_score(task_id: int, reply: str) -> None:
    family = task_family("lgc-v2")
    assert family.score(reply, family.generate(task_id)) in (0, 1)


def score_expression(expression: str, **facts: object) -> bool:
    facts = {"numbers": [1, 2, 3, 4], "target": 24, "operators": "+-*/", "is_solvable": True} | facts
    return game_of_24.is_correct(f"```python\n{expression}\n```", "", facts)


@pytest.mark.parametrize(
    ("expression", "is_right"),
    [
        *((right, True) for right in ("(1 + 3) * (2 + 4)", "4 * 3 * 2 / 1", "(" * 90 + "1*2*3*4" + ")" * 90)),
        *((wrong, False) for wrong in ("1 * 2 * 3 * 4 * 1", "24", "1 * 2 * 3 * 4 # 24", "4 ** 3 - 21", "1_0", "None")),
        *((wrong, False) for wrong in ("-1 * -2 * 3 * 4", "1 * 2 * 3 * 4 if True else 0", "(lambda: 24)()", "9" * 190)),
        *((wrong, False) for wrong in ("1 / 0 * 2 * 3 * 4", "1 * 2 * 3 * 4.0", "(" * 500 + "1*2*3*4" + ")" * 500)),
        ("12 + 3 * 4", False),  # digits joined to a number
        ("__import__('os').system('true') or 24", False),
    ],
)
def test_expressions_are_checked_without_being_run(expression: str, is_right: bool) -> None:
    assert score_expression(expression) is is_right


def test_every_unsolvable_puzzle_has_no_solution() -> None:
    rng = Random(0)
    puzzles = [game_of_24.create(rng) for _ in range(60)]
    assert any(not puzzle.facts["is_solvable"] for puzzle in puzzles)
    assert {len(puzzle.facts["numbers"]) for puzzle in puzzles} == {4, 5, 6}
    assert all(game_of_24.is_correct(puzzle.reply, puzzle.answer, puzzle.facts) for puzzle in puzzles)


@pytest.mark.parametrize(
    ("words", "operators", "n_solutions"),
    [(["SEND", "MORE", "MONEY"], ["+"], 1), (["AB", "CD"], [], 0), (["A", "B", "C"], ["+"], 32)],
)
def test_cryptarithms_are_solved_completely(words: list[str], operators: list[str], n_solutions: int) -> None:
    assert len(list(cryptarithm.solutions(words, operators))) == n_solutions


def test_listing_every_answer_is_not_right() -> None:
    family, task = generate("dyck_language_reasoning_errors")
    assert family.score(", ".join(map(str, range(1, 40))), task) == 0
    family, task = generate("boolean_expressions")
    for reply in ("\\boxed{A,B,C,D,E,F,G}", f"\\boxed{{{task.ground_truth}}} or \\boxed{{B,Z}}"):
        assert family.score(reply, task) == 0
    family, task = generate("operation")
    assert family.score("\n".join(f"\\boxed{{{n}}}" for n in range(-999, 999)) + "\\boxed{nan}", task) == 0
    for text in ("1e9", "1/0", "inf", "0x10", "٣", "1__0", "True"):
        assert family.score(f"\\boxed{{{text}}}", task) == 0


def test_another_valid_grid_is_right_only_with_the_givens() -> None:
    rng = Random(5)
    puzzle, other = sudoku.create(rng), sudoku.create(rng)
    assert sudoku.is_correct(puzzle.reply, puzzle.answer, puzzle.facts)
    assert sudoku.is_valid_grid(other.answer)
    assert not sudoku.is_correct(other.reply, puzzle.answer, puzzle.facts)


def test_a_trace_is_compared_line_by_line() -> None:
    family = task_family("trace")
    task = family.generate(7)
    output = task.ground_truth
    assert family.score(f"```\n{output}```", task) == family.score(output, task) == 1
    assert family.score(f"```\n{output.replace(chr(10), '  ' + chr(10))}```", task) == 1
    for wrong in ("", output.replace("\n", " "), output.upper().replace("DBG", "dbg"), output + "1", output * 2):
        assert family.score(wrong, task) == 0


def make_dataset(options: dict[str, Any], split: str = "train") -> DynamicEnvDataset:
    return DynamicEnvDataset(config={"custom_cls": {"config": options}}, split=split)


@pytest.mark.parametrize("env", CONFIGS)
def test_splits_share_no_task(env: str) -> None:
    options: dict[str, Any] = {"env": env, "adapter_config": CONFIGS[env]}
    if env != "openspiel":
        options |= {"num_train_tasks": 20, "num_val_tasks": 4}
    train, validation = (make_dataset(options, split) for split in ("train", "validation"))
    family = task_family(env, CONFIGS[env])
    train_ids, validation_ids = ([dataset.task_id(i) for i in range(len(dataset))] for dataset in (train, validation))
    assert len(set(train_ids)) == len(train_ids)
    assert not set(train_ids) & set(validation_ids)
    assert not set(map(family.identity, train_ids)) & set(map(family.identity, validation_ids))
    row = train[3]
    assert row == train[3]
    assert row["extra_info"]["split"] == "train"
    assert compute_score(None, "", None, row["extra_info"]) == 0
    assert compute_score("any", family.solve(family.generate(train_ids[3])), None, json.dumps(row["extra_info"])) > 0


def test_rows_of_a_dataset() -> None:
    dataset = DynamicEnvDataset()
    assert len(dataset) == 1_000_000
    assert [dataset[i]["data_source"] for i in range(len(TYPES))] == list(TYPES)
    last = dataset[len(dataset) - 1]
    assert last["extra_info"]["index"] == 999_999
    options = {"env": "swe-synth", "adapter_config": {"task_id_range": [10, 39]}}
    train, validation = make_dataset(options), make_dataset(options, "validation")
    ids = [dataset.task_id(i) for dataset in (train, validation) for i in range(len(dataset))]
    assert sorted(ids) == list(range(10, 40))
    assert train.fingerprint != validation.fingerprint


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"env": "lgcv3"}, ["env='lgcv3'", "lgc-v2"]),
        ({"environment": "trace"}, ["'environment'", "data.custom_cls.config"]),
        ({"task_types": ["suduko"]}, ["'suduko'", "sudoku"]),
        ({"env": "trace", "adapter_config": {"dataset_name": "x"}}, ["dataset_name", "task id alone"]),
        ({"env": "openspiel", "adapter_config": {"reward_mode": "maybe"}}, ["reward_mode='maybe'", "legal"]),
        ({"env": "swe-synth", "adapter_config": {"task_id_range": [3]}}, ["task_id_range=[3]", "[0, 99]"]),
        ({"env": "swe-synth", "adapter_config": {"task_ids": [1]}, "num_train_tasks": 9}, ["9 tasks", "lower"]),
        ({"num_val_tasks": 0}, ["num_val_tasks=0", "at least 1"]),
        ({"task_types": ["sudoku"], "num_val_tasks": 10**9}, ["num_val_tasks=1000000000", "390625"]),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        make_dataset(options, "train" if "9 " in words[0] else "validation")
    for word in words:
        assert word in str(error.value)


def test_the_environment_variable_does_not_change_written_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAME_TYPES", "hex")
    family = task_family("openspiel", {**CASES, "num_tasks_per_case": 7})
    row = task_row(family, family.generate(3), "train")
    monkeypatch.setenv("GAME_TYPES", "chess")
    assert compute_score(None, family.solve(family.generate(3)), "", row["extra_info"]) > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"env": None}, ["no env"]),
        ({"env": "chess"}, ["env='chess'"]),
        ({"task_id": 900_000_000_000}, ["task type 9000"]),
        ({"task_id": -1}, ["at least 0"]),
        ({"task_id": 1.5}, ["whole number"]),
        ({"fingerprint": "0" * 16}, ["generate the dataset again"]),
    ],
)
def test_rows_that_are_no_tasks_are_errors(change: dict[str, object], words: list[str]) -> None:
    family, task = generate("sudoku")
    extra_info = task_row(family, task, "train")["extra_info"] | change
    with pytest.raises(ValueError, match=words[0]):
        read_task(extra_info)
