"""Train on whole OpenSpiel games against a frozen copy of the policy.

    PYTHONPATH=../skyrl-agent/examples python -m openspiel_self_play.main_self_play data.train_data=… \
        trainer.policy.model.path=… generator.max_turns=20

The opponent is the reference, `trainer.ref.model.path`: by default the policy before training. An OpenAI-compatible
endpoint in this process serves it, and the environment `openspiel_game` requests its moves there. Everything else is an
ordinary run. For the next generation, start a new run from the exported model.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_agent.endpoint import Endpoint, ModelService
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.root import SkyRLGymConfig
from skyrl_train.entrypoints import main_base
from skyrl_train.entrypoints.evaluation import EvaluationExperiment
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import RolloutGenerator
from skyrl_train.generators.chat_template import load_chat_template
from skyrl_train.generators.gym_generator import GymGenerator
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.models.loading import REF_PATH, check_same_tokens

ENV_CLASS = "openspiel_game"
MODEL_NAME = "opponent"


class SelfPlayExp(RLExperiment):
    """A training run with the reference as the opponent."""

    opponent_url = ""
    """URL of the opponent during the run."""

    @asynccontextmanager
    async def playing(self, model: PreTrainedModel | None) -> AsyncIterator[tuple[InferenceEngine, RolloutGenerator]]:
        """Serve the opponent while the run's engine and generator are open."""
        path, generator = self.cfg.trainer.ref.model.path, self.cfg.generator
        check_same_tokens(path, REF_PATH, self.tokenizer)
        async with AsyncExitStack() as stack:
            engine = self.get_engine(self.get_model(path, REF_PATH))
            stack.push_async_callback(engine.close)
            service = ModelService(
                engine,
                self.tokenizer,
                model_name=MODEL_NAME,
                chat_template=load_chat_template(generator.chat_template),
                chat_template_kwargs=generator.chat_template_kwargs,
            )
            endpoint = Endpoint(service)
            stack.push_async_callback(endpoint.close)
            await endpoint.start()
            self.opponent_url = endpoint.url()
            yield await stack.enter_async_context(super().playing(model))

    def get_generator(
        self, cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase, inference_engine_client: InferenceEngine
    ) -> RolloutGenerator:
        """Return a generator whose games use the served opponent."""
        gym = opponent_config(cfg, self.opponent_url)
        return GymGenerator(cfg.generator, gym, inference_engine_client, tokenizer)


class SelfPlayEval(SelfPlayExp, EvaluationExperiment):
    """Evaluation of `trainer.policy.model.path` in games against `trainer.ref.model.path`, without training."""


def opponent_config(cfg: SkyRLConfig, base_url: str) -> SkyRLGymConfig:
    """Return the environments' configuration, with the model at `base_url` as the opponent.

    `environment.skyrl_gym.openspiel_game.policy.sampling_params` overrides the policy's sampling parameters.
    """
    gym, sampling = cfg.environment.skyrl_gym, cfg.generator.sampling_params
    if gym.max_env_workers == 0:
        raise ConfigError(
            "environment.skyrl_gym.max_env_workers=0 calls environments in the thread that serves their opponent, and "
            "they would wait for each other; use 1 or more"
        )
    options: dict[str, Any] = gym.env_config(ENV_CLASS)
    policy_options = options.get("policy", {})
    default_sampling = {"temperature": sampling.temperature, "max_tokens": sampling.max_generate_length}
    policy = policy_options | {
        "sampling_params": default_sampling | policy_options.get("sampling_params", {}),
        "base_url": base_url,
        "model": MODEL_NAME,
    }
    return SkyRLGymConfig(**gym.model_dump() | {ENV_CLASS: options | {"opponent": "policy", "policy": policy}})


def main() -> None:
    """Run the command line, with the options of `skyrl train`."""
    main_base.main(experiment=SelfPlayExp)


if __name__ == "__main__":
    main()
