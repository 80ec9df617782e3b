"""Sums: one reply each, a rubric with weights."""

import verifiers as vf
from datasets import Dataset


def correct(completion: vf.Messages, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


async def length(completion: vf.Messages) -> float:
    return len(completion[-1]["content"])


def from_row(state: vf.State, info: dict, easy: bool) -> float:
    return float(info["i"] == state["example_id"] and easy)


async def judged(completion: vf.Messages) -> float:
    if "asleep" in completion[-1]["content"]:
        raise RuntimeError("no verdict") from ConnectionError("the judge is asleep")
    return 1.0 / int(completion[-1]["content"])


def best(completions: list[vf.Messages]) -> list[float]:
    return [1.0 for _ in completions]


def load_environment(n_tasks: int = 3, functions: tuple[str, ...] = (), **kwargs) -> vf.Environment:
    questions = [
        {"question": f"What is {i} + {i}?", "answer": str(2 * i), "info": {"i": i}, "easy": True}
        for i in range(n_tasks)
    ]
    rubric = vf.Rubric([correct, length, from_row], weights=[2.0, 0.0, 0.5])
    for name in functions:
        rubric.add_reward_func(globals()[name])
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(questions),
        eval_dataset=Dataset.from_list(questions[:1]),
        system_prompt="Answer with a number.",
        rubric=rubric,
        **kwargs,
    )
