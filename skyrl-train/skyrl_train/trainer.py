"""The training step on one page: prompts → rollouts → advantages → update → sync.

P prompts a step, G samples of each, B = P·G trajectories of L tokens, the last R of them response.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError

import torch
import yaml

from skyrl_train.algorithms.registry import AdvantageEstimator
from skyrl_train.callbacks import Callback, StepReport
from skyrl_train.checkpoint import CheckpointStore
from skyrl_train.config import SkyRLConfig, changed_settings, to_yaml
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.dataset.prompts import ShuffledPrompts
from skyrl_train.errors import CheckpointError, EnvError
from skyrl_train.generators.base import BatchMetadata, GeneratorInterface, rollout_requests
from skyrl_train.generators.metrics import rollout_metrics, training_reward_metrics
from skyrl_train.inference_engines.base import InferenceEngine, SamplingParams
from skyrl_train.timer import StepTimer
from skyrl_train.types import PromptRow, TrainingBatch, Trajectory
from skyrl_train.workers.policy import PolicyWorker
from skyrl_train.workers.ref import RefWorker

logger = logging.getLogger(__name__)


class Trainer:
    """Trains a policy on the rewards of its own rollouts."""

    def __init__(
        self,
        cfg: SkyRLConfig,
        *,
        prompts: ShuffledPrompts,
        total_steps: int,
        generator: GeneratorInterface,
        engine: InferenceEngine,
        policy: PolicyWorker,
        ref: RefWorker | None,
        estimator: AdvantageEstimator,
        pad_token_id: int,
        callbacks: Sequence[Callback],
    ) -> None:
        """`ref` is needed when `trainer.algorithm.use_kl_loss` is set."""
        self.cfg = cfg
        self.generator = generator
        self.policy = policy
        self.total_steps = total_steps
        self.global_step = 0
        self.checkpoints = CheckpointStore(Path(cfg.trainer.ckpt_path), cfg.trainer.max_ckpts_to_keep)
        self.timer = StepTimer()
        self.is_stopping = False
        self._prompts = prompts
        self._engine = engine
        self._ref = ref
        self._estimator = estimator
        self._pad_token_id = pad_token_id
        self._callbacks = list(callbacks)
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
                    batch = self.score(batch)  # old and reference log-probs (B, R)
                    batch = self.advantages(batch)  # (B, R)
                    self.update(batch)  # epochs × mini-batches of the policy loss
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
            yield self._prompts.next_batch()

    async def rollout(self, prompts: Sequence[PromptRow]) -> list[Trajectory]:
        """G trajectories of each prompt; the invalid ones are counted and left out.

        A trajectory whose whole group failed has nothing to be compared with: it is left out too.
        """
        n_samples = self.cfg.generator.n_samples_per_prompt
        metadata = BatchMetadata(self.global_step, "train", self.cfg.trainer.seed)
        with self.timer("generate"):
            trajectories = await self.generator.rollout(
                rollout_requests(prompts, n_samples, self.cfg.environment.env_class),
                SamplingParams.from_config(self.cfg.generator.sampling_params),
                metadata,
            )
        self._trajectories = trajectories
        self._metrics |= rollout_metrics(trajectories)
        self._metrics |= training_reward_metrics(trajectories, n_samples)
        n_valid = Counter(t.id.instance_id for t in trajectories if t.is_valid)
        usable = [t for t in trajectories if t.is_valid and (n_samples == 1 or n_valid[t.id.instance_id] > 1)]
        if not usable:
            failures = [t.error for t in trajectories if not t.is_valid]
            raise EnvError(
                f"{len(failures)} of {len(trajectories)} rollouts of step {self.global_step} failed and none is left "
                f"to learn from; the first: {failures[0]}. Fix the environment and resume"
            )
        self._metrics["generate/n_left_alone"] = float(n_valid.total() - len(usable))
        return usable

    def build_batch(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        """Pad the trajectories into tensors (B, L)."""
        return build_training_batch(trajectories, self._pad_token_id)

    def score(self, batch: TrainingBatch) -> TrainingBatch:
        """Fill in `ref_logprobs` for the KL loss, and `old_logprobs` unless the update sees only current ones.

        With one mini-batch and one epoch the policy at the start of the update is the policy in the update: its
        log-probs are computed there anyway, and a pass of their own would be redundant.
        """
        is_one_mini_batch = len(set(batch.uids)) <= self.cfg.trainer.policy_mini_batch_size
        with self.timer("fwd_logprobs_values_reward"):
            if self._ref is not None:
                batch.ref_logprobs = self._ref.score(batch)
            if self.cfg.trainer.update_epochs_per_batch > 1 or not is_one_mini_batch:
                batch.old_logprobs = self.policy.score(batch)
        return batch

    def advantages(self, batch: TrainingBatch) -> TrainingBatch:
        """Fill in `advantages` and `returns` (B, R)."""
        with self.timer("compute_advantages_and_returns"):
            batch.advantages, batch.returns = self._estimator(
                token_level_rewards=batch.rewards,
                response_mask=batch.loss_mask,
                index=batch.uids,
                values=batch.values,
                config=self.cfg.trainer.algorithm,
            )
        on_mask = batch.advantages[batch.loss_mask > 0]
        self._metrics["loss/avg_final_rewards"] = batch.rewards.sum(dim=-1).mean().item()
        self._metrics["loss/avg_raw_advantages"] = on_mask.mean().item()
        self._metrics["loss/avg_raw_advantages_abs"] = on_mask.abs().mean().item()
        return batch

    def update(self, batch: TrainingBatch) -> None:
        """One optimizer step for each mini-batch, `update_epochs_per_batch` times over."""
        mini_batches = batch.chunk(self.cfg.trainer.policy_mini_batch_size)
        with self.timer("policy_train"):
            metrics = [
                self.policy.update(mini_batch)
                for _ in range(self.cfg.trainer.update_epochs_per_batch)
                for mini_batch in mini_batches
            ]
        for name in {name: None for m in metrics for name in m}:  # an update may have been skipped
            values = [m[name] for m in metrics if name in m]
            self._metrics[name] = sum(values) if name == "policy/skipped_updates" else sum(values) / len(values)

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
            self.policy.save(folder / "policy")
            torch.save(self._prompts.state_dict(), folder / "data.pt")
            state = {"global_step": self.global_step, "config": to_yaml(self.cfg)}
            torch.save(state, folder / "trainer_state.pt")

        self.checkpoints.save(self.global_step, write, self.policy.checkpoint_bytes())

    def resume(self) -> None:
        """Load the checkpoint that `trainer.resume_mode` asks for, if there is one."""
        folder = self.checkpoints.find(self.cfg.trainer.resume_mode, self.cfg.trainer.resume_path)
        if folder is None:
            return
        try:
            state = torch.load(folder / "trainer_state.pt", weights_only=True)
            position = torch.load(folder / "data.pt", weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise CheckpointError(f"cannot resume from {folder}: {error}; remove it and resume from another") from error
        self._prompts.load_state_dict(position)
        self.policy.load(folder / "policy")
        self.global_step = state["global_step"]
        logger.info("Resumed from %s", folder)
        for line in changed_settings(yaml.safe_load(state["config"]), self.cfg.model_dump(mode="json")):
            logger.warning("Changed since the checkpoint, whose optimizer and schedule go on as they were: %s", line)
