"""Write the LiveCodeBench dataset: programming tasks whose solutions must pass their tests.

    python -m examples.livecodebench.lcb_dataset --output_dir ~/data/lcb

reads the part of DeepCoder's training set that comes from LiveCodeBench from the Hub: several gigabytes, mostly tests.
`--source sample` has 17 small tasks with tests instead. They are enough for first runs and tests, but not a benchmark.

Raw rows have `problem` and `tests`, like DeepCoder, or `question_content`, `public_test_cases` and
`private_test_cases`, like LiveCodeBench's own files. Both may have `starter_code` and `metadata`. Read such files with
`--source PATH`. The tests become `reward_spec["ground_truth"]`, a JSON list.
"""

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
from skyrl_gym.data.files import Row
from skyrl_gym.envs.lcb.grading import parse_tests
from skyrl_train.errors import DataError

DEEPCODER = "agentica-org/DeepCoder-Preview-Dataset"
HUB = (HubSplit(DEEPCODER, "train", "lcbv5"), HubSplit(DEEPCODER, "test", "lcbv5"))
# All tests together may exceed pa.string()'s limit of 2 GiB.
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
    """Return a task's row."""
    is_raw_lcb = raw.get("question_content") is not None
    problem = field(raw, "question_content" if is_raw_lcb else "problem", str).strip()
    starter_code = (raw.get("starter_code") or "").strip()
    text = f"{FUNCTION}\n\n{problem}\n\n```python\n{starter_code}\n```" if starter_code else f"{PROGRAM}\n\n{problem}"
    return {
        "data_source": raw.get("data_source") or "livecodebench",
        "prompt": [{"role": "user", "content": text}],
        "env_class": "lcb",
        "reward_spec": {"method": "rule", "ground_truth": json.dumps(parse_row_tests(raw))},
        "extra_info": {"split": split, "index": index, "title": raw.get("question_title") or ""},
    }


def parse_row_tests(raw: Row) -> list[dict[str, Any]]:
    """Return a raw row's tests with the name of the tested function. Raise DataError if they cannot be run."""
    if raw.get("tests") is not None:
        tests = _parse_tests(raw["tests"], "tests")
    else:
        public = _parse_tests(field(raw, "public_test_cases", str), "public_test_cases")
        tests = public + _unpack_tests(field(raw, "private_test_cases", str))
    function_metadata = {"metadata": raw.get("metadata") or {}}
    tests = [function_metadata | test if test.get("testtype") == "functional" else test for test in tests]
    try:
        parse_tests(tests)
    except ValueError as error:
        raise DataError(str(error)) from error
    return tests


def sample(seed: int) -> list[Row]:
    """Return this project's tasks. The seed is ignored."""
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
    """An unpickler for text. It creates no other objects, so pickles cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Raise an error for every class."""
        raise pickle.UnpicklingError(f"{module}.{name} is not text")


def _unpack_tests(text: str) -> list[dict[str, Any]]:
    """Parse hidden tests: JSON, or JSON that is pickled, compressed and base64-encoded."""
    if text.lstrip().startswith("["):
        return _parse_tests(text, "private_test_cases")
    try:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
        return _parse_tests(TextUnpickler(io.BytesIO(packed)).load(), "private_test_cases")
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise DataError(f"private_test_cases={text[:80]!r} cannot be unpacked: {error}") from error


def _parse_tests(text: Any, name: str) -> list[dict[str, Any]]:
    try:
        tests = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise DataError(f"{name}={text[:80]!r} is not JSON: {error}") from error
    if not isinstance(tests, list) or not all(isinstance(test, dict) for test in tests):
        raise DataError(f"{name}={str(text)[:80]!r} is not a list of tests: [{{'input': …, 'output': …}}]")
    return tests


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_line(__doc__, "lcb")
    prepare(Preparation(SCHEMA, dataset_row, sample, HUB), parser, parser.parse_args(argv))


if __name__ == "__main__":
    main()
