"""Supervised fine-tuning: the cross-entropy of answers, on the workers of reinforcement learning.

A step draws rows of the dataset. Its batch has B rows of L tokens, and only the tokens of answers are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_train.callbacks import Callback, Run, StepReport, is_due
from skyrl_train.config.sft import SFTConfig
from skyrl_train.dataset.order import ShuffledPrompts
from skyrl_train.dataset.supervised import SupervisedDataset, build_supervised_batch
from skyrl_train.learner import TrainedModels
from skyrl_train.run import Step, TrainingRun
from skyrl_train.tracking.system import system_metrics
from skyrl_train.types import DrawnPrompt, Metric, Metrics, TrainingBatch
from skyrl_train.workers.group import WorkerGroup

VALIDATION_ROWS = 32
"""Rows in memory at once for the validation loss, which does not depend on it."""


class SupervisedRows:
    """The batches of a run, shuffled for each epoch, and the number of tokens in them."""

    def __init__(self, dataset: SupervisedDataset, batch_size: int, seed: int, pad_token_id: int) -> None:
        """Start at the first batch; DataError if the dataset does not fill it."""
        self._order = ShuffledPrompts(dataset, batch_size, seed)
        self._pad_token_id = pad_token_id
        self.n_tokens = 0  # in all batches so far

    @property
    def batches_per_epoch(self) -> int:
        """Full batches in the dataset."""
        return self._order.batches_per_epoch

    def take(self) -> TrainingBatch:
        """Return the next batch (B, L)."""
        batch = build_supervised_batch(self._order.next_batch(), self._pad_token_id)
        self.n_tokens += count_tokens(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch."""
        return {**self._order.state_dict(), "n_tokens": self.n_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position; DataError if it belongs to other data."""
        self._order.load_state_dict(state)
        self.n_tokens = state["n_tokens"]


class SFTTrainer(TrainingRun):
    """A trainer on demonstrations. Callbacks see it as a `Run`."""

    def __init__(
        self,
        cfg: SFTConfig,
        *,
        rows: SupervisedRows,
        models: TrainedModels,
        total_steps: int,
        callbacks: Sequence[Callback],
    ) -> None:
        super().__init__(cfg, models=models, position=rows, total_steps=total_steps, callbacks=callbacks)
        self._rows = rows

    async def train(self) -> None:
        """Train from the last checkpoint, or from the start, to the last step."""
        async with self.ending():
            await self.start()
            for step in self.steps():
                with step.timer("step"):
                    batch = self._rows.take()  # sequences (B, L)
                    await self.update(step, batch)  # one optimizer step
                self.measure(step, batch)
                await self.finish_step(step)  # callbacks: validate, log, checkpoint

    async def update(self, step: Step, batch: TrainingBatch) -> None:
        """Take one optimizer step on the mean cross-entropy of the trained tokens.

        Raises:
            DivergenceError: after the last step, or a step without a finite gradient, the weights can no longer learn.
        """
        self.models.set_probe(batch)
        with step.timer("policy_train"):
            metrics = await self.models.policy.update(batch)
        step.record(metrics.with_prefix("train"))
        if step.number == self.total_steps or metrics["skipped_updates"].value > 0:
            await self.check_weights(step.number)

    def measure(self, step: Step, batch: TrainingBatch) -> None:
        """Add the clock, the speed and the memory to the metrics of a step."""
        n_tokens, seconds = count_tokens(batch), step.timer.metrics()["timing/step"]
        learning_rate = step.metrics.pop("train/policy_lr").number
        step.record(
            Metrics.of(
                {
                    "train/lr": learning_rate,
                    "train/learning_rate": learning_rate,
                    "train/lr(1e-3)": learning_rate * 1e3,
                    "train/epoch": step.number / self._rows.batches_per_epoch,
                    "train/global_step": step.number,
                    "train/time(s)": seconds,
                    "train/throughput": batch.n_prompts / seconds,
                    "train/global_tokens": n_tokens,
                    "train/trained_tokens": batch.loss_mask.sum().item(),
                    "train/total_tokens(B)": self._rows.n_tokens / 1e9,
                    "trainer/tokens_per_second": n_tokens / seconds,
                    **system_metrics(),
                }
            )
        )


class Validation(Callback):
    """A callback that computes `val/loss` every `trainer.eval_interval` steps, after the last one, and before training
    if configured.
    """

    def __init__(self, dataset: SupervisedDataset, policy: WorkerGroup, pad_token_id: int) -> None:
        self._dataset = dataset
        self._policy = policy
        self._pad_token_id = pad_token_id

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        is_first = report.global_step == 0 and run.cfg.trainer.eval_before_train
        if is_first or is_due(run.cfg.trainer.eval_interval, report):
            with report.timer("eval"):
                report.metrics["val/loss"] = await self.loss()

    async def loss(self) -> float:
        """Return the mean cross-entropy of all trained tokens of the dataset."""
        total = Metric("mean", 0.0, 0.0)
        for start in range(0, len(self._dataset), VALIDATION_ROWS):
            rows = range(start, min(start + VALIDATION_ROWS, len(self._dataset)))
            batch = build_supervised_batch([DrawnPrompt(i, self._dataset[i]) for i in rows], self._pad_token_id)
            logprobs = (await self._policy.score(batch))["logprobs"]  # (B, R), 0 off the mask
            total = total.merge(Metric("mean", -logprobs.double().sum().item(), batch.loss_mask.sum().item()))
        return total.number


def count_tokens(batch: TrainingBatch) -> int:
    """Return the number of tokens without padding."""
    return int(batch.attention_mask.sum())
