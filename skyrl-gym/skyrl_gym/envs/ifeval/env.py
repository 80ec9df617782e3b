"""IFEval: one reply, checked for instructions that a program can verify."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.ifeval.instructions import check_loose, check_strict, parse_instructions
from skyrl_gym.envs.ifeval.language import require_package
from skyrl_gym.envs.row import NO_ROW, parse_settings, read_ground_truth
from skyrl_gym.metrics import default_aggregate_metrics
from skyrl_gym.tools.calls import strip_thoughts


@dataclass(frozen=True)
class IFEvalConfig:
    """`environment.skyrl_gym.ifeval`."""

    reward: Literal["all", "fraction"] = "all"
    """`all`: 1 if the reply follows every instruction, else 0. `fraction`: the fraction of followed instructions."""
    loose: bool = False
    """Also accept a reply that follows an instruction without its first line, its last line, or its asterisks."""


class IFEvalEnv(BaseTextEnv):
    """One reply. The reward depends on which instructions in `reward_spec["ground_truth"]` it follows.

    Thoughts are not part of the reply. `metadata` has a list of booleans, one per instruction, for each of `strict` and
    `loose`.

    Raises:
        AssertionError: the row has no ground truth.
        ValueError: an instruction is unknown, or its kwargs are invalid.
        ModuleNotFoundError: an instruction is about a language, and py3langid is not installed.
    """

    validates_rows = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] = NO_ROW) -> None:
        super().__init__()
        self._settings = parse_settings("ifeval", env_config, IFEvalConfig)
        self.instructions = parse_instructions(read_ground_truth(extras))
        if any(instruction.needs_language for instruction in self.instructions):
            require_package()
        self._mode = "loose" if self._settings.loose else "strict"
        self._followed: dict[str, list[bool]] = {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Check the reply."""
        self.turns += 1
        reply = strip_thoughts(action)
        strict = check_strict(self.instructions, reply)
        self._followed = {"strict": strict, "loose": check_loose(self.instructions, reply, strict)}
        reward = self.get_metrics()[f"{self._mode}_{self._settings.reward}"]
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=dict(self._followed))

    def get_metrics(self) -> dict[str, Any]:
        """Return whether the reply follows all instructions, which fraction of them, and the first it does not follow.

        Without a reply, return {}.
        """
        if not self._followed:
            return {}
        metrics: dict[str, Any] = {"n_instructions": len(self.instructions)}
        for mode, followed in self._followed.items():
            metrics |= {f"{mode}_all": float(all(followed)), f"{mode}_fraction": sum(followed) / len(followed)}
        if not metrics[f"{self._mode}_all"]:
            metrics["failure"] = f"violated {self.instructions[self._followed[self._mode].index(False)].id}"
        return metrics

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the paper's prompt-level accuracies (`…_all`) and instruction-level accuracies (`…_fraction`)."""
        n_instructions = sum(episode["n_instructions"] for episode in metrics)
        return default_aggregate_metrics(metrics) | {
            name: sum(episode[name] * episode["n_instructions"] for episode in metrics) / n_instructions
            for name in ("strict_fraction", "loose_fraction")
        }
