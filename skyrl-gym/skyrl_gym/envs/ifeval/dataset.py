"""Rows of google/IFEval as rows of a dataset."""

import json
from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.row import read_struct


def ifeval_row(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of google/IFEval: `prompt`, `instruction_id_list` and `kwargs`.

    The ground truth is JSON text, because the kwargs of two instructions have different columns.

    >>> raw = {"key": 1, "prompt": "Avoid commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    >>> ifeval_row(raw)["reward_spec"]["ground_truth"]
    '{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}'
    """
    truth = {
        "instruction_id_list": list(raw["instruction_id_list"]),
        "kwargs": [read_struct(kwargs, "kwargs") for kwargs in raw["kwargs"]],
    }
    return {
        "data_source": "google/IFEval",
        "prompt": [{"role": "user", "content": raw["prompt"]}],
        "env_class": "ifeval",
        "reward_spec": {"method": "rule", "ground_truth": json.dumps(truth, ensure_ascii=False)},
    }
