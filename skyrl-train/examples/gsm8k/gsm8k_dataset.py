"""Write the GSM8K dataset: grade-school word problems with a number as the answer.

    python -m examples.gsm8k.gsm8k_dataset --output_dir ~/data/gsm8k

reads openai/gsm8k from the Hub. `--source sample` generates 2,000 problems from templates instead. They are enough for
first runs and tests, but not a benchmark. Raw rows have a `question`, and an `answer` that ends in ``#### 42``.
"""

from collections.abc import Sequence

import pyarrow as pa

from examples.gsm8k.word_problems import word_problems
from examples.prepare import HubSplit, Preparation, command_line, field, prepare, row_schema
from skyrl_gym.data.files import Row
from skyrl_gym.envs.gsm8k.grading import extract_solution
from skyrl_train.errors import DataError

HUB = (HubSplit("openai/gsm8k", "train", "main"), HubSplit("openai/gsm8k", "test", "main"))
SCHEMA = row_schema({"index": pa.int64(), "answer": pa.string(), "question": pa.string()})
N_PROBLEMS = 2000

IN_STEPS = 'Let\'s think step by step and output the final answer after "####".'
WITH_TOOLS = (
    "You may use tools, one in each reply. <tool><python>…</python></tool> runs a Python program and shows you what it "
    "prints; <tool><search>…</search></tool> asks a search engine. When you know the answer, reply with "
    "<solution>#### ANSWER</solution>, where ANSWER is a number, and write #### nowhere else."
)
INSTRUCTIONS = {"gsm8k": IN_STEPS, "gsm8k_multi_turn": IN_STEPS, "searchcode": WITH_TOOLS}
"""Instructions per environment that can play these rows."""


def dataset_row(raw: Row, split: str, index: int, env_class: str = "gsm8k") -> Row:
    """Return a word problem's row. Raise DataError if its answer does not end in ``####`` and a number."""
    question, answer = field(raw, "question", str), field(raw, "answer", str)
    ground_truth = extract_solution(answer)
    if ground_truth is None:
        raise DataError(f"the answer {answer[-80:]!r} does not end in '#### ' and a number")
    return {
        "data_source": raw.get("data_source") or "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTIONS[env_class]}"}],
        "env_class": env_class,
        "reward_spec": {"method": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def sample(seed: int) -> list[Row]:
    """Generate word problems from templates."""
    return [
        {"data_source": "sample_gsm8k", "question": question, "answer": answer}
        for question, answer in word_problems(N_PROBLEMS, seed).items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_line(__doc__, "gsm8k")
    parser.add_argument("--env_class", choices=INSTRUCTIONS, default="gsm8k", help="the environment of the rows")
    args = parser.parse_args(argv)

    def convert(raw: Row, split: str, index: int) -> Row:
        return dataset_row(raw, split, index, args.env_class)

    prepare(Preparation(SCHEMA, convert, sample, HUB), parser, args)


if __name__ == "__main__":
    main()
