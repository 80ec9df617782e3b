"""Evaluation: play every validation prompt with the evaluation's sampling parameters, measure, and write it down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.generator import SamplingParams as SamplingConfig
from skyrl_train.dataset.files import write_jsonl
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.generators.base import BatchMetadata, GeneratorInterface, RolloutRequest
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.metrics import reward_metrics, rollout_metrics, with_prefix
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import PromptRow, Trajectory, TrajectoryID


async def evaluate(
    dataset: PromptDataset,
    generator: GeneratorInterface,
    cfg: SkyRLConfig,
    global_step: int,
) -> tuple[dict[str, float], list[Trajectory]]:
    """Metrics of the policy on `dataset`, and the trajectories they were measured on.

    `eval/all/*` over everything, `eval/<data source>/*` per source, `eval/environment/*` from the environments.
    """
    sampling = sampling_params(cfg.generator.eval_sampling_params)
    n_samples = cfg.generator.eval_n_samples_per_prompt
    rows = list(dataset)
    trajectories: list[Trajectory] = []
    for start in range(0, len(rows), cfg.trainer.eval_batch_size):
        requests = rollout_requests(rows[start : start + cfg.trainer.eval_batch_size], n_samples)
        trajectories += await generator.rollout(requests, sampling, BatchMetadata(global_step, "eval"))
    return eval_metrics(trajectories, n_samples), trajectories


def eval_metrics(trajectories: Sequence[Trajectory], n_samples: int) -> dict[str, float]:
    """The metrics of `evaluate` from trajectories."""
    metrics = with_prefix("eval/all", reward_metrics(trajectories, n_samples, "avg_score"))
    for source in sorted({t.data_source for t in trajectories}):
        some = [t for t in trajectories if t.data_source == source]
        name = source.replace("/", "_")
        metrics |= with_prefix(f"eval/{name}", reward_metrics(some, n_samples, "avg_score"))
    return metrics | with_prefix("eval", rollout_metrics(trajectories))


def dump_evaluation(
    folder: Path, trajectories: Sequence[Trajectory], metrics: dict[str, float], chat: ChatEncoder
) -> None:
    """Write one `<data source>.jsonl` per source and `aggregated_results.jsonl`, a line with all metrics."""
    for source in sorted({t.data_source for t in trajectories}):
        rows = [trajectory_row(t, chat) for t in trajectories if t.data_source == source]
        write_jsonl(folder / f"{source.replace('/', '_')}.jsonl", rows)
    write_jsonl(folder / "aggregated_results.jsonl", [metrics])


def trajectory_row(trajectory: Trajectory, chat: ChatEncoder) -> dict[str, Any]:
    """A trajectory as people read it: text rather than token ids. `score` is per token, null if invalid."""
    return {
        "input_prompt": chat.decode_all(trajectory.prompt_ids),
        "output_response": chat.decode_all(trajectory.response_ids),
        "score": trajectory.rewards,
        "stop_reason": trajectory.stop_reason,
        "env_class": trajectory.env_class,
        "env_extras": trajectory.env_extras,
        "env_metrics": trajectory.env_metrics,
        "data_source": trajectory.data_source,
        "uid": trajectory.id.to_string(),
        "error": trajectory.error,
    }


def rollout_requests(rows: Sequence[PromptRow], n_samples: int) -> list[RolloutRequest]:
    """Each prompt `n_samples` times, samples of one prompt side by side."""
    return [RolloutRequest(TrajectoryID(row.uid, i), row) for row in rows for i in range(n_samples)]


def sampling_params(section: SamplingConfig) -> SamplingParams:
    """The engine's view of `generator.sampling_params` or `generator.eval_sampling_params`."""
    stop = (section.stop,) if isinstance(section.stop, str) else tuple(section.stop or ())
    return SamplingParams(
        max_new_tokens=section.max_generate_length,
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        stop=stop,
    )
