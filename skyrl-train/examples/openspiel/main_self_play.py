"""Train in whole games of OpenSpiel against a frozen copy of the policy.

    python -m examples.openspiel.main_self_play data.train_data=… trainer.policy.model.path=… generator.max_turns=20

The opponent is the reference, `trainer.ref.model.path`: the policy before training, unless that names another model. It
is served in this process, by an endpoint like OpenAI's, where the environment `openspiel_game` asks it for its moves.
Everything else is an ordinary run. The next generation is another run, which trains what this one has exported.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.environment import SkyRLGymConfig
from skyrl_train.entrypoints.main_base import BasePPOExp, parse_cli, run_command
from skyrl_train.entrypoints.main_generate import EvalOnlyEntrypoint
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.chat_template import custom_chat_template
from skyrl_train.generators.endpoint import Endpoint, ModelService
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.models.loading import REF_PATH, check_same_vocabulary

ENV_CLASS = "openspiel_game"
MODEL_NAME = "opponent"


class SelfPlayExp(BasePPOExp):
    """A training run whose opponent is the reference."""

    opponent_url = ""
    """Where the opponent answers while the run plays."""

    @asynccontextmanager
    async def playing(self, model: PreTrainedModel) -> AsyncIterator[tuple[InferenceEngine, GeneratorInterface]]:
        """See `BasePPOExp.playing`; meanwhile the opponent is served."""
        path, generator = self.cfg.trainer.ref.model.path, self.cfg.generator
        check_same_vocabulary(path, REF_PATH, self.tokenizer)
        async with AsyncExitStack() as stack:
            engine = self.get_engine(self.get_model(path, REF_PATH))
            stack.push_async_callback(engine.close)
            service = ModelService(
                engine,
                self.tokenizer,
                model_name=MODEL_NAME,
                chat_template=custom_chat_template(generator.chat_template),
                chat_template_kwargs=generator.chat_template_kwargs,
            )
            endpoint = Endpoint(service)
            stack.push_async_callback(endpoint.close)
            await endpoint.start()
            self.opponent_url = endpoint.url()
            yield await stack.enter_async_context(super().playing(model))

    def get_generator(
        self, cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase, inference_engine_client: InferenceEngine
    ) -> GeneratorInterface:
        """See `BasePPOExp.get_generator`; the opponent in its games is the one that is served."""
        gym = against(cfg, self.opponent_url)
        return SkyRLGymGenerator(cfg.generator, gym, inference_engine_client, tokenizer)


class SelfPlayEval(SelfPlayExp, EvalOnlyEntrypoint):
    """Games of `trainer.policy.model.path` against `trainer.ref.model.path`, without training either."""


def against(cfg: SkyRLConfig, base_url: str) -> SkyRLGymConfig:
    """The configuration of environments in which the model at `base_url` is the opponent.

    It samples as the policy does, unless `environment.skyrl_gym.openspiel_game.policy.sampling_params` says otherwise.
    """
    gym, sampling = cfg.environment.skyrl_gym, cfg.generator.sampling_params
    if gym.max_env_workers == 0:
        raise ConfigError(
            "environment.skyrl_gym.max_env_workers=0 calls environments in the thread that serves their opponent, and "
            "they would wait for each other; use 1 or more"
        )
    options: dict[str, Any] = gym.env_config(ENV_CLASS)
    told = options.get("policy", {})
    samples = {"temperature": sampling.temperature, "max_tokens": sampling.max_generate_length}
    policy = told | {
        "sampling_params": samples | told.get("sampling_params", {}),
        "base_url": base_url,
        "model": MODEL_NAME,
    }
    return SkyRLGymConfig(**gym.model_dump() | {ENV_CLASS: options | {"opponent": "policy", "policy": policy}})


def main() -> None:
    """The command line: `key=value` overrides."""
    run_command(lambda: SelfPlayExp(parse_cli(sys.argv[1:])).run())


if __name__ == "__main__":
    main()
