"""Write the Search-R1 dataset: open questions to answer with a search engine.

    python -m examples.search.searchr1_dataset --output_dir ~/data/searchR1

reads PeterJinGo/nq_hotpotqa_train from the Hub. Its questions need a search engine over all of Wikipedia. With
`--source sample`, they are about the 75 short documents in `corpus.jsonl` next to this file. Serve these without a
download:

    python -m skyrl_gym.retrieval --corpus examples/search/corpus.jsonl

This is enough for first runs and tests, but not a benchmark: large models know most answers without searching. Raw rows
have `question`, and the accepted answers in `golden_answers` or ``reward_model["ground_truth"]["target"]``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from examples.prepare import MESSAGES, HubSplit, Preparation, command_line, field, prepare
from skyrl_gym.data.files import Row
from skyrl_gym.envs.exact_match import parse_targets
from skyrl_train.dataset.files import read_rows
from skyrl_train.errors import DataError

HUB = (HubSplit("PeterJinGo/nq_hotpotqa_train", "train"), HubSplit("PeterJinGo/nq_hotpotqa_train", "test"))
CORPUS = Path(__file__).with_name("corpus.jsonl")
QUESTIONS = Path(__file__).with_name("questions.jsonl")

SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": MESSAGES,
        "env_class": pa.string(),
        "reward_spec": pa.struct({"style": pa.string(), "ground_truth": pa.struct({"target": pa.list_(pa.string())})}),
        "extra_info": pa.struct({"split": pa.string(), "index": pa.int64(), "question": pa.string()}),
    }
)

SYSTEM_PROMPT = "You are a helpful and harmless assistant."
INSTRUCTION = (
    "Answer the question at the end. Think between <think> and </think> before anything else, and again each time you "
    "have read something new. If you need to know more, ask a search engine: write <search> your query </search>, and "
    "what it finds will be shown to you between <information> and </information>. You may search several times. As "
    "soon as you know the answer, write it between <answer> and </answer>, in a few words and without an explanation; "
    "for example <answer> Beijing </answer>.\n\nQuestion: "
)


def dataset_row(raw: Row, split: str, index: int) -> Row:
    """Return a question's dataset row."""
    question = field(raw, "question", str).strip()
    question = question if question.endswith("?") else f"{question}?"
    return {
        "data_source": f"searchR1_{raw.get('data_source') or 'unknown'}",
        "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": INSTRUCTION + question}],
        "env_class": "search",
        "reward_spec": {"style": "rule", "ground_truth": {"target": targets(raw)}},
        "extra_info": {"split": split, "index": index, "question": question},
    }


def targets(raw: Row) -> list[str]:
    """Return a raw row's accepted answers. Raise DataError if there are none."""
    spec: Any = raw.get("reward_model") or {"ground_truth": {"target": field(raw, "golden_answers", list)}}
    try:
        return parse_targets(spec["ground_truth"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"it has no right answers: reward_model={str(spec)[:200]}") from error


def sample(seed: int) -> list[Row]:
    """Return all questions about the documents in `CORPUS`. The seed is ignored."""
    return [row | {"data_source": "sample"} for row in read_rows(str(QUESTIONS))]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_line(__doc__, "searchR1")
    args = parser.parse_args(argv)
    prepare(Preparation(SCHEMA, dataset_row, sample, HUB), parser, args)
    if args.source == "sample":
        print(f"Serve the documents with: python -m skyrl_gym.retrieval --corpus {CORPUS}")


if __name__ == "__main__":
    main()
