"""Train a policy: `python -m skyrl_train.entrypoints.main_base data.train_data=… trainer.policy.model.path=…`.

A script of your own registers its environments, builds `BasePPOExp(cfg)` and calls `run()`; override a `get_*` method
to replace a part.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import psutil
import torch
from omegaconf import DictConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

import skyrl_gym
from skyrl_gym.envs.registration import spec as env_spec
from skyrl_train.algorithms import advantage_estimator, policy_loss
from skyrl_train.callbacks import Callback, Checkpointing, Evaluation, Export, Logging, Reporting, TrajectoryDump
from skyrl_train.config import SkyRLConfig, config_dir, parse_cli, to_yaml, validate_cfg, what_runs_here
from skyrl_train.dataset.prompts import PromptDataset, ShuffledPrompts
from skyrl_train.errors import ConfigError, SkyRLError
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.inference_engines.hf import HFEngine
from skyrl_train.models.loading import default_device, load_model, load_tokenizer
from skyrl_train.tracking import RunFolder, Tracking, log_to_file
from skyrl_train.trainer import Trainer
from skyrl_train.workers.policy import PolicyWorker
from skyrl_train.workers.ref import RefWorker

__all__ = ["BasePPOExp", "config_dir", "main", "run_command", "validate_cfg"]

logger = logging.getLogger(__name__)


class BasePPOExp:
    """One training run, put together from its configuration."""

    def __init__(self, cfg: SkyRLConfig | DictConfig) -> None:
        """Check the configuration; ConfigError lists everything that is wrong with it."""
        self.cfg = validate_cfg(cfg)
        self.run_folder = RunFolder.create(
            self.cfg.trainer.output_dir, self.cfg.trainer.project_name, self.cfg.trainer.run_name
        )

    def run(self) -> None:
        """Train to the last step. What can be known to be wrong is said before anything expensive starts."""
        with log_to_file(self.run_folder.train_log):
            for line in what_runs_here(
                self.cfg,
                has_gpu=torch.cuda.is_available(),
                has_vllm=importlib.util.find_spec("vllm") is not None,
            ):
                logger.info(line)
            self.run_folder.config_yaml.write_text(to_yaml(self.cfg), encoding="utf-8")
            _seed_everything(self.cfg.trainer.seed)
            asyncio.run(self._run())

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer."""
        return load_tokenizer(self.cfg.trainer.policy.model.path)

    def get_train_dataset(self, tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
        """The prompts to train on."""
        return PromptDataset(self.cfg.data.train_data, tokenizer, self.cfg.trainer.max_prompt_length)

    def get_eval_dataset(self, tokenizer: PreTrainedTokenizerBase) -> PromptDataset | None:
        """The prompts to evaluate on, if there is any evaluation."""
        if self.cfg.trainer.eval_interval < 0 or not self.cfg.data.val_data:
            return None
        return PromptDataset(self.cfg.data.val_data, tokenizer, self.cfg.trainer.max_prompt_length)

    def get_model(self, path: str) -> PreTrainedModel:
        """A causal language model on this machine's device."""
        return load_model(
            path,
            dtype=getattr(torch, self.cfg.trainer.policy.model.dtype),
            device=default_device(),
            gradient_checkpointing=self.cfg.trainer.gradient_checkpointing,
        )

    def get_engine(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> InferenceEngine:
        """The engine that rollouts are sampled with; it shares the policy's tensors."""
        return HFEngine(
            model,
            tokenizer,
            max_num_seqs=self.cfg.generator.max_num_seqs,
            max_cache_bytes=int(_free_memory() * self.cfg.generator.gpu_memory_utilization),
            bf16=self.cfg.trainer.bf16,
        )

    def get_generator(
        self, cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase, inference_engine_client: InferenceEngine
    ) -> GeneratorInterface:
        """What plays the rollouts."""
        return SkyRLGymGenerator(cfg, inference_engine_client, ChatEncoder(tokenizer))

    def get_tracker(self) -> Tracking:
        """Where metrics go."""
        trainer = self.cfg.trainer
        config = self.cfg.model_dump(mode="json")
        return Tracking(trainer.project_name, trainer.run_name, trainer.logger, config, self.run_folder.path)

    def get_callbacks(
        self, tokenizer: PreTrainedTokenizerBase, eval_dataset: PromptDataset | None, tracker: Tracking
    ) -> list[Callback]:
        """What happens around a step, in this order."""
        chat = ChatEncoder(tokenizer)
        callbacks: list[Callback] = []
        if eval_dataset is not None:
            callbacks.append(Evaluation(eval_dataset, self.run_folder, chat))
        callbacks.append(Logging(tracker))
        if self.cfg.trainer.dump_trajectories:
            callbacks.append(TrajectoryDump(self.run_folder, chat))
        return [*callbacks, Checkpointing(), Export(), Reporting(self.run_folder)]

    async def _run(self) -> None:
        cfg = self.cfg
        estimator = advantage_estimator(cfg.trainer.algorithm.advantage_estimator)
        loss = policy_loss(cfg.trainer.algorithm.policy_loss_type)
        tokenizer = self.get_tokenizer()
        train_dataset = self.get_train_dataset(tokenizer)
        eval_dataset = self.get_eval_dataset(tokenizer)
        check_environments(cfg, [dataset for dataset in (train_dataset, eval_dataset) if dataset is not None])
        prompts = ShuffledPrompts(train_dataset, cfg.trainer.train_batch_size, cfg.trainer.seed)
        total_steps = cfg.trainer.epochs * prompts.batches_per_epoch
        total_steps = min(total_steps, cfg.trainer.max_training_steps or total_steps)
        updates_per_step = cfg.trainer.train_batch_size // cfg.trainer.policy_mini_batch_size
        updates_per_step *= cfg.trainer.update_epochs_per_batch
        model = self.get_model(cfg.trainer.policy.model.path)
        policy = PolicyWorker(model, tokenizer, cfg.trainer, loss, total_steps * updates_per_step)
        ref_path = cfg.trainer.ref.model.path
        ref = RefWorker(self.get_model(ref_path), cfg.trainer) if cfg.trainer.algorithm.use_kl_loss else None
        engine = self.get_engine(model, tokenizer)
        generator = self.get_generator(cfg, tokenizer, engine)
        try:
            with self.get_tracker() as tracker:
                trainer = Trainer(
                    cfg,
                    prompts=prompts,
                    total_steps=total_steps,
                    generator=generator,
                    engine=engine,
                    policy=policy,
                    ref=ref,
                    estimator=estimator,
                    pad_token_id=tokenizer.pad_token_id,
                    callbacks=self.get_callbacks(tokenizer, eval_dataset, tracker),
                )
                with _stopping_gently(trainer):
                    await trainer.train()
        finally:
            generator.close()
            await engine.close()


@contextmanager
def _stopping_gently(trainer: Trainer) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM end the run after its step; a second one ends it at once.

    Raises:
        KeyboardInterrupt: on leaving, when the run was ended before its last step.
    """
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        trainer.request_stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    if trainer.is_stopping and trainer.global_step < trainer.total_steps:
        raise KeyboardInterrupt


def check_environments(cfg: SkyRLConfig, datasets: Sequence[PromptDataset]) -> None:
    """Every environment the rows name must be registered; otherwise the registry's error says which are."""
    for name in sorted({row.env_class or cfg.environment.env_class for rows in datasets for row in rows}):
        try:
            env_spec(name)
        except skyrl_gym.error.Error as error:
            raise ConfigError(f"environment.env_class={name}: {error}") from error


def run_command(command: Callable[[], None]) -> None:
    """Run a command; a mistake of the user's ends with its message alone and exit status 1, an interrupt with 130."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for name in ("skyrl_train", "skyrl_gym"):
        logging.getLogger(name).setLevel(logging.INFO)
    disable_progress_bar()  # transformers draws one for each file it reads or writes
    try:
        command()
    except* SkyRLError as group:
        for error in _leaves(group):
            print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except* KeyboardInterrupt:
        print("Stopped. The same command goes on from the last checkpoint.", file=sys.stderr)
        sys.exit(130)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: `key=value` overrides of the configuration."""
    run_command(lambda: BasePPOExp(parse_cli(sys.argv[1:] if argv is None else argv)).run())


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _free_memory() -> int:
    """Bytes free on the device that generates."""
    return int(torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available)


if __name__ == "__main__":
    main()
