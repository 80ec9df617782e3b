"""Questions that need web research. A model judges the answers."""

from collections.abc import Mapping
from typing import Any

from skyrl_agent.judge import judge_answer
from skyrl_agent.tasks.general_react import GeneralReactTask, find_family, get_ground_truth, get_question
from skyrl_gym.envs.exact_match import parse_targets


class WebResearchTask(GeneralReactTask):
    """Questions with a ground truth, from any data source. If there is no other grader, a model judges the answer."""

    system_prompt = (
        "Answer the question by research on the web. Search with different words, read the pages that look relevant, "
        "check what you find against a second source, and finish with an answer that the sources support."
    )

    @classmethod
    def evaluate_result(cls, result: Any, instance: Mapping[str, Any], data_source: str) -> float:
        """Return the reward of an answer. A missing answer is wrong."""
        if find_family(data_source) is not None:
            return super().evaluate_result(result, instance, data_source)
        targets = parse_targets(get_ground_truth(instance))
        return judge_answer(get_question(instance), " or ".join(targets), "" if result is None else str(result))

    @classmethod
    def check_instance(cls, instance: Any, data_source: str) -> None:
        """Raise DataError for a row without a ground truth."""
        get_ground_truth(instance)
