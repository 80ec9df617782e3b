"""Write the dataset of competition maths: DAPO-Math-17k for training, AIME 2024 for validation.

    python -m examples.aime.aime_dataset --output_dir ~/data/aime

reads both from the Hub. Their files repeat each problem up to a hundred times, and a few problems have two answers:
duplicates and ambiguous prompts are dropped. `--source sample` generates 300 much easier problems with integer answers
instead. They are enough for first runs and tests, but not a benchmark. Raw rows have DAPO's columns: `data_source`,
`prompt`, `ability`, `reward_model` with its `ground_truth`, and `extra_info`.
"""

from collections.abc import Iterable, Sequence

import pyarrow as pa

from examples.aime.number_problems import number_problems
from examples.prepare import MESSAGES, HubSplit, Preparation, command_line, field, prepare, prompt_field, text_field
from skyrl_gym.data.files import Row

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
    """Return a problem's row, with an unchanged prompt."""
    spec = field(raw, "reward_model", dict)
    return {
        "data_source": raw.get("data_source") or "math_dapo",
        "prompt": prompt_field(raw),
        "ability": raw.get("ability") or "MATH",
        "env_class": "aime",
        "reward_model": {"ground_truth": text_field(spec, "ground_truth"), "style": spec.get("style") or "rule"},
        "extra_info": {"split": split, "index": str((raw.get("extra_info") or {}).get("index", index))},
    }


def drop_duplicates(rows: Iterable[Row]) -> list[Row]:
    """Return each prompt once. Drop prompts with conflicting answers."""
    first: dict[str, Row] = {}
    ambiguous: set[str] = set()
    n_rows = 0
    for row in rows:
        n_rows += 1
        prompt = str(row["prompt"])
        kept = first.setdefault(prompt, row)
        if kept["reward_model"]["ground_truth"] != row["reward_model"]["ground_truth"]:
            ambiguous.add(prompt)
    print(f"{n_rows} rows have {len(first)} prompts; {len(ambiguous)} with several answers are dropped")
    return [row for prompt, row in first.items() if prompt not in ambiguous]


def sample(seed: int) -> list[Row]:
    """Generate problems from templates."""
    return [
        {
            "data_source": "sample_math",
            "prompt": [{"role": "user", "content": f"{INSTRUCTION}\n\n{question}"}],
            "reward_model": {"ground_truth": str(answer), "style": "rule"},
        }
        for question, answer in number_problems(N_PROBLEMS, seed).items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_line(__doc__, "aime")
    prepare(Preparation(SCHEMA, dataset_row, sample, HUB, drop_duplicates), parser, parser.parse_args(argv))


if __name__ == "__main__":
    main()
