"""Record the metrics of healthy runs, on which no rule of `skyrl_report.diagnosis` may fire.

    PYTHONPATH=tests/kit python -m report_kit.healthy_runs catch=outputs/catch/shaped-seed42 sft=outputs/skyrl/sft …

It writes `tests/golden/healthy.jsonl`: a line per run with the metrics and settings that the rules read.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from skyrl_report.metrics_file import read_metrics

HEALTHY = Path(__file__).parents[2] / "golden/healthy.jsonl"
METRICS = (
    *("step", "loss/avg_raw_advantages_abs", "loss/avg_kl", "policy/policy_entropy", "policy/policy_kl"),
    *("policy/grad_norm", "policy/rollout_train_logprobs_abs_diff_mean", "reward/avg_", "eval/all/avg_score"),
    *("generate/signal_ratio", "generate/truncated_ratio", "generate/n_", "generate/avg_num", "generate/max_num"),
    *("generate/avg_seconds", "generate/max_seconds", "timing/step", "timing/generate", "memory/step"),
    *("async/gen_buffer", "async/staleness_max"),
)
"""Prefixes of the metrics that rules read."""
SETTINGS = {
    "trainer": ("train_batch_size", "fully_async", "placement"),
    "generator": ("n_samples_per_prompt", "sampling_params"),
}


def record(name: str, folder: Path) -> dict[str, Any]:
    """Return the metrics and the settings of a run."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    settings = {section: {key: config.get(section, {}).get(key) for key in keys} for section, keys in SETTINGS.items()}
    rows = read_metrics(folder / "metrics.jsonl")
    columns = {
        name: [None if row.get(name) is None else float(f"{row[name]:.4g}") for row in rows]
        for name in dict.fromkeys(name for row in rows for name in row)
        if name.startswith(METRICS)
    }
    return {"name": name, "config": settings, "columns": columns}


def main(named_folders: list[str]) -> None:
    runs = [record(name, Path(folder)) for name, _, folder in (text.partition("=") for text in named_folders)]
    HEALTHY.write_text("".join(json.dumps(run) + "\n" for run in runs))


if __name__ == "__main__":
    main(sys.argv[1:])
