"""The training step on one page: prompts → rollouts → advantages → update → sync.

P prompts a step, G samples of each, B = P·G trajectories of L tokens, the last R of them response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
import yaml

from skyrl_train.algorithms.advantages import normalize_over_batch
from skyrl_train.algorithms.contract import estimator_traits
from skyrl_train.algorithms.filters import informative_groups
from skyrl_train.algorithms.inputs import (
    FROM_GREEDY_ROLLOUTS,
    FROM_POLICY,
    estimator_inputs,
    named_inputs,
    required_inputs,
)
from skyrl_train.algorithms.kl import kl_controller, penalize_rewards
from skyrl_train.algorithms.masked import masked_mean
from skyrl_train.algorithms.registry import AdvantageEstimator
from skyrl_train.algorithms.stepwise import of_all_rows
from skyrl_train.callbacks import Callback, StepReport
from skyrl_train.checkpoint import CheckpointStore
from skyrl_train.config import SkyRLConfig, changed_settings, to_yaml
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.dataset.prompts import PromptOrder
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.metrics import rollout_metrics, training_reward_metrics
from skyrl_train.generators.step_rollouts import RolloutSampler
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.timer import StepTimer
from skyrl_train.types import PromptRow, TrainingBatch, Trajectory
from skyrl_train.workers.critic import CriticWorker
from skyrl_train.workers.policy import PolicyWorker
from skyrl_train.workers.ref import RefWorker

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Trainer:
    """Trains a policy on the rewards of its own rollouts."""

    def __init__(
        self,
        cfg: SkyRLConfig,
        *,
        prompts: PromptOrder,
        total_steps: int,
        generator: GeneratorInterface,
        engine: InferenceEngine,
        policy: PolicyWorker,
        critic: CriticWorker | None,
        ref: RefWorker | None,
        estimator: AdvantageEstimator,
        pad_token_id: int,
        callbacks: Sequence[Callback],
        compute: Executor,
    ) -> None:
        """`ref` and `critic` are there when the configuration, or the estimator, reads their log-probs and values.

        Models run in `compute`, so that the event loop goes on meanwhile.
        """
        self.cfg = cfg
        self.generator = generator
        self.policy = policy
        self.critic = critic
        self.total_steps = total_steps
        self.global_step = 0
        self.checkpoints = CheckpointStore(Path(cfg.trainer.ckpt_path), cfg.trainer.max_ckpts_to_keep)
        self.timer = StepTimer()
        self.is_stopping = False
        self._prompts = prompts
        self._engine = engine
        self._ref = ref
        self._estimator = estimator
        self._required = required_inputs(estimator)
        self._kl_controller = kl_controller(cfg.trainer.algorithm)
        self._sampler = RolloutSampler(
            cfg, generator, prompts, with_greedy_rewards=bool(self._required & FROM_GREEDY_ROLLOUTS)
        )
        self._n_epochs_over = 0  # when the step began
        self._position = prompts.state_dict()  # likewise
        self._pad_token_id = pad_token_id
        self._callbacks = list(callbacks)
        self._compute = compute
        self._metrics: dict[str, float] = {}
        self._trajectories: list[Trajectory] = []

    async def train(self) -> None:
        """Run from where the last checkpoint left off to the last step."""
        try:
            await self.start()
            for prompts in self.prompt_batches():
                with self.timer("step"):
                    rollouts = await self.rollout(prompts)  # B trajectories
                    batch = self.build_batch(rollouts)  # sequences (B, L)
                    batch = await self.score(batch)  # values, old and reference log-probs (B, R)
                    batch = self.advantages(batch)  # (B, R)
                    await self.update(batch)  # epochs × mini-batches of the value and the policy loss
                    await self.sync_weights()  # the engine holds version global_step
                await self.finish_step()  # callbacks: evaluate, log, checkpoint
        finally:
            for callback in self._callbacks:
                try:
                    await callback.on_train_end(self)
                except Exception:  # the boundary of a report: it must not hide why the run ended
                    logger.exception("%s failed at the end of the run", type(callback).__name__)

    def request_stop(self) -> None:
        """Stop after the current step, with a checkpoint of it."""
        self.is_stopping = True
        logger.warning("Stopping after step %d", self.global_step)

    async def start(self) -> None:
        """Resume, give the engine its weights, and look at the policy before training."""
        self.resume()
        if self.global_step >= self.total_steps:
            logger.warning(
                "This run is finished: it has its %d steps. For another one set trainer.run_name; to go on, raise "
                "trainer.epochs or trainer.max_training_steps",
                self.total_steps,
            )
        await self.sync_weights()
        for callback in self._callbacks:
            await callback.on_train_start(self)
        if self.global_step == 0:
            await self.finish_step()

    def prompt_batches(self) -> Iterator[list[PromptRow]]:
        """P prompts a step, until the last step or a request to stop."""
        while self.global_step < self.total_steps and not self.is_stopping:
            self.global_step += 1
            self._n_epochs_over, self._position = self._prompts.n_epochs_over, self._prompts.state_dict()
            yield self._prompts.next_batch()

    async def rollout(self, prompts: Sequence[PromptRow]) -> list[Trajectory]:
        """G trajectories of each prompt, those that failed left out; dynamic sampling may take more prompts."""
        with self.timer("generate"):
            try:
                sample = await self._sampler.sample(prompts, self.global_step)
            except Exception:
                self._step_back()
                raise
        self._trajectories = sample.played
        self._metrics |= rollout_metrics(sample.played)
        self._metrics |= training_reward_metrics(sample.played, self.cfg.generator.n_samples_per_prompt)
        self._metrics |= sample.metrics
        return sample.rollouts

    def _step_back(self) -> None:
        """The step has failed before it changed a weight: save the one before it, so that a resumed run loses none."""
        self.global_step -= 1
        self._prompts.load_state_dict(self._position)
        if self.cfg.trainer.ckpt_interval > 0 and self.global_step > 0:
            self.save_checkpoint()
            logger.warning("The checkpoint of step %d is saved; the same command goes on from there", self.global_step)

    def build_batch(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        """Pad the trajectories into tensors (B, L); leave groups of equal rewards out of the loss where asked to."""
        algorithm = self.cfg.trainer.algorithm
        batch = build_training_batch(trajectories, self._pad_token_id)
        if algorithm.zero_variance_filter:
            kept = informative_groups(
                batch.rewards.double().sum(dim=-1).tolist(), batch.uids, algorithm.zero_variance_filter_tol
            )
            is_kept = torch.tensor([uid in kept for uid in batch.uids])  # (B,)
            batch.loss_mask = torch.where(is_kept[:, None], batch.loss_mask, 0.0)
            self._metrics["reward/num_zero_variance_filtered"] = float((~is_kept).sum())
        return batch

    async def score(self, batch: TrainingBatch) -> TrainingBatch:
        """Fill in what the advantages and the update read: values, and log-probs of the reference and the policy.

        With one mini-batch and one epoch the policy at the start of the update is the policy in the update: its
        log-probs are computed there anyway, and `old_logprobs` are left out unless something else reads them.
        """
        with self.timer("fwd_logprobs_values_reward"):
            if self.critic is not None:
                batch.values = await self._computed(self.critic.score, batch)
            if self._ref is not None:
                batch.ref_logprobs = await self._computed(self._ref.score, batch)
            if self._needs_old_logprobs(batch):
                scores = await self._computed(self.policy.score, batch)
                batch.old_logprobs, batch.entropies, batch.sum_pi_squared = scores
        return batch

    def _needs_old_logprobs(self, batch: TrainingBatch) -> bool:
        cfg, algorithm = self.cfg.trainer, self.cfg.trainer.algorithm
        is_updated_once = cfg.update_epochs_per_batch == 1 and batch.n_prompts <= cfg.policy_mini_batch_size
        is_read_before = algorithm.use_kl_in_reward or algorithm.top_entropy_quantile < 1
        return not is_updated_once or is_read_before or bool(self._required & FROM_POLICY)

    def advantages(self, batch: TrainingBatch) -> TrainingBatch:
        """Fill in `advantages` and `returns` (B, R)."""
        algorithm = self.cfg.trainer.algorithm
        with self.timer("compute_advantages_and_returns"):
            if algorithm.use_kl_in_reward:
                batch.rewards = self._penalized_rewards(batch)
            batch.advantages, batch.returns = self._estimate(batch)
        self._metrics["loss/avg_final_rewards"] = batch.rewards.sum(dim=-1).mean().item()
        self._metrics["loss/avg_raw_advantages"] = masked_mean(batch.advantages, batch.loss_mask).item()
        self._metrics["loss/avg_raw_advantages_abs"] = masked_mean(batch.advantages.abs(), batch.loss_mask).item()
        if algorithm.advantage_batch_normalize:
            batch.advantages = normalize_over_batch(batch.advantages, batch.loss_mask)
        return batch

    def _estimate(self, batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantages and returns (B, R); rows of one trajectory share theirs."""
        if batch.is_last_row is None:
            inputs = estimator_inputs(batch, self.cfg.trainer.algorithm)
            return self._estimator(**named_inputs(self._estimator, inputs))
        name = self.cfg.trainer.algorithm.advantage_estimator
        if estimator_traits(self.cfg.trainer.algorithm).per_token:
            raise ConfigError(
                f"trainer.algorithm.advantage_estimator={name} takes a trajectory as one row of tokens, and an "
                "environment has rewritten the history of some (modified_chat_history); try grpo"
            )
        last_rows = batch.select(batch.is_last_row.nonzero()[:, 0].tolist())
        last_rows.is_last_row = None
        last_rows.loss_mask = last_rows.attention_mask[:, -last_rows.response_length :].float()  # all of them are read
        advantages, returns = self._estimate(last_rows)
        return (
            of_all_rows(advantages, last_rows.loss_mask, batch.is_last_row, batch.loss_mask),
            of_all_rows(returns, last_rows.loss_mask, batch.is_last_row, batch.loss_mask),
        )

    def _penalized_rewards(self, batch: TrainingBatch) -> torch.Tensor:
        """The rewards (B, R) less the divergence from the reference at each token; moves the coefficient."""
        assert batch.old_logprobs is not None, "scored for the KL penalty"
        assert batch.ref_logprobs is not None, "scored for the KL penalty"
        coefficient = self._kl_controller.value
        rewards, kl = penalize_rewards(
            batch.rewards,
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.loss_mask,
            coefficient,
            self.cfg.trainer.algorithm.kl_estimator_type,
        )
        self._metrics["loss/kl_loss_coef"] = coefficient
        on_tokens = kl[batch.loss_mask > 0]  # (N,)
        if len(on_tokens):
            self._metrics |= {"loss/avg_kl": on_tokens.mean().item(), "loss/avg_kl_max": on_tokens.max().item()}
            self._kl_controller.update(on_tokens.mean().item(), len(batch))
        return rewards

    async def update(self, batch: TrainingBatch) -> None:
        """One optimizer step for each mini-batch, `update_epochs_per_batch` times over; first the critic's."""
        cfg = self.cfg.trainer
        if self.critic is not None:
            with self.timer("critic_train"):
                await self._update(self.critic, batch.chunk(cfg.critic_mini_batch_size))
        with self.timer("policy_train"):
            await self._update(self.policy, batch.chunk(cfg.policy_mini_batch_size))
        has_ended_epoch = self._prompts.n_epochs_over > self._n_epochs_over
        is_last_step = self.global_step == self.total_steps
        if cfg.update_ref_every_epoch and self._ref is not None and has_ended_epoch and not is_last_step:
            self._ref.become(self.policy.model)
            logger.info("The reference is the policy of step %d from here on", self.global_step)

    async def _update(self, worker: PolicyWorker | CriticWorker, mini_batches: Sequence[TrainingBatch]) -> None:
        n_epochs = self.cfg.trainer.update_epochs_per_batch
        self._log_updates([await self._computed(worker.update, mini) for _ in range(n_epochs) for mini in mini_batches])

    async def _computed(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compute, call, *args)

    def _log_updates(self, metrics: Sequence[dict[str, float]]) -> None:
        """One number for the updates of a step, some of which may lack one: extremes, counts, else the mean."""
        for name in {name: None for m in metrics for name in m}:
            values = [m[name] for m in metrics if name in m]
            if name.endswith("_max"):
                self._metrics[name] = max(values)
            elif name.endswith("_min"):
                self._metrics[name] = min(values)
            else:
                total = sum(values)
                self._metrics[name] = total if name.endswith("/skipped_updates") else total / len(values)

    async def sync_weights(self) -> None:
        """From now on the engine samples from the policy as it is after `global_step` steps."""
        with self.timer("sync_weights"):
            await self._engine.sync_weights(self.global_step)

    async def finish_step(self) -> None:
        """Report the step to the callbacks."""
        report = StepReport(self.global_step, self.global_step == self.total_steps, self._metrics, self._trajectories)
        self._metrics, self._trajectories = {}, []
        for callback in self._callbacks:
            await callback.on_step_end(self, report)

    def save_checkpoint(self) -> None:
        """Write everything a resumed run needs to go on as if nothing had happened."""

        def write(folder: Path) -> None:
            for name, worker in self._saved_workers().items():
                worker.save(folder / name)
            torch.save(self._prompts.state_dict(), folder / "data.pt")
            state = {
                "global_step": self.global_step,
                "config": to_yaml(self.cfg),
                "kl_controller": self._kl_controller.state_dict(),
            }
            torch.save(state, folder / "trainer_state.pt")

        self.checkpoints.save(self.global_step, write, self.checkpoint_bytes())

    def checkpoint_bytes(self) -> int:
        """About how large a checkpoint is."""
        return sum(worker.checkpoint_bytes() for worker in self._saved_workers().values())

    def _saved_workers(self) -> dict[str, PolicyWorker | CriticWorker | RefWorker]:
        """Whose state changes in a run, by the name of their folder. Random state is the policy's: it comes last."""
        workers: dict[str, PolicyWorker | CriticWorker | RefWorker] = {}
        if self.critic is not None:
            workers["critic"] = self.critic
        if self._ref is not None and self.cfg.trainer.update_ref_every_epoch:
            workers["ref"] = self._ref
        return workers | {"policy": self.policy}

    def resume(self) -> None:
        """Load the checkpoint that `trainer.resume_mode` asks for, if there is one."""
        folder = self.checkpoints.find(self.cfg.trainer.resume_mode, self.cfg.trainer.resume_path)
        if folder is None:
            return
        try:
            state = torch.load(folder / "trainer_state.pt", weights_only=True)
            position = torch.load(folder / "data.pt", weights_only=True)
            self._kl_controller.load_state_dict(state["kl_controller"])
        except (OSError, RuntimeError, EOFError, KeyError, UnpicklingError) as error:
            raise CheckpointError(f"cannot resume from {folder}: {error}; remove it and resume from another") from error
        self._prompts.load_state_dict(position)
        for name, worker in self._saved_workers().items():
            worker.load(folder / name)
        self.global_step = state["global_step"]
        logger.info("Resumed from %s", folder)
        for line in changed_settings(yaml.safe_load(state["config"]), self.cfg.model_dump(mode="json")):
            logger.warning("Changed since the checkpoint, whose optimizer and schedule go on as they were: %s", line)
