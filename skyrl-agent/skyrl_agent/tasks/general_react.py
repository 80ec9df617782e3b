"""Questions with an answer, graded by the rule of their dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_agent.judge import judge_answer
from skyrl_agent.tasks.base import BaseTask
from skyrl_gym.envs.aime.grading import compute_score
from skyrl_gym.envs.exact_match import is_match, parse_targets
from skyrl_gym.envs.lcb.env import LCBEnv
from skyrl_train.errors import DataError
from skyrl_train.types import Message

EXACT_MATCH = ("2wiki", "bamboogle", "hotpotqa", "musique", "nq", "popqa", "triviaqa")
JUDGED = ("browsecomp", "ruler", "stem_textbook", "hle")
MATHS, CODE = ("math", "aime", "dapo"), ("codegen", "livecodebench", "lcb")
FAMILIES = {"exact match": EXACT_MATCH, "judge": JUDGED, "maths": MATHS, "code": CODE}
"""Graders, and the beginnings of the data sources that they grade."""


def find_family(data_source: str) -> str | None:
    """Return the grader of a data source, or None; prefixes such as "searchR1_" are ignored."""
    name = data_source.lower().removeprefix("searchr1_").rpartition("/")[2]
    return next((family for family, prefixes in FAMILIES.items() if name.startswith(prefixes)), None)


def ground_truth_of(instance: Mapping[str, Any]) -> Any:
    """Return the ground truth of a row, in any of the layouts of SkyRL's and verl's datasets."""
    if not isinstance(instance, Mapping):
        raise DataError(f"the instance is a {type(instance).__name__}; it must be a row with prompt and reward_spec")
    for key in ("reward_spec", "reward_model"):
        if isinstance(spec := instance.get(key), Mapping) and spec.get("ground_truth") is not None:
            return spec["ground_truth"]
    for key in ("ground_truth", "answer", "Answer", "target"):
        if instance.get(key) is not None:
            return instance[key]
    raise DataError("the instance has no ground truth in reward_spec, reward_model, ground_truth or answer")


def question_of(instance: Mapping[str, Any]) -> str:
    """Return the text of the question: the last message of `prompt`, or `question`."""
    prompt = instance.get("prompt", instance.get("question", instance.get("Question")))
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt:
        return str(prompt[-1]["content"])
    raise DataError("the instance has no prompt and no question")


class GeneralReactTask(BaseTask):
    """Questions in the format of SkyRL's datasets: a chat as `prompt`, and a ground truth.

    The beginning of the data source chooses the grader: exact match for open questions, a judge for browsecomp, ruler,
    hle and stem_textbook, DAPO's rule for maths, tests for code.
    """

    system_prompt = "Solve the task step by step. Think before you act."

    @classmethod
    def get_instruction(cls, instance: Mapping[str, Any]) -> list[Message]:
        """Return the prompt of the row, after a system message if it has none."""
        prompt = instance.get("prompt")
        messages = list(prompt) if isinstance(prompt, list) else [Message(role="user", content=question_of(instance))]
        if messages[0]["role"] != "system":
            messages.insert(0, Message(role="system", content=cls.system_prompt))
        return messages

    @classmethod
    def evaluate_result(cls, result: Any, instance: Mapping[str, Any], data_source: str) -> float:
        """Return the reward of an answer; none is wrong."""
        answer, truth = "" if result is None else str(result).strip(), ground_truth_of(instance)
        match find_family(data_source):
            case "exact match":
                return float(is_match(answer, parse_targets(truth)))
            case "maths":
                last_line = answer.rpartition("\n")[2]
                return compute_score(f"Answer: {last_line}", str(truth))["score"]
            case "code":
                program = answer if "```" in answer else f"```python\n{answer}\n```"
                reward = LCBEnv(extras={"reward_spec": {"ground_truth": truth}}).step(program)["reward"]
                assert reward is not None
                return reward
            case "judge":
                targets = parse_targets(truth)
                return judge_answer(question_of(instance), " or ".join(targets), answer)
        raise DataError(_describe_unknown(data_source))

    @classmethod
    def check_instance(cls, instance: Any, data_source: str) -> None:
        """Raise DataError for a row without a ground truth, or of an unknown data source."""
        if find_family(data_source) is None:
            raise DataError(_describe_unknown(data_source))
        ground_truth_of(instance)


def _describe_unknown(data_source: str) -> str:
    known = ", ".join(prefix for prefixes in FAMILIES.values() for prefix in prefixes)
    return (
        f"no grader is known for data_source={data_source!r}; rename it to start with one of {known}, or override "
        "evaluate_result in a task of your own"
    )
