"""One reply, scored by judges."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.row import NO_ROW, parse_settings
from skyrl_gym.error import InvalidSettings
from skyrl_gym.images import join_texts
from skyrl_gym.judges.judge import Judgement
from skyrl_gym.judges.panel import Panel, find_reference, load_panel


@dataclass(frozen=True)
class JudgeConfig:
    """`environment.skyrl_gym.judge`."""

    path: str = ""
    """YAML file of the judges, see `PanelSettings`."""


class JudgeEnv(BaseTextEnv):
    """One reply, with the judges' score as its reward. The judges see the last message of the prompt.

    `reward_spec["ground_truth"]` is the correct answer, if the row has one. An unknown score makes the rollout invalid.
    The metrics are the verdicts, by criterion.

    Raises:
        InvalidSettings: the file of judges is missing or invalid.
    """

    validates_rows = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] = NO_ROW) -> None:
        super().__init__()
        path = parse_settings("judge", env_config, JudgeConfig).path
        if not path:
            raise InvalidSettings("environment.skyrl_gym.judge.path is empty; set it to a YAML file of judges")
        self._panel = _shared_panel(path)
        self._reference = find_reference(extras)
        self._question = ""
        self._judgement: Judgement | None = None

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Remember the question."""
        self._question = join_texts(prompt[-1]["content"]) if prompt else ""
        return super().init(prompt)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judge the reply. Blocks."""
        return self._finish(self._panel.judge(self._question, action, self._reference))

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        """Judge the reply."""
        return self._finish(await self._panel.judge_async(self._question, action, self._reference))

    def _finish(self, judgement: Judgement) -> BaseTextEnvStepOutput:
        self.turns += 1
        self._judgement = judgement
        metadata = {} if judgement.problem is None else {"problem": judgement.problem}
        return BaseTextEnvStepOutput(observations=[], reward=judgement.score, done=True, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """Return the verdicts by criterion."""
        verdicts = self._judgement.verdicts if self._judgement else {}
        return {name: float(verdict) for name, verdict in verdicts.items() if verdict is not None}


@cache
def _shared_panel(path: str) -> Panel:
    """Return the process's panel for a file, so that all episodes share its cache and limits."""
    return load_panel(path)
