"""Mini-batches of ragged conversations and single-rank workers for the tests of workers."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from workers.oracle import OracleRow, OracleTrajectory

from skyrl_train.algorithms import advantage_estimator
from skyrl_train.algorithms.contract import check_policy_loss
from skyrl_train.algorithms.objectives import Objective, PolicyObjective
from skyrl_train.algorithms.registry import POLICY_LOSSES, PolicyLoss
from skyrl_train.config import SkyRLConfig, load_config
from skyrl_train.config.trainer import TrainerConfig
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.distributed import SingleStrategy
from skyrl_train.launch.specs import model_spec, optimizer_spec
from skyrl_train.types import Segment, TokenScores, TrainingBatch, Trajectory, TrajectoryID
from skyrl_train.types.specs import Role, World, lora_spec
from skyrl_train.workers.group import WorkerGroup
from skyrl_train.workers.ranks import LocalRank

T = TypeVar("T")

TEMPERATURE = 0.7
EPS_LOW, EPS_HIGH, KL_COEF = 0.1, 0.3, 0.05


def config(*, algorithm: Mapping[str, Any] | None = None, **trainer: Any) -> SkyRLConfig:
    defaults = {"eps_clip_low": EPS_LOW, "eps_clip_high": EPS_HIGH, "kl_loss_coef": KL_COEF}
    return load_config(
        {
            "trainer": {"algorithm": {**defaults, **(algorithm or {})}, **trainer},
            "generator": {"sampling_params": {"temperature": TEMPERATURE}},
        }
    )


class InlineExecutor(Executor):
    """An executor that runs each call synchronously in `submit`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001, passed on through the future
            future.set_exception(error)
        return future


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion, even if this thread already has a running event loop."""
    with ThreadPoolExecutor(1) as other_thread:
        return other_thread.submit(asyncio.run, work).result()


class SingleRankGroup:
    """A worker group of one rank in this process, with synchronous methods; metrics are prefixed with the role."""

    def __init__(
        self,
        role: Role,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        cfg: TrainerConfig,
        objective: Objective | None,
    ) -> None:
        section = cfg.critic if role == "critic" else cfg.policy
        optimizer = (
            None
            if objective is None
            else optimizer_spec(section.optimizer_config, f"trainer.{role}.optimizer_config", 10)
        )
        save_tokenizer = (lambda _: None) if tokenizer is None else tokenizer.save_pretrained
        lora = None if role == "ref" else lora_spec(section.model, f"trainer.{role}.model.lora", cfg.seed)
        spec = model_spec(role, lambda: model, save_tokenizer, cfg, cfg.algorithm.temperature, optimizer, lora)
        self.model = model
        self._role = role
        self.rank = LocalRank(InlineExecutor(), SingleStrategy(World()))
        self.group = WorkerGroup(spec, [self.rank], objective)
        complete(self.group.load())

    def score(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        return complete(self.group.score(batch))

    def forward_backward(self, batch: TrainingBatch) -> dict[str, float]:
        return complete(self.group.forward_backward(batch)).with_prefix(self._role).numbers()

    def update(self, batch: TrainingBatch) -> dict[str, float]:
        return complete(self.group.update(batch)).with_prefix(self._role).numbers()

    def save(self, folder: Path) -> None:
        async def save() -> None:
            await (await self.group.save(folder))

        complete(save())

    def load(self, folder: Path) -> None:
        complete(self.group.load_state(folder))


def make_worker(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, loss: str | PolicyLoss = "regular", **trainer: Any
) -> SingleRankGroup:
    """Return a policy worker with a loss, registered by name or a function; `trainer` overrides the configuration."""
    cfg = config(**trainer).trainer
    return SingleRankGroup("policy", model, tokenizer, cfg, policy_objective(cfg, loss))


def policy_objective(cfg: TrainerConfig, loss: str | PolicyLoss = "regular") -> PolicyObjective:
    """Return the objective of a configuration with a given loss, by default that of PPO."""
    function, traits = (POLICY_LOSSES.get(loss), POLICY_LOSSES.traits(loss)) if isinstance(loss, str) else (loss, None)
    return PolicyObjective(check_policy_loss(function, cfg.algorithm, traits), cfg.algorithm)


def score_tokens(model: PreTrainedModel, batch: TrainingBatch, cfg: TrainerConfig) -> TokenScores:
    """Score the batch with a model other than the policy."""
    return TokenScores(**SingleRankGroup("ref", model, None, cfg, None).score(batch))


def random_trajectories(n_prompts: int, n_samples: int, n_tokens: int, seed: int) -> list[OracleTrajectory]:
    """Generate ragged conversations: prompts of 2 to 9 tokens, one to three turns separated by observations."""
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(3, n_tokens) for _ in range(rng.randint(low, high))]

    trajectories = []
    for prompt in range(n_prompts):
        prompt_ids = ids(2, 9)
        for _ in range(n_samples):
            response, was_sampled = ids(1, 5), []
            was_sampled += [True] * len(response)
            for _ in range(rng.randint(0, 2)):
                observation, turn = ids(1, 6), ids(1, 4)
                response += observation + turn
                was_sampled += [False] * len(observation) + [True] * len(turn)
            reward = rng.choice([-1.0, 0.0, 0.5, 1.0])
            rewards = [0.0] * (len(response) - 1) + [reward]
            row = OracleRow(prompt_ids, response, was_sampled, rewards, logprobs=[0.0] * len(response))
            trajectories.append(OracleTrajectory(f"p{prompt}", [row]))
    return trajectories


def as_trajectories(trajectories: list[OracleTrajectory]) -> list[Trajectory]:
    """Return the rollouts as trajectories, as a generator returns them."""
    draws = {uid: draw for draw, uid in enumerate(dict.fromkeys(t.prompt_uid for t in trajectories))}
    return [
        Trajectory(
            id=TrajectoryID(t.prompt_uid, i, draw=draws[t.prompt_uid]),
            env_class="test",
            data_source="test",
            segments=tuple(
                Segment(
                    token_ids=row.prompt_ids + row.response_ids,
                    n_prompt=len(row.prompt_ids),
                    loss_mask=[int(sampled) for sampled in row.was_sampled],
                    rewards=row.rewards,
                    logprobs=row.logprobs,
                )
                for row in t.rows
            ),
            stop_reason="stop",
            greedy_reward=t.greedy_reward,
            reward_components=t.components,
        )
        for i, t in enumerate(trajectories)
    ]


def as_batch(trajectories: list[OracleTrajectory], cfg: SkyRLConfig) -> TrainingBatch:
    """Build a batch with GRPO advantages as the trainer does."""
    batch = build_training_batch(as_trajectories(trajectories), pad_token_id=0)
    batch.advantages, batch.returns = advantage_estimator("grpo")(
        token_level_rewards=batch.rewards,
        response_mask=batch.loss_mask,
        index=[str(draw) for draw in batch.draws.tolist()],
        values=None,
        config=cfg.trainer.algorithm,
    )
    return batch


def perturbed(model: PreTrainedModel, scale: float, seed: int) -> PreTrainedModel:
    """Return a copy with slightly different weights, as after an update."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return other


