"""Evaluation: play every validation prompt with the evaluation's sampling parameters, measure, and write it down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.files import write_jsonl
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.generators.base import BatchMetadata, GeneratorInterface, rollout_requests
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.metrics import pass_at_k, reward_metrics, rollout_metrics, with_prefix
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import Trajectory


async def evaluate(
    dataset: PromptDataset,
    generator: GeneratorInterface,
    cfg: SkyRLConfig,
    global_step: int,
) -> tuple[dict[str, float], list[Trajectory]]:
    """Metrics of the policy on `dataset`, and the trajectories they were measured on.

    `eval/all/*` over everything, `eval/<data source>/*` per source, `eval/environment/*` from the environments.
    """
    sampling = SamplingParams.from_config(cfg.generator.eval_sampling_params)
    metadata = BatchMetadata(global_step, "eval", cfg.trainer.seed)
    n_samples = cfg.generator.eval_n_samples_per_prompt
    rows = list(dataset)
    trajectories: list[Trajectory] = []
    for start in range(0, len(rows), cfg.trainer.eval_batch_size):
        batch = rows[start : start + cfg.trainer.eval_batch_size]
        requests = rollout_requests(batch, n_samples, cfg.environment.env_class)
        trajectories += await generator.rollout(requests, sampling, metadata)
    return eval_metrics(trajectories, n_samples), trajectories


def eval_metrics(trajectories: Sequence[Trajectory], n_samples: int) -> dict[str, float]:
    """The metrics of `evaluate` from trajectories."""
    metrics: dict[str, float] = {}
    for name, some in {"all": list(trajectories), **_by_source(trajectories)}.items():
        metrics |= with_prefix(f"eval/{name}", pass_at_k(some) | reward_metrics(some, n_samples))
    return metrics | with_prefix("eval", rollout_metrics(trajectories))


def dump_evaluation(
    folder: Path, trajectories: Sequence[Trajectory], metrics: dict[str, float], chat: ChatEncoder
) -> None:
    """Write one `<data source>.jsonl` per source and `aggregated_results.jsonl`, a line with all metrics."""
    for name, some in _by_source(trajectories).items():
        write_jsonl(folder / f"{name}.jsonl", [trajectory_row(t, chat) for t in some])
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
        "turns": [asdict(turn) for turn in trajectory.turns],
        "weight_versions": trajectory.weight_versions,
        "timing": trajectory.timing,
        "error": trajectory.error,
    }


def _by_source(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    """Trajectories under the name of their data source, in which "/" becomes "_": it names files and metrics."""
    groups: dict[str, list[Trajectory]] = {}
    for t in sorted(trajectories, key=lambda t: t.data_source):
        groups.setdefault(t.data_source.replace("/", "_"), []).append(t)
    return groups
