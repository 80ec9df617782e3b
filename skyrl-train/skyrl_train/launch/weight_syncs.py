"""The weight sync from the policy to the engines of a run: pause, send, check."""

import asyncio
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass

import torch

from skyrl_train.dataset.batch import pad_right, pad_tokens
from skyrl_train.errors import EngineError, SyncError
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, InferenceEngine, SamplingParams
from skyrl_train.types import Metrics, TrainingBatch
from skyrl_train.weight_sync import WeightSync
from skyrl_train.weight_sync.sync import ADVICE
from skyrl_train.workers.group import WorkerGroup

N_TOKENS = 32
PROMPT_LENGTH = 16


@dataclass(eq=False)
class EngineSync:
    """A weight sync from the policy to the engine.

    The sync may pause the engine, whose requests then continue with the new weights. It may also check the engine: the
    policy scores tokens that the engine samples afterwards.
    """

    sync: WeightSync
    engine: InferenceEngine
    policy: WorkerGroup
    _: KW_ONLY
    n_token_ids: int  # prompts of the check consist of the first ones
    pauses: bool
    tolerance: float | None  # mean difference to allow, in nats. None means no checks
    checks_once: bool  # only the first sync
    timeout_s: float  # for the engine to pause

    def __post_init__(self) -> None:
        self._n_steps = self.policy.n_optimizer_steps  # at the last sync
        self._is_checked = False
        self._n_tokens = max(N_TOKENS, 4 * self.engine.n_weight_copies)  # every copy samples some
        length = min(PROMPT_LENGTH, self.engine.info.longest_sequence - 1)
        generator = torch.Generator().manual_seed(0)
        self._prompts = torch.randint(self.n_token_ids, (self._n_tokens, length), generator=generator).tolist()

    def is_current(self) -> bool:
        """Return True if the policy has not been updated since the last sync."""
        return self.policy.n_optimizer_steps == self._n_steps

    async def __call__(self, version: int) -> Metrics:
        """Send the weights as `version`.

        Raises:
            SyncError: an engine's weights differ from the policy's, or it did not receive them.
            EngineError: the new weights are NaN or infinite, or an engine failed.
        """
        if self.pauses:
            try:
                async with asyncio.timeout(self.timeout_s):
                    await self.engine.pause()
            except TimeoutError as error:
                raise SyncError(
                    f"weight sync {version} failed: the engine did not pause within "
                    f"generator.weight_sync_timeout_seconds={self.timeout_s:g}. Look at its log. {ADVICE}"
                ) from error
        try:
            metrics = await self.sync(version)
        except BaseException:
            if self.pauses:
                with suppress(EngineError):  # the first error explains it
                    await self.engine.resume()
            raise
        self._n_steps = self.policy.n_optimizer_steps
        if self.pauses:
            await self.engine.resume()
        if self.tolerance is None or (self.checks_once and self._is_checked):
            return metrics
        self._is_checked = True
        sampling = SamplingParams(1, temperature=self.policy.temperature)
        results = await self.engine.generate(
            [EngineRequest(prompt, sampling, seed) for seed, prompt in enumerate(self._prompts)]
        )
        versions = {span.version for result in results for span in result.weight_spans}
        if versions != {version}:
            raise SyncError(
                f"weight sync {version} failed: the engine samples with weights of the versions {sorted(versions)}. "
                f"{ADVICE}"
            )
        gap = await self._gap(results)
        if not gap <= self.tolerance:  # NaN is a difference
            raise SyncError(
                f"weight sync {version} failed: the engine does not compute with the policy's weights. The log-probs "
                f"of {self._n_tokens} tokens differ by {gap:.3g} on average, and at most {self.tolerance:g} is "
                f"expected (generator.weight_sync_tolerance). {ADVICE}"
            )
        return metrics.merge(Metrics.of({"sync/logprob_gap": gap}))

    async def _gap(self, results: list[EngineResult]) -> float:
        """Return the mean absolute difference between the log-probs of engine and policy."""
        rows = [(prompt + result.token_ids, len(prompt)) for prompt, result in zip(self._prompts, results, strict=True)]
        sequences, attention_mask = pad_tokens(rows, pad_token_id=0)
        loss_mask = pad_right([[1.0] * len(result.token_ids) for result in results])  # (N, 1)
        batch = TrainingBatch(sequences, attention_mask, loss_mask, draws=torch.arange(self._n_tokens))
        expected = (await self.policy.score(batch, beside_others=True))["logprobs"]  # (N, 1)
        found = pad_right([result.logprobs or [] for result in results])
        return float((found - expected).abs().mean())
