"""Train an agent whose model is on a Tinker service:

    python -m skyrl_agent.integrations.tinker --task task.yaml --train_data train.jsonl

Reads TINKER_API_KEY and TINKER_BASE_URL. Rerun the command with the same `--run_name` to resume.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_agent.auto import AutoAgentRunner
from skyrl_agent.config import AgentConfig
from skyrl_agent.integrations.skyrl_train import check_rows, sampling_settings
from skyrl_agent.integrations.tinker.options import TinkerOptions, parse_options
from skyrl_agent.integrations.tinker.run import TinkerRun
from skyrl_agent.runner import AgentRunner
from skyrl_train.dataset.rows import LocatedRow
from skyrl_train.entrypoints.command import run_command
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.base import InferenceEngine


@dataclass(frozen=True, kw_only=True)
class AgentTinkerOptions(TinkerOptions):
    """Options of a run. The task file sets the number of samples and turns, the lengths, and the sampling."""

    task: str
    model_name: str = "Qwen/Qwen3-32B"
    batch_size: int = 64
    save_every: int = 2
    eval_every: int = 10
    project_name: str = "skyrl-agent"
    run_name: str = "agent_tinker"
    n_samples_per_prompt: int = field(init=False)
    max_turns: int = field(init=False)
    max_generate_length: int = field(init=False)
    max_input_length: int = field(init=False)
    max_sequence_length: int = field(init=False)

    def __post_init__(self) -> None:
        """Apply the task file's settings. Raises ConfigError if it is for a different backend."""
        settings = self.agent.generator
        if settings.infer_backend != "tinker":
            raise ConfigError(f"{self.task}: generator.infer_backend={settings.infer_backend} must be tinker")
        assert settings.backend_config is not None
        n_context, n_reply = settings.backend_config.model_max_len, settings.sampling(is_training=True).max_new_tokens
        if n_reply >= n_context:
            raise ConfigError(
                f"{self.task}: backend_config.model_max_len={n_context} leaves no room for a prompt next to a reply of "
                f"{n_reply} tokens; set sampling_params.max_tokens"
            )
        vars(self).update(
            n_samples_per_prompt=settings.num_trajectories,
            max_turns=settings.max_iterations,
            max_generate_length=n_reply,
            max_input_length=n_context - n_reply,
            max_sequence_length=n_context,
        )
        super().__post_init__()

    @cached_property
    def agent(self) -> AgentConfig:
        """The task file's settings."""
        return AgentConfig.load(self.task)

    def settings(self) -> dict[str, Any]:
        tree, agent = super().settings(), self.agent.generator
        tree["generator"] |= {
            "eval_n_samples_per_prompt": agent.val_config.num_trajectories,
            "sampling_params": sampling_settings(agent.sampling(is_training=True)),
            "eval_sampling_params": sampling_settings(agent.sampling(is_training=False)),
        }
        return tree


class AgentTinkerRun(TinkerRun):
    """Training of an agent on a Tinker service."""

    options: AgentTinkerOptions

    def get_generator(self, engine: InferenceEngine, tokenizer: PreTrainedTokenizerBase) -> AgentRunner:
        return AutoAgentRunner.from_task(self.options.agent, engine, tokenizer)

    def check_rows(self, rows: Iterable[LocatedRow]) -> None:
        check_rows(self.options.agent, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    description, prog = (__doc__ or "").partition(":")[0], f"python -m {__package__}"
    run_command(lambda: AgentTinkerRun(parse_options(AgentTinkerOptions, argv, description, prog)).run())
