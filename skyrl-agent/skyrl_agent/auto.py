"""Runners from task files."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_agent.agents.base import BaseAgent
from skyrl_agent.config import AgentConfig
from skyrl_agent.integrations import create_engine
from skyrl_agent.loading import load_class
from skyrl_agent.runner import AgentRunner
from skyrl_agent.tasks.base import BaseTask


class AutoAgentRunner:
    """Factory of runners. Never instantiated."""

    @classmethod
    def from_task(
        cls, task_yaml: str | Path | AgentConfig, infer_engine: Any, tokenizer: PreTrainedTokenizerBase
    ) -> AgentRunner:
        """Create a runner from a task file.

        Args:
            task_yaml: the path of the file, or its settings.
            infer_engine: the engine of `generator.infer_backend`: an `InferenceEngine` or SkyRL's client for
                skyrl-train, a sampling client for tinker, a server manager for verl, None for openai_server.
            tokenizer: the model's tokenizer, with a chat template.

        Raises:
            FileNotFoundError: the file does not exist.
            ConfigError: the file is invalid, or a tool does not exist.
            ValueError: the agent or the task does not exist.
        """
        cfg = task_yaml if isinstance(task_yaml, AgentConfig) else AgentConfig.load(task_yaml)
        agent_cls, task = load_class(cfg.agent_cls, BaseAgent), load_class(cfg.task, BaseTask)
        engine = create_engine(cfg.generator, infer_engine, tokenizer)
        return AgentRunner(cfg, engine, tokenizer, agent_cls, task)
