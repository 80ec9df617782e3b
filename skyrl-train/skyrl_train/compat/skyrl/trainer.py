"""SkyRL's trainer, with its constructor and hooks, for scripts that subclass it."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from skyrl_train.callbacks import Callback, Evaluation
from skyrl_train.compat.skyrl.absent import TRAINER_ATTRIBUTES, TRAINER_METHODS, describe_missing, refuse_overrides
from skyrl_train.compat.skyrl.batch import TrainingInputBatch
from skyrl_train.compat.skyrl.generator import GeneratorOutput, edit_as_lists, place_reward, returns_totals
from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import DataError
from skyrl_train.generators.base import RolloutGenerator
from skyrl_train.trainer import Step, Trainer
from skyrl_train.types import Metrics, TrainingBatch, Trajectory


class RayPPOTrainer(Trainer):
    """A `Trainer` with SkyRL's constructor, for `BasePPOExp.get_trainer`.

    Subclasses may override the stages of `Trainer`, and these SkyRL hooks: `postprocess_generator_output`,
    `apply_reward_kl_penalty`, `compute_advantages_and_returns` and `eval`. In the first three, `global_step` is the
    current step. Numbers added to `all_metrics` and seconds added to `all_timings` are logged with the step.

    The experiment adds the models with `attach`.
    """

    global_step: int = 0

    def __init__(
        self,
        cfg: SkyRLConfig,
        tracker: Any,
        tokenizer: Any,
        train_dataset: Any,
        eval_dataset: Any,
        inference_engine_client: Any,
        generator: RolloutGenerator,
        colocate_pg: Any = None,
    ) -> None:
        """Keep the arguments as attributes."""
        self.cfg = cfg
        self.tracker = tracker
        self.tokenizer = tokenizer
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.inference_engine_client = inference_engine_client
        self.generator = generator
        self.colocate_pg = colocate_pg
        self.all_metrics: dict[str, float] = {}
        self.all_timings: dict[str, float] = {}
        self._evaluation: Evaluation | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise ConfigError if the subclass overrides a SkyRL method that nothing calls here."""
        super().__init_subclass__(**kwargs)
        refuse_overrides(cls, RayPPOTrainer, TRAINER_METHODS)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError. For attributes of SkyRL's trainer, the message suggests a replacement."""
        raise AttributeError(describe_missing(self, name, TRAINER_METHODS | TRAINER_ATTRIBUTES))

    def attach(self, *, callbacks: Sequence[Callback], **parts: Any) -> None:
        """Complete the trainer with the remaining arguments of `Trainer`."""
        for callback in callbacks:
            if isinstance(callback, Evaluation):
                self._evaluation = callback
                if self._overrides("eval"):
                    callback.evaluator = lambda _run: self.eval()
        super().__init__(self.cfg, callbacks=callbacks, **parts)

    @property
    def postprocesses(self) -> bool:
        """True if a subclass overrides `postprocess_generator_output`."""
        return self._overrides("postprocess_generator_output")

    def _overrides(self, hook: str) -> bool:
        return getattr(type(self), hook) is not getattr(RayPPOTrainer, hook)

    # -- the hooks

    def postprocess_generator_output(self, generator_output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        """Return the rollouts with per-token rewards. A single reward goes to the response's last sampled token.

        `uids` identifies the dataset row of each response. An override may also take `data_sources`.
        """
        rewards: Any = [
            place_reward(0.0 if reward is None else reward, loss_mask)
            for reward, loss_mask in zip(generator_output["rewards"], generator_output["loss_masks"], strict=True)
        ]
        return {**generator_output, "rewards": rewards}

    def apply_reward_kl_penalty(self, data: TrainingInputBatch) -> TrainingInputBatch:
        """Subtract the KL penalty from the rewards (B, R). Called with `trainer.algorithm.use_kl_in_reward`."""
        batch, metrics = self.learner.subtract_kl_penalty(data.to_batch())
        self.all_metrics |= metrics.numbers()
        data.fill(batch)
        return data

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        """Fill in advantages and returns (B, R) with the configured estimator."""
        data.fill(self.learner.estimate_advantages(data.to_batch()))
        return data

    async def eval(self) -> dict[str, float]:
        """Evaluate the current weights and return the metrics. Without validation data, return {}."""
        return {} if self._evaluation is None else await self._evaluation.measure(self)

    # -- the stages that call them

    def build_batch(self, step: Step, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        if not self.postprocesses:
            return super().build_batch(step, trajectories)
        rows = [t for t in trajectories for _ in t.segments]
        uids, options = [t.id.instance_id for t in rows], {}
        if "data_sources" in inspect.signature(self.postprocess_generator_output).parameters:
            options["data_sources"] = [t.data_source for t in rows]

        def edit(lists: GeneratorOutput) -> GeneratorOutput:
            output: Any = self.postprocess_generator_output(lists, uids, **options)
            return output[0] if isinstance(output, tuple) else output  # hooks of the new layout also return the uids

        with self._in_hook(step, "postprocess_generator_output"):
            trajectories = edit_as_lists(trajectories, edit, with_totals=returns_totals(self.generator))
        return super().build_batch(step, trajectories)

    async def score(self, step: Step, batch: TrainingBatch) -> TrainingBatch:
        with step.timer("fwd_logprobs_values_reward"):
            return await self.learner.score(batch, reads_old_logprobs=self._overrides("compute_advantages_and_returns"))

    def advantages(self, step: Step, batch: TrainingBatch) -> TrainingBatch:
        if not (self._overrides("apply_reward_kl_penalty") or self._overrides("compute_advantages_and_returns")):
            return super().advantages(step, batch)
        data = TrainingInputBatch(batch, global_step=step.number)
        if self.cfg.trainer.algorithm.use_kl_in_reward:
            with self._in_hook(step, "apply_reward_kl_penalty"):
                data = _checked(self.apply_reward_kl_penalty(data))
        with self._in_hook(step, "compute_advantages_and_returns"):
            data = _checked(self.compute_advantages_and_returns(data))
            if data["advantages"] is None:
                raise DataError("data['advantages'] is not set; set it, and with a critic data['returns']")
        batch, metrics = self.learner.normalize_advantages(data.to_batch())
        step.record(metrics)
        return batch

    async def finish_step(self, step: Step) -> None:
        timings = {f"timing/{name}": seconds for name, seconds in self.all_timings.items()}
        step.record(Metrics.of(self.all_metrics | timings))
        self.all_metrics, self.all_timings = {}, {}
        await super().finish_step(step)

    @contextmanager
    def _in_hook(self, step: Step, name: str) -> Iterator[None]:
        """Run a hook: `global_step` is the current step, and timings and errors name the hook. Await nothing inside."""
        finished, self.global_step = self.global_step, step.number
        try:
            with step.timer(name):
                yield
        except DataError as error:
            raise DataError(f"{type(self).__name__}.{name}: {error}") from error
        finally:
            self.global_step = finished


def _checked(data: object) -> TrainingInputBatch:
    """Return a hook's result. Raise DataError if it is not a batch, or if the shape of a tensor has changed."""
    if not isinstance(data, TrainingInputBatch):
        raise DataError(f"it returned a {type(data).__name__}; return the batch that it received")
    data.to_batch()
    return data


class FullyAsyncRayPPOTrainer(RayPPOTrainer):
    """A `RayPPOTrainer` that trains while rollouts are generated.

    It turns on `trainer.fully_async.enabled`. The engines must run in other processes.
    """
