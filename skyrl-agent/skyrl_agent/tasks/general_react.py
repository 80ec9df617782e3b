"""Questions with an answer, graded by their dataset's rule."""

import re
from collections.abc import Mapping
from typing import Any

from skyrl_agent.judge import judge_answer
from skyrl_agent.tasks.base import BaseTask
from skyrl_gym import maths
from skyrl_gym.envs.aime.grading import find_result, grade_minerva, to_reward
from skyrl_gym.envs.exact_match import is_match, parse_targets
from skyrl_gym.envs.lcb.env import LCBEnv
from skyrl_gym.images import join_texts
from skyrl_train.errors import DataError
from skyrl_train.types import Message

EXACT_MATCH = (
    "2wiki",
    "2wikimultihop",
    "2wikimultihopqa",
    "bamboogle",
    "hotpotqa",
    "musique",
    "nq",
    "popqa",
    "triviaqa",
)
JUDGED = ("browsecomp", "ruler", "stem_textbook", "hle")
MATHS, CODE = ("math", "aime", "dapo"), ("codegen", "livecodebench", "lcb")
MARKED = re.compile(r"answer\s*(is\b|:)|\\boxed", re.IGNORECASE)
FAMILIES = {"exact match": EXACT_MATCH, "judge": JUDGED, "maths": MATHS, "code": CODE}
"""Graders, with the prefixes of the data sources that they grade."""


def find_family(data_source: str) -> str | None:
    """Return a data source's grader, or None. Prefixes such as "searchR1_" are ignored."""
    name = data_source.lower().removeprefix("searchr1_").rpartition("/")[2]
    return next(
        (family for family, prefixes in FAMILIES.items() if re.match(rf"({'|'.join(prefixes)})(?![a-z])", name)), None
    )


def grade_maths(answer: str, truth: str) -> float:
    """Return 1.0 for a correct answer, else -1.0.

    The answer is the marked answer, the last line, or the result that the last line states: "The result is 42."
    """
    if MARKED.search(answer):
        return to_reward(maths.grade(answer, truth))
    last_line = answer.rpartition("\n")[2]
    grades = [grade_minerva(f"Answer: {text.strip()}", truth) for text in (last_line, find_result(last_line))]
    return max(map(to_reward, grades))


def get_ground_truth(instance: Mapping[str, Any]) -> Any:
    """Return a row's ground truth, in any layout of SkyRL's and verl's datasets."""
    if not isinstance(instance, Mapping):
        raise DataError(f"the instance is a {type(instance).__name__}; it must be a row with prompt and reward_spec")
    extra: Any = instance.get("extra_info")
    for section in (instance.get("reward_spec"), instance.get("reward_model"), instance, extra):
        for key in ("ground_truth", "answer", "Answer", "target", "reference_answer"):
            if isinstance(section, Mapping) and section.get(key) is not None:
                return section[key]
    raise DataError("the instance has no ground truth in reward_spec, reward_model, ground_truth or answer")


def get_question(instance: Mapping[str, Any]) -> str:
    """Return the question's text: the last message of `prompt`, or `question`."""
    prompt = instance.get("prompt", instance.get("question", instance.get("Question")))
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt:
        return join_texts(prompt[-1]["content"])
    raise DataError("the instance has no prompt and no question")


class GeneralReactTask(BaseTask):
    """Questions in the format of SkyRL's datasets: a chat as `prompt`, and a ground truth.

    The data source's prefix selects the grader: exact match for open questions, a judge for browsecomp, ruler, hle and
    stem_textbook, DAPO's rule for maths, tests for code.
    """

    system_prompt = "Solve the task step by step. Think before you act."

    @classmethod
    def get_instruction(cls, instance: Mapping[str, Any]) -> list[Message]:
        """Return the row's prompt, with a default system message if it has none."""
        prompt = instance.get("prompt")
        messages = list(prompt) if isinstance(prompt, list) else [Message(role="user", content=get_question(instance))]
        if messages[0]["role"] != "system":
            messages.insert(0, Message(role="system", content=cls.system_prompt))
        return messages

    @classmethod
    def evaluate_result(cls, result: Any, instance: Mapping[str, Any], data_source: str) -> float:
        """Return the reward of an answer. A missing answer is wrong."""
        answer, truth = "" if result is None else str(result).strip(), get_ground_truth(instance)
        match find_family(data_source):
            case "exact match":
                return float(is_match(answer, parse_targets(truth)))
            case "maths":
                return grade_maths(answer, str(truth))
            case "code":
                program = answer if "```" in answer else f"```python\n{answer}\n```"
                reward = LCBEnv(extras={"reward_spec": {"ground_truth": truth}}).step(program)["reward"]
                assert reward is not None
                return reward
            case "judge":
                targets = parse_targets(truth)
                return judge_answer(get_question(instance), " or ".join(targets), answer)
        raise DataError(_describe_unknown(data_source))

    @classmethod
    def check_instance(cls, instance: Any, data_source: str) -> None:
        """Raise DataError for a row without a ground truth, or with an unknown data source."""
        if find_family(data_source) is None:
            raise DataError(_describe_unknown(data_source))
        get_ground_truth(instance)


def _describe_unknown(data_source: str) -> str:
    known = ", ".join(prefix for prefixes in FAMILIES.values() for prefix in prefixes)
    return (
        f"no grader is known for data_source={data_source!r}; rename it to start with one of {known}, or override "
        "evaluate_result in a task of your own"
    )
