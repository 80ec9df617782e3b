"""Evaluation: play every validation prompt with `generator.eval_sampling_params`, and measure the rewards."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyrl_report.run_folder import AGGREGATED, IMAGE_FOLDER, format_marker
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.files import write_jsonl
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.generators.base import BatchMetadata, RolloutGenerator, rollout_requests
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.generators.metrics import (
    by_source,
    is_success,
    pass_at_k,
    reward_metrics,
    rollout_metrics,
    with_prefix,
)
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.media.files import write_images
from skyrl_train.types import DrawnPrompt, Segment, Trajectory


async def evaluate(
    dataset: PromptDataset,
    generator: RolloutGenerator,
    cfg: SkyRLConfig,
    global_step: int,
    folder: Path | None = None,
    chat: ChatEncoder | None = None,
) -> tuple[dict[str, float], list[Trajectory]]:
    """Play all prompts of `dataset`. Return the metrics and the trajectories.

    With a `folder`, such as `evals/global_step_5`, write both there, and images to the folder `images` beside it.
    Metrics are `eval/all/*`, `eval/<data source>/*`, `eval/environment/*`, and the generator's.
    """
    sampling = SamplingParams.from_config(cfg.generator.eval_sampling_params)
    metadata = BatchMetadata(global_step, "eval", cfg.trainer.seed)
    n_samples = cfg.generator.eval_n_samples_per_prompt
    first_draw = global_step * len(dataset)  # no two evaluations of a run share a draw
    trajectories: list[Trajectory] = []
    for start in range(0, len(dataset), cfg.trainer.eval_batch_size):
        rows = range(start, min(start + cfg.trainer.eval_batch_size, len(dataset)))
        batch = [DrawnPrompt(first_draw + i, dataset[i], i) for i in rows]
        requests = rollout_requests(batch, n_samples, cfg.environment.env_class, "eval")
        trajectories += await generator.play(requests, sampling, metadata)
    success_reward = cfg.generator.success_reward
    metrics = eval_metrics(trajectories, n_samples, success_reward)
    metrics |= with_prefix("eval", generator.take_metrics("eval"))
    if folder is not None:
        assert chat is not None, "writing trajectories needs the chat encoder"
        await dump_images(folder.parent, trajectories)
        dump_evaluation(folder, trajectories, metrics, chat, success_reward)
    return metrics, trajectories


def eval_metrics(trajectories: Sequence[Trajectory], n_samples: int, success_reward: float | None) -> dict[str, float]:
    """Return the metrics of an evaluation, overall and per data source."""
    metrics: dict[str, float] = {}
    for name, group in {"all": list(trajectories), **by_source(trajectories)}.items():
        scores = reward_metrics(group, n_samples, success_reward) | pass_at_k(group, success_reward)
        metrics |= with_prefix(f"eval/{name}", scores)
    return metrics | with_prefix("eval", rollout_metrics(trajectories))


def dump_evaluation(
    folder: Path,
    trajectories: Sequence[Trajectory],
    metrics: dict[str, float],
    chat: ChatEncoder,
    success_reward: float | None,
) -> None:
    """Write `<data source>.jsonl` for each source, and all metrics as one line of `aggregated_results.jsonl`.

    Other JSONL files in the folder come from an abandoned run and are removed.
    """
    groups = by_source(trajectories)
    for name, group in groups.items():
        write_jsonl(folder / f"{name}.jsonl", [trajectory_row(t, chat, success_reward) for t in group])
    write_jsonl(folder / AGGREGATED, [metrics])
    for path in folder.glob("*.jsonl"):
        if path.name != AGGREGATED and path.stem not in groups:
            path.unlink()


async def dump_images(folder: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write the images of trajectories to `images/` in a folder. Rollouts in progress continue meanwhile."""
    images = [span.image for t in trajectories for segment in t.segments for span in segment.images]
    await asyncio.to_thread(write_images, folder / IMAGE_FOLDER, images)


def trajectory_row(
    trajectory: Trajectory,
    chat: ChatEncoder,
    success_reward: float | None,
    advantages: Sequence[Sequence[float]] | None = None,
) -> dict[str, Any]:
    """Return a trajectory as a JSON row, with text instead of token ids. Rewards are null if it is invalid.

    The first four keys describe the last segment, and `earlier` lists the segments before it. The `segment` of a turn
    is the index of its segment, counted from the start. `total_reward` is the sum over all segments.

    With `advantages` (of each segment's tokens, or empty), the row also has the text, the log-prob, the loss mask and
    the advantage of each token of the response.
    """
    is_valid = trajectory.is_valid
    *earlier, last = [_segment_row(segment, chat, is_valid) for segment in trajectory.segments]
    if advantages is not None:
        for i, (row, segment) in enumerate(zip([*earlier, last], trajectory.segments, strict=True)):
            row |= _token_rows(segment, chat, advantages[i] if advantages else None)
    return {
        **last,
        "stop_reason": trajectory.stop_reason,
        "env_class": trajectory.env_class,
        "env_extras": trajectory.env_extras,
        "env_metrics": trajectory.env_metrics,
        "data_source": trajectory.data_source,
        "uid": trajectory.id.to_string(),
        "turns": [{**asdict(turn), "segment": i} for i, s in enumerate(trajectory.segments) for turn in s.turns],
        "earlier": earlier,
        "total_reward": trajectory.total_reward if is_valid else None,
        "is_success": is_success(trajectory, success_reward),
        "reward_components": trajectory.reward_components,
        "weight_versions": trajectory.weight_versions,
        "timing": trajectory.timing,
        "n_attempts": trajectory.n_attempts,
        "error": trajectory.error,
    }


def _segment_row(segment: Segment, chat: ChatEncoder, is_valid: bool) -> dict[str, Any]:
    def decode(start: int, end: int) -> str:
        return chat.decode_segment(segment, start, end, lambda span: format_marker(span.image.file_name))

    return {
        "input_prompt": decode(0, segment.n_prompt),
        "output_response": decode(segment.n_prompt, len(segment.token_ids)),
        "images": [span.image.file_name for span in segment.images],  # in the prompt and the response
        "score": segment.rewards if is_valid else None,  # for each token
    }


def _token_rows(segment: Segment, chat: ChatEncoder, advantages: Sequence[float] | None) -> dict[str, Any]:
    """Return values for each token of the response. Four decimals keep the file small."""
    logprobs = segment.logprobs
    return {
        "tokens": chat.decode_each(segment.response_ids),
        "loss_mask": segment.loss_mask,
        "logprobs": None if logprobs is None else [round(value, 4) for value in logprobs],
        "advantages": None if advantages is None else [round(value, 4) for value in advantages],
    }
