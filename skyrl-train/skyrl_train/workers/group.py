"""The ranks of a model, and one interface to all of them: whole batches in, whole results out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

import torch

from skyrl_train.algorithms.objectives import Objective, PairObjective, PolicyObjective, RewardObjective
from skyrl_train.distributed import METADATA
from skyrl_train.errors import OutOfMemoryError, SyncError, WorkerError
from skyrl_train.models.memory import MIN_TOKENS
from skyrl_train.types import Metric, Metrics, Shard, TrainingBatch
from skyrl_train.types.specs import ModelPart, ModelSpec, Role, SyncKind, TensorSpec
from skyrl_train.watchdog import RANK, Wait
from skyrl_train.weight_sync import Receipt, SyncPlan
from skyrl_train.workers.split import draws_fit, join, measure_padding, split
from skyrl_train.workers.worker import REQUIRED_PARTS, ModelFacts

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")

FINISH_TIMEOUT_S = 60.0
"""Seconds to wait for ranks that still gather weights after a failed weight sync."""

CAUSE_TIMEOUT_S = 2.0
"""Seconds to wait for more ranks to fail, to find the one that failed first."""

SAVE_POLL_S = 0.05
"""Polling interval of a save in progress, in seconds."""


class Rank(Protocol):
    """One rank, with its shard of one or more models."""

    async def call(self, role: Role, method: str, *args: Any) -> Any:
        """Call a method of a model's worker. "load" (spec, objective) replaces the role's earlier model."""

    async def close(self) -> None:
        """End the rank."""


class _BudgetHalvedError(Exception):
    """A pass ran out of memory, and the token budget is now smaller."""


def _retries_with_smaller_budget(
    method: Callable[Concatenate[WorkerGroup, P], Awaitable[T]],
) -> Callable[Concatenate[WorkerGroup, P], Coroutine[Any, Any, T]]:
    """Repeat a pass from its start whenever it has halved the token budget.

    Its result is the result of a run that started with the smaller budget, bit for bit.
    """

    @wraps(method)
    async def retry(group: WorkerGroup, *args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            with suppress(_BudgetHalvedError):
                return await method(group, *args, **kwargs)

    return retry


class WorkerGroup:
    """The ranks of one model. Every rank gets every call, and calls run one at a time.

    If a rank fails, the group is unusable from then on, because other ranks may still wait for it inside the call.
    """

    facts: ModelFacts
    """Sizes of the model, set by `load`."""

    def __init__(self, spec: ModelSpec, ranks: Sequence[Rank], objective: Objective | None = None) -> None:
        """Create the group of ranks that hold a model. `objective` is None for scoring only, e.g. the reference.

        Raise ConfigError if `spec.layout` cannot divide the ranks.
        """
        self._objective = objective
        self._spec = spec
        self.role, self.temperature = spec.role, spec.temperature  # of the scored distribution
        self._ranks = list(ranks)
        self.n_weight_copies = len(ranks)  # each rank receives weights separately
        self._layout = spec.layout(len(ranks))
        self._shares_prefixes = False  # this and the maximum of tokens are known once the model is loaded
        self._max_tokens = self._layout.context_size * (spec.max_tokens_per_micro_batch or MIN_TOKENS)
        self.reduced_max_tokens: int | None = None
        """Token budget of a pass, once memory has run out and the configured one was too large."""
        self.padding_ratio: float | None = None
        """Share of padding in the last mini-batch. None if rows are packed."""
        self._holds_gradients = False  # of a mini-batch that no optimizer step has applied yet
        self._lock = asyncio.Lock()
        self._broken_by: BaseException | None = None
        self.n_optimizer_steps = 0
        """Number of optimizer steps started."""
        self.hold_devices: Callable[[WorkerGroup, ModelPart], AbstractAsyncContextManager[None]] | None = None
        """Waits for the devices that the model shares, e.g. `Lease.holding`. None if it has them to itself."""

    async def load(self) -> None:
        """Load the model on every rank, or raise ConfigError if there is no model at its path."""
        await self._gather("load", [(self._spec, self._objective)] * len(self._ranks))
        self.facts = (await self._call("facts"))[0]
        self._shares_prefixes = self.facts.shares_prefixes
        self._max_tokens = self._layout.context_size * self.facts.max_tokens_per_micro_batch

    @_retries_with_smaller_budget
    async def score(
        self, batch: TrainingBatch, *, adapter: bool = True, beside_others: bool = False
    ) -> dict[str, torch.Tensor]:
        """Score a batch: (B, R) float32 on the CPU, 0 where the loss mask is 0. `adapter=False` disables the adapter.

        With `beside_others`, models that share the devices stay on them. Use it for small batches.
        """
        shards, rows = self._split(batch, self._spec.max_rows_forward)
        results = await self._call_with_shards("score", shards, adapter, beside_others=beside_others)
        return join(rows, results, len(batch))

    @_retries_with_smaller_budget
    async def forward_backward(self, mini_batch: TrainingBatch, scores: torch.Tensor | None = None) -> Metrics:
        """Add the gradient of a mini-batch's loss to the parameters' gradients, and return the metrics.

        The loss's divisors come from the whole mini-batch, so its gradient does not depend on micro-batches and ranks.
        `scores` (B, R) are the log-probs or values of the current weights, if known. Losses over the whole mini-batch
        need them, as do losses over pairs that do not fit into micro-batches, so these cost one more forward pass if
        `scores` is None.
        """
        objective, max_rows = self._objective, self._spec.max_rows_train
        assert objective is not None, f"the {self.role} has no objective"
        mini_batch, metrics = objective.add_weights(mini_batch), Metrics()
        keeps_draws = isinstance(objective, PairObjective) and draws_fit(mini_batch, self._max_tokens, max_rows)
        if isinstance(objective, PolicyObjective | PairObjective) and objective.scope != "token" and not keeps_draws:
            if scores is None:
                scores = (await self.score(mini_batch))[objective.score_name]
            mini_batch, metrics = objective.differentiate(scores, mini_batch)
        shards, _ = self._split(mini_batch, max_rows, keeps_draws=keeps_draws)
        if not self._shares_prefixes:
            self.padding_ratio = measure_padding(shards)
        metrics = metrics.merge(*await self._call_with_shards("forward_backward", shards))
        self._holds_gradients = True
        return metrics

    async def optim_step(self) -> Metrics:
        """Clip and apply the gradients. Return the first rank's metrics, because all ranks have the same."""
        self.n_optimizer_steps += 1
        self._holds_gradients = False
        return (await self._call("optim_step"))[0]

    async def update(self, mini_batch: TrainingBatch, scores: torch.Tensor | None = None) -> Metrics:
        """Take one optimizer step on a mini-batch. `scores` are as in `forward_backward`."""
        return (await self.forward_backward(mini_batch, scores)).merge(await self.optim_step())

    async def is_finite(self) -> bool:
        """Return False if a weight is NaN or infinite."""
        return all(await self._call("is_finite"))

    @_retries_with_smaller_budget
    async def probe(self, rows: TrainingBatch) -> Metrics:
        """Return the mean log-prob or value of the rows' tokens, and its gradient norm. No parameter changes.

        For a reward model, `mean` is minus the mean distance between the rewards of a pair.
        """
        shards, _ = self._split(rows, self._spec.max_rows_train)
        metrics = Metrics().merge(*await self._call_with_shards("probe", shards))
        if isinstance(self._objective, RewardObjective):
            metrics["mean"] = Metric("mean", -self._objective.mean_distance(await self.score(rows), rows))
        return metrics

    async def save(self, folder: Path) -> Awaitable[Any]:
        """Begin to save. Training may continue once this returns. Await the result to know that `folder` is on disk.

        After an OSError, because host memory has no room for a copy, training may continue without this checkpoint.
        """
        _raise_first(await self._call("begin_save", folder))
        return self._finish_save(folder)

    async def _finish_save(self, folder: Path) -> None:
        """Wait until all ranks have written their part, while other calls run.

        Ranks can report a failure only between calls. Success shows in the folder, even during a call.
        """
        while not await asyncio.to_thread((folder / METADATA).exists):
            if not self._lock.locked() and all(await self._call("is_written")):
                _raise_first(await self._call("finish_save"))
                return
            await asyncio.sleep(SAVE_POLL_S)

    async def load_state(self, folder: Path) -> None:
        """Load a checkpoint, saved by any number of ranks. CheckpointError if it is incomplete or another model's."""
        await self._call("load_state", folder)

    async def export(self, folder: Path) -> None:
        """Write a plain Hugging Face folder. After an OSError of the file system, training may continue."""
        _raise_first(await self._call("export", folder))

    async def tensor_specs(self, kind: SyncKind = "full") -> list[TensorSpec]:
        """Return the tensors that a sync of this kind sends."""
        return (await self._call("tensor_specs", kind))[0]

    async def send_weights(self, plan: SyncPlan) -> Receipt:
        """Send the weights. All ranks gather them, and the first rank sends."""
        return (await self._call("send_weights", plan, beside_others=True))[0]

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        """Load weights of a model of the same architecture, or raise SyncError if ranks received different weights."""
        receipts: list[Receipt] = await self._call("receive_weights", plan, beside_others=True)
        if len(set(receipts)) > 1:
            raise SyncError(f"the ranks of the {self.role} received different weights: {receipts}")
        return receipts[0]

    async def move(self, to: Literal["cpu", "device"], part: ModelPart = "all") -> int:
        """Move a part of the model to host memory or back, on every rank, and return the number of moved bytes.

        Raise WorkerError if host memory is too small.
        """
        return sum(await self._call("move", to, part))

    async def close(self) -> None:
        """End every rank."""
        await asyncio.gather(*(rank.close() for rank in self._ranks))

    def _split(
        self, batch: TrainingBatch, max_rows: int | None, *, keeps_draws: bool = False
    ) -> tuple[list[Shard], list[list[int]]]:
        return split(
            batch,
            self._layout.data_parallel_size,
            self._max_tokens,
            max_rows,
            shares_prefixes=self._shares_prefixes,
            keeps_draws=keeps_draws,
        )

    async def _call_with_shards(
        self, method: str, shards: Sequence[Shard], *args: Any, beside_others: bool = False
    ) -> list[Any]:
        """Call a method of every worker with the shard of its data-parallel rank, and return one result per shard."""
        layout = self._layout
        own = [(shards[layout.data_parallel_rank(rank)],) for rank in range(layout.n_ranks)]
        try:
            results = await self._call(method, *args, first_args=own, beside_others=beside_others)
        except OutOfMemoryError as error:
            if error.stage != method:  # moving the model to the device failed
                raise
            shortage = error
        else:
            return [results[layout.leader(i)] for i in range(layout.data_parallel_size)]
        self._halve_budget(shortage, shards)
        raise _BudgetHalvedError

    def _halve_budget(self, shortage: OutOfMemoryError, shards: Sequence[Shard]) -> None:
        """Halve the token budget after a pass over `shards` ran out of memory. It stays for the rest of the run.

        The budget is at most half of the largest micro-batch, so each retry splits the batch further.

        Raises:
            OutOfMemoryError: a single row does not fit, or the pass cannot be repeated. With several ranks, the
                remaining ranks wait in a collective for the failed rank, so the group is unusable. After an earlier
                mini-batch without an optimizer step, its gradients are lost.
        """
        sizes = [
            (int(shard.rows.attention_mask[indices].sum()), len(indices))
            for shard in shards
            for indices in shard.micro_batches
        ]
        n_tokens, n_rows = max(sizes)
        computed = f"{shortage}. Its largest micro-batch had {n_tokens:,} tokens in {n_rows} "
        computed += "row" if n_rows == 1 else "rows"
        if len(self._ranks) > 1 or self._holds_gradients:
            smaller = max(1, min(self._max_tokens, n_tokens) // 2 // self._layout.context_size)
            fix = f", so set trainer.max_tokens_per_microbatch={smaller} or less" if n_rows > 1 else ""
            raise OutOfMemoryError(f"{computed}{fix}", shortage.stage)
        if all(n_rows == 1 for _, n_rows in sizes):
            raise OutOfMemoryError(f"{computed}, and a micro-batch cannot be smaller", shortage.stage)
        before = self._max_tokens
        self._max_tokens = self.reduced_max_tokens = max(1, min(before, n_tokens) // 2)
        logger.warning(
            "%s. The %s is retried with micro-batches of at most %d instead of %d tokens, for the rest of the run. "
            "Results do not change. Set trainer.max_tokens_per_microbatch=%d to start with them",
            *(computed, self.role, self._max_tokens, before, self._max_tokens),
        )

    async def _call(
        self, method: str, *args: Any, first_args: Sequence[tuple[Any, ...]] | None = None, beside_others: bool = False
    ) -> list[Any]:
        """Call a method of every worker, and return one result per rank. `first_args` has each rank's own arguments.

        Other models that share the devices leave them first, unless `beside_others`.
        """
        holding: AbstractAsyncContextManager[None] = nullcontext()
        if self.hold_devices is not None and method in REQUIRED_PARTS and not beside_others:
            holding = self.hold_devices(self, REQUIRED_PARTS[method])
        async with holding, self._lock:
            if self._broken_by is not None:
                raise WorkerError(
                    f"the {self.role} is unusable after {self._broken_by!r}; resume from the last checkpoint"
                ) from self._broken_by
            return await self._gather(method, [(*first, *args) for first in first_args or [()] * len(self._ranks)])

    async def _call_rank(self, index: int, method: str, args: tuple[Any, ...]) -> Any:
        with Wait(RANK, f"rank {index} of the {self.role}", method):
            return await self._ranks[index].call(self.role, method, *args)

    async def _gather(self, method: str, args_of_ranks: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call all ranks, and return the result of each. If one of several ranks fails, the group is broken."""
        indexed = enumerate(args_of_ranks)
        calls = [asyncio.ensure_future(self._call_rank(index, method, args)) for index, args in indexed]
        if len(calls) == 1:
            return [await calls[0]]
        try:
            return await asyncio.gather(*calls)
        except Exception as error:
            if isinstance(error, SyncError):
                done, pending = await asyncio.wait(calls, timeout=FINISH_TIMEOUT_S)
                if not pending and all(isinstance(call.exception(), SyncError | None) for call in done):
                    raise  # a receiver failed, but no rank waits for another rank, so the group is still usable
            # When a rank is killed, the ranks that wait for it fail in a collective, often before the launcher notices
            # the killed rank. So wait a little for the WorkerError of a rank whose process ended.
            done, _ = await asyncio.wait(calls, timeout=CAUSE_TIMEOUT_S)
            failures = [call.exception() for call in done if not call.cancelled()]
            cause = next((failure for failure in failures if isinstance(failure, WorkerError)), error)
            self._broken_by = cause
            if cause is error:
                raise
            raise cause from cause.__cause__


def _raise_first(failures: Iterable[OSError | None]) -> None:
    for failure in failures:
        if failure is not None:
            raise failure
