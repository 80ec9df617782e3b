"""Write the dataset of competition maths: DAPO-Math-17k to train on, AIME 2024 for validation.

    python -m examples.aime.aime_dataset --output_dir ~/data/aime

reads both from the Hub. Their files repeat each problem, up to a hundred times, and give a few of them two answers: a
prompt is kept once, and not at all if its answers differ. `--source sample` makes 300 problems with whole numbers as
answers instead, much easier ones: enough for first runs and tests, but no benchmark. Raw rows have DAPO's columns:
`data_source`, `prompt`, `ability`, `reward_model` with its `ground_truth`, and `extra_info`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from examples.aime.number_problems import number_problems
from examples.prepare import (
    MESSAGES,
    HubSplit,
    Preparation,
    command_line,
    field,
    prepare,
    prompt_field,
    text_field,
)
from skyrl_train.dataset.files import Row

OWNER = "BytedTsinghua-SIA"
HUB = (HubSplit(f"{OWNER}/DAPO-Math-17k", "train"), HubSplit(f"{OWNER}/AIME-2024", "train"))
N_PROBLEMS = 300

SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": MESSAGES,
        "ability": pa.string(),
        "env_class": pa.string(),
        "reward_model": pa.struct({"ground_truth": pa.string(), "style": pa.string()}),
        "extra_info": pa.struct({"split": pa.string(), "index": pa.string()}),
    }
)

INSTRUCTION = (
    "Solve the following problem step by step. End your reply with a line of its own in the form Answer: N, where N is "
    "the answer and nothing else."
)


def dataset_row(raw: Row, split: str, index: int) -> Row:
    """The row of one problem, whose prompt stays as it is."""
    spec = field(raw, "reward_model", dict)
    return {
        "data_source": raw.get("data_source") or "math_dapo",
        "prompt": prompt_field(raw),
        "ability": raw.get("ability") or "MATH",
        "env_class": "aime",
        "reward_model": {"ground_truth": text_field(spec, "ground_truth"), "style": spec.get("style") or "rule"},
        "extra_info": {"split": split, "index": str((raw.get("extra_info") or {}).get("index", index))},
    }


def with_one_answer(rows: Iterable[Row]) -> list[Row]:
    """Each prompt once, without those that have several answers."""
    first: dict[str, Row] = {}
    ambiguous: set[str] = set()
    n_rows = 0
    for row in rows:
        n_rows += 1
        prompt = str(row["prompt"])
        kept = first.setdefault(prompt, row)
        if kept["reward_model"]["ground_truth"] != row["reward_model"]["ground_truth"]:
            ambiguous.add(prompt)
    print(f"{n_rows} rows have {len(first)} prompts; {len(ambiguous)} with several answers are left out")
    return [row for prompt, row in first.items() if prompt not in ambiguous]


def sample(seed: int) -> list[Row]:
    """Problems made from templates."""
    return [
        {
            "data_source": "sample_math",
            "prompt": [{"role": "user", "content": f"{INSTRUCTION}\n\n{question}"}],
            "reward_model": {"ground_truth": str(answer), "style": "rule"},
        }
        for question, answer in number_problems(N_PROBLEMS, seed).items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = command_line(__doc__, "aime")
    prepare(Preparation(SCHEMA, dataset_row, sample, HUB, with_one_answer), parser, parser.parse_args(argv))


if __name__ == "__main__":
    main()
