"""Training on fixed data (demonstrations, or pairs of answers) with the same workers as reinforcement learning.

A step draws rows from the dataset and minimizes an objective. Its batch has B rows of L tokens, but only answer tokens
are in the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.algorithms.objectives import SupervisedObjective
from skyrl_train.callbacks import is_due
from skyrl_train.config.supervised import SupervisedConfig
from skyrl_train.dataset.order import ShuffledPrompts
from skyrl_train.dataset.supervised import SupervisedDataset, build_supervised_batch
from skyrl_train.learner import MIN_MEAN_LOGPROB, TrainedModels
from skyrl_train.run import Callback, Run, Step, StepReport
from skyrl_train.tracking.system import peak_flops, system_metrics
from skyrl_train.types import DrawnPrompt, Metrics, TrainingBatch
from skyrl_train.watchdog import DATA, Wait

VALIDATION_ROWS = 32
"""Rows per batch of the validation. It bounds memory and does not change the metrics."""


class SupervisedRows:
    """The batches of a run, reshuffled each epoch, with a count of their tokens."""

    def __init__(self, dataset: SupervisedDataset, batch_size: int, seed: int, pad_token_id: int) -> None:
        """Start at the first batch. Raise DataError if the dataset is smaller than one batch."""
        self.order = ShuffledPrompts(dataset, batch_size, seed)
        self._pad_token_id = pad_token_id
        self.n_tokens = 0  # in all batches so far

    def take(self) -> TrainingBatch:
        """Return the next batch (B, L)."""
        batch = build_supervised_batch(self.order.next_batch(), self._pad_token_id)
        self.n_tokens += count_tokens(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch."""
        return {**self.order.state_dict(), "n_tokens": self.n_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position. Raise DataError if it belongs to other data."""
        self.order.load_state_dict(state)
        self.n_tokens = state["n_tokens"]


class SupervisedTrainer(Run):
    """A trainer on fixed data."""

    def __init__(
        self,
        cfg: SupervisedConfig,
        *,
        rows: SupervisedRows,
        models: TrainedModels,
        total_steps: int,
        callbacks: Sequence[Callback],
    ) -> None:
        super().__init__(cfg, models=models, position=rows, total_steps=total_steps, callbacks=callbacks)
        self._rows = rows
        self._peak_flops = peak_flops() if cfg.trainer.bf16 else None

    async def train(self) -> None:
        """Train from the last checkpoint, or from the start, to the last step."""
        async with self.ending():
            await self.start()
            for step in self.steps():
                with step.timer("step"):
                    with Wait(DATA, f"step {step.number}"):
                        batch = self._rows.take()  # sequences (B, L)
                    await self.update(step, batch)  # one optimizer step
                self.measure(step, batch)
                await self.finish_step(step)  # callbacks: validate, log, checkpoint

    async def update(self, step: Step, batch: TrainingBatch) -> None:
        """Take one optimizer step on a batch.

        Check the weights after the last step, and after a step with a huge loss or a NaN or infinite gradient. Raise
        DivergenceError if they are NaN or infinite, or can no longer learn.
        """
        self.models.set_probe(batch)
        if self.models.ref is not None:
            with step.timer("reference"):
                batch = await self.models.score_reference(batch)
        await self.make_room()
        with step.timer("policy_train"):
            metrics = await self.models.policy.update(batch)
        step.record(metrics.with_prefix("train"))
        is_suspect = metrics["skipped_updates"].value > 0 or -metrics["loss"].number < MIN_MEAN_LOGPROB
        if step.number == self.total_steps or is_suspect:
            await self.check_weights(step.number)

    def measure(self, step: Step, batch: TrainingBatch) -> None:
        """Record the learning rate, progress, throughput and system metrics of a step."""
        n_tokens, seconds = count_tokens(batch), step.timer.metrics()["timing/step"]
        if self._peak_flops is not None:
            facts = self.models.policy.facts
            rate = count_flops(facts.n_trained, facts.n_parameters) * n_tokens / seconds
            step.record({"train/mfu": rate / (self._peak_flops * self.models.policy.n_weight_copies)})
        learning_rate = step.metrics.pop(f"train/{self.models.policy.role}_lr").number
        step.record(
            {
                "train/lr": learning_rate,
                "train/learning_rate": learning_rate,
                "train/lr(1e-3)": learning_rate * 1e3,
                "train/epoch": step.number / self._rows.order.batches_per_epoch,
                "train/global_step": step.number,
                "train/time(s)": seconds,
                "train/throughput": batch.n_prompts / seconds,
                "train/global_tokens": n_tokens,
                "train/trained_tokens": batch.loss_mask.sum().item(),
                "train/total_tokens(B)": self._rows.n_tokens / 1e9,
                "trainer/tokens_per_second": n_tokens / seconds,
                **self._rows.order.metrics,
                **system_metrics(),
            }
        )


@dataclass(eq=False)
class Validation(Callback):
    """A callback that measures the objective on held-out rows, as `val/loss` and others.

    It runs every `trainer.eval_interval` steps, after the last step, and before the first with `eval_before_train`.
    """

    dataset: SupervisedDataset
    models: TrainedModels
    objective: SupervisedObjective
    pad_token_id: int

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        if is_due(run.cfg.trainer.eval_interval, report, at_start=run.cfg.trainer.eval_before_train):
            with report.timer("eval"):
                report.metrics |= (await self.measure()).with_prefix("val").numbers()

    async def measure(self) -> Metrics:
        """Return the metrics of the objective over the whole dataset."""
        metrics = Metrics()
        for start in range(0, len(self.dataset), VALIDATION_ROWS):
            rows = range(start, min(start + VALIDATION_ROWS, len(self.dataset)))
            batch = build_supervised_batch([DrawnPrompt(i, self.dataset[i], i) for i in rows], self.pad_token_id)
            batch = await self.models.score_reference(batch)
            scores = await self.models.policy.score(batch)
            metrics = metrics.merge(self.objective.evaluate(scores, batch))
        return metrics


def count_tokens(batch: TrainingBatch) -> int:
    """Count the tokens of a batch, padding excluded."""
    return int(batch.attention_mask.sum())


def count_flops(n_trained: int, n_parameters: int) -> int:
    """Return the floating-point operations per token of a forward and backward pass, without attention.

    A trained parameter costs 6: 2 forward, 2 for the gradient of its input, 2 for its own gradient. A frozen parameter
    needs no gradient, so it costs 4.
    """
    return 4 * n_parameters + 2 * n_trained
