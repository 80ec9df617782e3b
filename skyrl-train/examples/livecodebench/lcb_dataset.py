"""Write the LiveCodeBench dataset: programming tasks, to be solved by a program that passes their tests.

    python -m examples.livecodebench.lcb_dataset --output_dir ~/data/lcb

reads the part of DeepCoder's training set that LiveCodeBench gave, from the Hub: several gigabytes, most of it tests.
`--source sample` has 17 small tasks with their tests instead: enough for first runs and tests, but no benchmark.

Raw rows have `problem` and `tests`, as DeepCoder's have, or `question_content`, `public_test_cases` and
`private_test_cases`, as in the files of LiveCodeBench itself; both may have `starter_code` and `metadata`. Those files
can be read with `--source PATH`. The tests become `reward_spec["ground_truth"]`, a JSON list.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from examples.livecodebench.tasks import TASKS
from examples.prepare import HubSplit, Preparation, command_line, field, prepare, row_schema
from skyrl_gym.envs.lcb.grading import read_tests
from skyrl_train.dataset.files import Row
from skyrl_train.errors import DataError

DEEPCODER = "agentica-org/DeepCoder-Preview-Dataset"
HUB = (HubSplit(DEEPCODER, "train", "lcbv5"), HubSplit(DEEPCODER, "test", "lcbv5"))
# All tests together may have more than the 2 GiB that pa.string() can hold.
SCHEMA = row_schema({"index": pa.int64(), "title": pa.string()}, ground_truth=pa.large_string())

PROGRAM = (
    "Write a Python program for the following task. It reads its input from standard input and prints its output to "
    "standard output. Think first, and end your reply with the whole program between ```python and ```."
)
FUNCTION = (
    "Write a Python function for the following task. It must have the name and the parameters of the code below, which "
    "you are to complete. Think first, and end your reply with the whole code between ```python and ```."
)


def dataset_row(raw: Row, split: str, index: int) -> Row:
    """The row of one task."""
    is_raw_lcb = raw.get("question_content") is not None
    problem = field(raw, "question_content" if is_raw_lcb else "problem", str).strip()
    starter_code = (raw.get("starter_code") or "").strip()
    text = f"{FUNCTION}\n\n{problem}\n\n```python\n{starter_code}\n```" if starter_code else f"{PROGRAM}\n\n{problem}"
    return {
        "data_source": raw.get("data_source") or "livecodebench",
        "prompt": [{"role": "user", "content": text}],
        "env_class": "lcb",
        "reward_spec": {"method": "rule", "ground_truth": json.dumps(tests_of(raw))},
        "extra_info": {"split": split, "index": index, "title": raw.get("question_title") or ""},
    }


def tests_of(raw: Row) -> list[dict[str, Any]]:
    """The tests of a raw row, with the name of the function that they call; DataError if they cannot be run."""
    if raw.get("tests") is not None:
        tests = _parsed(raw["tests"], "tests")
    else:
        public = _parsed(field(raw, "public_test_cases", str), "public_test_cases")
        tests = public + _private(field(raw, "private_test_cases", str))
    called = {"metadata": raw.get("metadata") or {}}
    tests = [called | test if test.get("testtype") == "functional" else test for test in tests]
    try:
        read_tests(tests)
    except ValueError as error:
        raise DataError(str(error)) from error
    return tests


def sample(seed: int) -> list[Row]:
    """The tasks that this project wrote; none are drawn, so the seed changes nothing."""
    return [
        {
            "data_source": "sample_lcb",
            "question_title": task.title,
            "problem": task.problem,
            "starter_code": task.starter_code,
            "tests": task.tests_as_json(),
        }
        for task in TASKS
    ]


class TextUnpickler(pickle.Unpickler):
    """Reads a pickled text; it makes no objects of other kinds, so that no pickle can run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse."""
        raise pickle.UnpicklingError(f"{module}.{name} is no text")


def _private(told: str) -> list[dict[str, Any]]:
    """Hidden tests: JSON, or JSON that is pickled, compressed and written in base64."""
    if told.lstrip().startswith("["):
        return _parsed(told, "private_test_cases")
    try:
        packed = zlib.decompress(base64.b64decode(told, validate=True))
        return _parsed(TextUnpickler(io.BytesIO(packed)).load(), "private_test_cases")
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise DataError(f"private_test_cases={told[:80]!r} cannot be unpacked: {error}") from error


def _parsed(told: Any, name: str) -> list[dict[str, Any]]:
    try:
        tests = json.loads(told) if isinstance(told, str) else told
    except ValueError as error:
        raise DataError(f"{name}={told[:80]!r} is not JSON: {error}") from error
    if not isinstance(tests, list) or not all(isinstance(test, dict) for test in tests):
        raise DataError(f"{name}={str(told)[:80]!r} is no list of tests: [{{'input': …, 'output': …}}]")
    return tests


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = command_line(__doc__, "lcb")
    prepare(Preparation(SCHEMA, dataset_row, sample, HUB), parser, parser.parse_args(argv))


if __name__ == "__main__":
    main()
