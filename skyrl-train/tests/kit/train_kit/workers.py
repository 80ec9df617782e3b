"""Workers of one rank in this process, with synchronous methods."""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.algorithms.contract import check_policy_loss
from skyrl_train.algorithms.objectives import Objective, PolicyObjective
from skyrl_train.algorithms.registry import POLICY_LOSSES, PolicyLoss
from skyrl_train.config import SkyRLConfig, load_config
from skyrl_train.config.trainer import TrainerConfig
from skyrl_train.entrypoints.load_learner import model_spec
from skyrl_train.launch.process import LocalRank, RankHost
from skyrl_train.types import TokenScores, TrainingBatch
from skyrl_train.types.specs import OptimizerSpec, Role, World, lora_spec
from skyrl_train.workers.group import WorkerGroup
from skyrl_train.workers.worker import Worker

T = TypeVar("T")

TEMPERATURE = 0.7
KL_COEF = 0.05


def config(*, algorithm: Mapping[str, Any] | None = None, **trainer: Any) -> SkyRLConfig:
    """Return a configuration with these settings of `trainer`; every term of the default loss has an effect."""
    defaults = {"eps_clip_low": 0.1, "eps_clip_high": 0.3, "kl_loss_coef": KL_COEF}
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


@functools.cache
def _background_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="complete", daemon=True).start()
    return loop


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion, even if this thread already has a running event loop."""
    return asyncio.run_coroutine_threadsafe(work, _background_loop()).result()


class SingleRankGroup:
    """A worker group of one rank in this process, with synchronous methods; metrics are prefixed with the role."""

    def __init__(
        self,
        role: Role,
        model: PreTrainedModel,
        cfg: TrainerConfig,
        objective: Objective | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        section = cfg.critic if role == "critic" else cfg.policy
        key = f"trainer.{role}"
        optimizer = objective and OptimizerSpec(section.optimizer_config, 10)
        save_tokenizer = (lambda _: None) if tokenizer is None else tokenizer.save_pretrained
        lora = None if role == "ref" else lora_spec(section.model, f"{key}.model.lora", cfg.seed)
        spec = model_spec(role, lambda: model, save_tokenizer, cfg, cfg.algorithm.temperature)
        spec = replace(spec, optimizer=optimizer, lora=lora, train_dtype=section.model.train_dtype)
        self.model = model
        self._role = role
        self.rank = LocalRank(InlineExecutor(), RankHost(World()))
        self.group = WorkerGroup(spec, [self.rank], objective)
        complete(self.group.load())

    @property
    def worker(self) -> Worker:
        return self.rank.host.workers[self._role]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.worker._state.optimizer
        assert optimizer is not None
        return optimizer

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
    model: PreTrainedModel,
    loss: str | PolicyLoss = "regular",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **trainer: Any,
) -> SingleRankGroup:
    """Return a policy worker with a loss, registered by name or a function; `trainer` overrides the configuration."""
    cfg = config(**trainer).trainer
    return SingleRankGroup("policy", model, cfg, policy_objective(cfg, loss), tokenizer)


def policy_objective(cfg: TrainerConfig, loss: str | PolicyLoss = "regular") -> PolicyObjective:
    """Return the objective of a configuration with a given loss, by default that of PPO."""
    function, traits = (POLICY_LOSSES.get(loss), POLICY_LOSSES.traits(loss)) if isinstance(loss, str) else (loss, None)
    return PolicyObjective(check_policy_loss(function, cfg.algorithm, traits), cfg.algorithm)


def score_tokens(model: PreTrainedModel, batch: TrainingBatch, cfg: TrainerConfig) -> TokenScores:
    """Score the batch with a model other than the policy."""
    return TokenScores(**SingleRankGroup("ref", model, cfg, None).score(batch))


def gradients(worker: SingleRankGroup, batch: TrainingBatch) -> dict[str, torch.Tensor]:
    """Return the gradient of the worker's loss by parameter name."""
    worker.model.zero_grad()
    worker.forward_backward(batch)
    return {name: p.grad.clone() for name, p in worker.model.named_parameters() if p.grad is not None}


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Return the maximum absolute difference between two gradients of the same parameters."""
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


def rounding_tolerance(gradient: dict[str, torch.Tensor]) -> float:
    """Return a float32 tolerance for gradients; losses that sum over tokens have larger gradients than means."""
    return 1e-6 + 2e-6 * max(values.abs().max().item() for values in gradient.values())