def gradients(worker: SingleRankGroup, batch: TrainingBatch) -> dict[str, torch.Tensor]:
    worker.model.zero_grad()
    worker.forward_backward(batch)
    return {name: p.grad.clone() for name, p in worker.model.named_parameters() if p.grad is not None}


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


def rounding_tolerance(gradient: dict[str, torch.Tensor]) -> float:
    """Return a float32 tolerance for gradients; losses that sum over tokens have larger gradients than means."""
    return 1e-6 + 2e-6 * max(values.abs().max().item() for values in gradient.values())


def off_policy_batch(policy: PreTrainedModel, n_tokens: int, seed: int) -> TrainingBatch:
    """Return a batch whose old policy, rollout policy and reference all differ from `policy`."""
    return score_off_policy(policy, as_batch(random_trajectories(4, 4, n_tokens, seed), config()))


def score_off_policy(policy: PreTrainedModel, batch: TrainingBatch) -> TrainingBatch:
    """Fill in log-probs of an old policy, a rollout policy and a reference that all differ from `policy`."""
    cfg = config()
    batch.ref_logprobs = score_tokens(perturbed(policy, 0.02, seed=1), batch, cfg.trainer).logprobs
    old = score_tokens(perturbed(policy, 0.02, seed=2), batch, cfg.trainer)
    batch.old_logprobs, batch.entropies, _ = old
    batch.rollout_logprobs = score_tokens(perturbed(policy, 0.02, seed=3), batch, cfg.trainer).logprobs
    return batch
