"""The models of a run: scores, advantages and updates of a batch, and checkpoints."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from skyrl_train.algorithms.advantages import normalize_over_batch
from skyrl_train.algorithms.filters import informative_groups
from skyrl_train.algorithms.inputs import FROM_POLICY, TrajectoryView, estimator_inputs, named_inputs, required_inputs
from skyrl_train.algorithms.kl import kl_controller
from skyrl_train.algorithms.masked import masked_mean
from skyrl_train.algorithms.registry import AdvantageEstimator
from skyrl_train.algorithms.reward_pipeline import penalize_rewards
from skyrl_train.config.base import value_at
from skyrl_train.config.run import RunConfig
from skyrl_train.config.trainer import TrainerConfig
from skyrl_train.errors import ConfigError, DivergenceError, OutOfMemoryError
from skyrl_train.types import Metric, Metrics, TrainingBatch
from skyrl_train.weight_sync import WeightSync
from skyrl_train.workers.group import WorkerGroup

logger = logging.getLogger(__name__)

N_PROBED_ROWS, N_PROBED_TOKENS, N_PROBED_PAIRS = 2, 8, 4
"""Size of the sample on which `check_weights` tests the new weights: rows, response tokens after the first trained one,
and (for a reward model) whole pairs. The sample is small because every checkpoint waits for the test."""

MIN_MEAN_LOGPROB = -100.0
"""Minimum mean log-prob of trained tokens after an update: exp(-100) is 0 in float32. It also limits the mean distance
between the rewards of a pair to 100, since the loss of a pair is a log-probability of that distance."""


class TrainedModels:
    """The models that a run changes: their checks, checkpoints and exports."""

    def __init__(self, cfg: RunConfig, policy: WorkerGroup, ref: WorkerGroup | None = None) -> None:
        """Create the models. Pass `policy` as `ref` to use the policy without its adapter as the reference."""
        self.policy, self.ref = policy, ref
        self._cfg = cfg
        self._probe: TrainingBatch | None = None  # of the last update

    def set_probe(self, batch: TrainingBatch) -> None:
        """Keep a few tokens of the batch for `check_weights`."""
        if self.policy.role == "reward":  # the shortest pairs of rows
            lengths = batch.attention_mask.sum(dim=1).view(-1, 2).amax(dim=1)  # (B / 2,)
            pairs = lengths.argsort(stable=True)[:N_PROBED_PAIRS, None]
            self._probe = batch.select((2 * pairs + torch.arange(2)).flatten())
        else:
            self._probe = _select_probe(batch)

    async def score_reference(self, batch: TrainingBatch) -> TrainingBatch:
        """Fill in the reference's log-probs (B, R), if any."""
        if self.ref is None:
            return batch
        scores = await self.ref.score(batch, adapter=self.ref is not self.policy)
        return replace(batch, ref_logprobs=scores["logprobs"])

    async def check_weights(self) -> None:
        """Raise DivergenceError unless the weights are finite and still give a gradient on rows of the last update.

        Finite weights are not enough: after far too large an update, every token may have a gradient of 0 or NaN.
        """
        for name, group in self._saved_groups().items():
            fault = None if await group.is_finite() else "its weights are NaN or infinite"
            if fault is None and name != "ref" and self._probe is not None:
                try:
                    fault = _find_divergence((await group.probe(self._probe)).numbers(), name)
                except OutOfMemoryError as error:  # if a rank of several is lost, the next call fails
                    logger.warning("The weights are finite, but are not checked further: %s", error)
            if fault is not None:
                section = "critic" if name == "critic" else "policy"  # the reference is a copy of the policy
                key = f"{section}.optimizer_config.lr"
                model = "reward model" if name == "reward" else name
                raise DivergenceError(
                    f"the {model} has diverged with trainer.{key}={value_at(self._cfg, key):g}: {fault}"
                )

    @property
    def n_optimizer_steps(self) -> int:
        """Number of optimizer steps started, of all models. Until it changes, the weights do not change."""
        return sum(group.n_optimizer_steps for group in self._groups())

    def memory_metrics(self) -> dict[str, float]:
        """Return the token budget of each model whose budget was too large, and the padding of unpacked rows."""
        metrics: dict[str, float] = {}
        for group in self._groups():
            if group.reduced_max_tokens is not None:
                metrics[f"memory/max_tokens_per_microbatch_{group.role}"] = float(group.reduced_max_tokens)
            if group.padding_ratio is not None:
                metrics[f"memory/padding_ratio_{group.role}"] = group.padding_ratio
        return metrics

    def _groups(self) -> list[WorkerGroup]:
        """Return all models."""
        return [self.policy, *([] if self.ref is None or self.ref is self.policy else [self.ref])]

    # -- checkpoints and exports

    @property
    def checkpoint_bytes(self) -> int:
        """Estimated size of a checkpoint."""
        return sum(group.facts.checkpoint_bytes for group in self._saved_groups().values())

    @property
    def update_bytes(self) -> int:
        """Memory of gradients and moments on the devices, which the first update allocates."""
        return sum(group.facts.update_bytes for group in self._saved_groups().values())

    async def save(self, folder: Path) -> Awaitable[None]:
        """Copy the state of each model, and return once training may continue.

        The returned awaitable finishes when each model is written to its own folder.
        """
        writing: list[Awaitable[Any]] = []

        async def finish() -> None:
            results = await asyncio.gather(*writing, return_exceptions=True)  # the folder may be removed next
            for result in results:
                if isinstance(result, BaseException):
                    raise result

        try:
            for name, group in self._saved_groups().items():
                writing.append(await group.save(folder / name))
        except BaseException:
            await asyncio.gather(*writing, return_exceptions=True)
            raise
        return finish()

    async def restore(self, folder: Path) -> None:
        """Load the models that `save` wrote. Raise CheckpointError if one is incomplete or of another architecture."""
        for name, group in self._saved_groups().items():
            await group.load_state(folder / name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state outside the models."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    async def export(self, folder: Path) -> None:
        """Write the trained models as plain Hugging Face folders."""
        for name, group in self._saved_groups().items():
            if name != "ref":
                await group.export(folder / name)

    def _saved_groups(self) -> dict[str, WorkerGroup]:
        """Return the models that change in a run, by the name of their folder."""
        return {self.policy.role: self.policy}


class Learner(TrainedModels):
    """The models of a run, and the computations of a training step. Stages return their metrics.

    A batch has B rows of L tokens, and the last R of them are the response.
    """

    def __init__(
        self,
        cfg: TrainerConfig,
        estimator: AdvantageEstimator,
        *,
        policy: WorkerGroup,
        critic: WorkerGroup | None = None,
        ref: WorkerGroup | None = None,
        reference_sync: WeightSync | None = None,
    ) -> None:
        """Create the learner. Pass `ref` and `critic` if the configuration or the estimator reads their scores.

        `reference_sync` copies the policy's weights to the reference, for `update_ref_every_epoch`.
        """
        super().__init__(cfg, policy, ref)
        self._cfg: TrainerConfig = cfg
        self.critic = critic
        self._reference_sync = reference_sync
        self._estimator = estimator
        self._required = required_inputs(estimator)
        self._kl_controller = kl_controller(cfg.algorithm)

    # -- batch → weights

    def filter_groups(self, batch: TrainingBatch) -> tuple[TrainingBatch, Metrics]:
        """Zero the loss mask of groups whose rewards are all equal, for `zero_variance_filter`."""
        algorithm = self._cfg.algorithm
        if not algorithm.zero_variance_filter:
            return batch, Metrics()
        view = TrajectoryView(batch)
        assert batch.rewards is not None
        totals = view.join(batch.rewards.double()).sum(dim=-1)  # (T,)
        draws = view.take_last_rows(batch.draws).tolist()
        kept = informative_groups(totals.tolist(), draws, algorithm.zero_variance_filter_tol)
        is_kept = torch.tensor([draw in kept for draw in batch.draws.tolist()])  # (B,)
        n_filtered = sum(draw not in kept for draw in draws)
        batch = replace(batch, loss_mask=torch.where(is_kept[:, None], batch.loss_mask, 0.0))
        return batch, Metrics.of({"reward/num_zero_variance_filtered": n_filtered})

    async def score(self, batch: TrainingBatch, *, reads_old_logprobs: bool = False) -> TrainingBatch:
        """Fill in the critic's values and the reference's and policy's log-probs (B, R).

        With one mini-batch and one update epoch, the update itself computes the policy's log-probs, so `old_logprobs`
        stays None unless something reads it before the update. Set `reads_old_logprobs` if the caller does.

        Raise ConfigError for `router_replay` if the batch has no experts.
        """
        if self._cfg.algorithm.router_replay and batch.experts is None:
            raise ConfigError(
                "trainer.algorithm.router_replay=true, but the generator's segments have no experts; set "
                "Segment.experts from EngineResult.experts, or set trainer.algorithm.router_replay=false"
            )
        if self.critic is not None:
            batch = replace(batch, values=(await self.critic.score(batch))["values"])
        batch = await self.score_reference(batch)
        cfg, algorithm = self._cfg, self._cfg.algorithm
        is_updated_once = cfg.update_epochs_per_batch == 1 and batch.n_prompts <= cfg.policy_mini_batch_size
        is_read = reads_old_logprobs or algorithm.use_kl_in_reward or algorithm.top_entropy_quantile < 1
        if is_updated_once and not is_read and not self._required & FROM_POLICY:
            return batch
        scores = await self.policy.score(batch)
        return replace(
            batch, old_logprobs=scores["logprobs"], entropies=scores["entropy"], sum_pi_squared=scores["sum_pi_squared"]
        )

    def advantages(self, batch: TrainingBatch) -> tuple[TrainingBatch, Metrics]:
        """Fill in `advantages` and `returns` (B, R). With `use_kl_in_reward`, first subtract the KL penalty."""
        penalty_metrics = Metrics()
        if self._cfg.algorithm.use_kl_in_reward:
            batch, penalty_metrics = self.subtract_kl_penalty(batch)
        batch, metrics = self.normalize_advantages(self.estimate_advantages(batch))
        return batch, penalty_metrics.merge(metrics)

    def estimate_advantages(self, batch: TrainingBatch) -> TrainingBatch:
        """Fill in `advantages` and `returns` (B, R) with the configured estimator."""
        view = TrajectoryView(batch)
        inputs = named_inputs(self._estimator, estimator_inputs(batch, view, self._cfg.algorithm))
        advantages, returns = (view.split(values) for values in self._estimator(**inputs))
        return replace(batch, advantages=advantages, returns=returns)

    def normalize_advantages(self, batch: TrainingBatch) -> tuple[TrainingBatch, Metrics]:
        """Normalize `advantages` (B, R) if configured. The metrics describe the advantages before normalization."""
        assert batch.rewards is not None
        assert batch.advantages is not None
        metrics = Metrics.of(
            {
                "loss/avg_final_rewards": TrajectoryView(batch).join(batch.rewards).sum(dim=-1).mean().item(),
                "loss/avg_raw_advantages": masked_mean(batch.advantages, batch.loss_mask).item(),
                "loss/avg_raw_advantages_abs": masked_mean(batch.advantages.abs(), batch.loss_mask).item(),
            }
        )
        if self._cfg.algorithm.advantage_batch_normalize:
            batch = replace(batch, advantages=normalize_over_batch(batch.advantages, batch.loss_mask))
        return batch, metrics

    def subtract_kl_penalty(self, batch: TrainingBatch) -> tuple[TrainingBatch, Metrics]:
        """Subtract the per-token KL penalty from the rewards (B, R), and update the KL coefficient."""
        assert batch.rewards is not None
        assert batch.old_logprobs is not None
        assert batch.ref_logprobs is not None
        coefficient = self._kl_controller.value
        rewards, kl = penalize_rewards(
            batch.rewards,
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.loss_mask,
            coefficient,
            self._cfg.algorithm.kl_estimator_type,
        )
        metrics = Metrics.of({"loss/kl_loss_coef": coefficient})
        token_kl = kl[batch.loss_mask > 0]  # (N,)
        if len(token_kl):
            mean = token_kl.mean().item()
            metrics |= {"loss/avg_kl": Metric("mean", mean), "loss/avg_kl_max": Metric("max", token_kl.max().item())}
            self._kl_controller.update(mean, len(TrajectoryView(batch)))
        return replace(batch, rewards=rewards), metrics

    async def update_critic(self, batch: TrainingBatch) -> Metrics:
        """Take one critic step per mini-batch and update epoch."""
        assert self.critic is not None
        return await self._update("critic", self.critic, batch, self._cfg.critic_mini_batch_size)

    async def update_policy(self, batch: TrainingBatch) -> Metrics:
        """Take one policy step per mini-batch and update epoch."""
        return await self._update("policy", self.policy, batch, self._cfg.policy_mini_batch_size)

    async def _update(self, role: str, group: WorkerGroup, batch: TrainingBatch, mini_batch_size: int) -> Metrics:
        metrics = Metrics()
        self.set_probe(batch)
        for epoch in range(self._cfg.update_epochs_per_batch):
            for index, mini_batch in enumerate(batch.chunk(mini_batch_size)):
                is_first = epoch == index == 0  # the weights are still those that scored the batch
                metrics = metrics.merge(await group.update(mini_batch, mini_batch.old_logprobs if is_first else None))
        return metrics.with_prefix(role)

    async def refresh_reference(self, version: int) -> None:
        """Copy the policy's weights to the reference, as `version`."""
        assert self._reference_sync is not None
        await self._reference_sync(version)

    def state_dict(self) -> dict[str, Any]:
        return {"kl_controller": self._kl_controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kl_controller.load_state_dict(state["kl_controller"])

    def _groups(self) -> list[WorkerGroup]:
        return super()._groups() + ([] if self.critic is None else [self.critic])

    def _saved_groups(self) -> dict[str, WorkerGroup]:
        groups = {"policy": self.policy}
        if self.critic is not None:
            groups["critic"] = self.critic
        if self.ref is not None and self._reference_sync is not None:
            groups["ref"] = self.ref
        return groups


def _select_probe(batch: TrainingBatch) -> TrainingBatch | None:
    """Return the `N_PROBED_ROWS` rows with the fewest tokens before their first trained one, truncated.

    `N_PROBED_TOKENS` columns after the last of these first tokens are kept. Return None if no token is trained.
    """
    prompt_length = batch.sequences.shape[1] - batch.response_length
    first = batch.loss_mask.argmax(dim=1)  # (B,) response column of the first trained token
    n_before = (batch.attention_mask[:, :prompt_length].sum(dim=1) + first).tolist()
    probed = sorted(batch.loss_mask.any(dim=1).nonzero()[:, 0].tolist(), key=n_before.__getitem__)[:N_PROBED_ROWS]
    if not probed:
        return None
    end = int(first[probed].max()) + N_PROBED_TOKENS
    rows = batch.select(probed)
    return TrainingBatch(
        sequences=rows.sequences[:, : prompt_length + end],
        attention_mask=rows.attention_mask[:, : prompt_length + end],
        loss_mask=rows.loss_mask[:, :end],
        draws=rows.draws,
    )


def _find_divergence(probe: Mapping[str, float], role: str) -> str | None:
    """Return why the result of `WorkerGroup.probe` shows that the weights are broken, or None if it does not.

    A gradient of 0 is valid if the mean log-prob is exactly 0: the policy is certain of every token.
    """
    mean, norm = probe["mean"], probe["grad_norm"]
    if not math.isfinite(norm):
        return f"the gradient of its outputs is {norm:g}"
    if norm == 0 and mean != 0:
        return "the gradient of its outputs is 0, so it can no longer learn"
    if role != "critic" and mean < MIN_MEAN_LOGPROB:
        if role == "reward":
            return f"the rewards of the pairs that it was trained on differ by {-mean:g} on average"
        return f"the tokens that it was trained on have a mean log-prob of {mean:g}"
    return None
