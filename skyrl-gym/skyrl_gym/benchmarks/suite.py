"""The named benchmarks, and their rows from the Hub, from a file, or from the samples of this project."""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from skyrl_gym.data.files import SUFFIXES, open_file
from skyrl_gym.envs.entry_point import suggest_name
from skyrl_gym.envs.gsm8k.grading import extract_solution
from skyrl_gym.envs.ifeval.dataset import ifeval_row
from skyrl_gym.error import InvalidSettings
from skyrl_gym.optional import require

Raw = Mapping[str, Any]

MATHS = "Please reason step by step, and put your final answer within \\boxed{}."
CHOICE = "Please reason step by step, and put the letter of your choice within \\boxed{}."
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark on the Hugging Face Hub.

    hub: the dataset, its configuration and its split.
    convert: turns a raw row into `prompt`, `env_class` and `reward_spec`.
    """

    hub: tuple[str, str | None, str]
    convert: Callable[[Raw], dict[str, Any]]


def _maths(raw: Raw) -> dict[str, Any]:
    return _row(f"{raw['problem']}\n\n{MATHS}", "math", str(raw["answer"]).strip())


def _gsm8k(raw: Raw) -> dict[str, Any]:
    truth = extract_solution(raw["answer"])
    if truth is None:
        raise ValueError(f"answer={raw['answer'][-40:]!r} does not end in #### and a number")
    return _row(f"{raw['question']}\n\n{MATHS}", "math", truth)


def _gpqa(raw: Raw) -> dict[str, Any]:
    """Shuffle the choices by the question, so that they have the same order in every evaluation."""
    right = raw["Correct Answer"].strip()
    choices = [right, *(raw[f"Incorrect Answer {i}"].strip() for i in (1, 2, 3))]
    seed = hashlib.blake2b(raw["Question"].encode(), digest_size=8).digest()
    random.Random(seed).shuffle(choices)
    return _choice(raw["Question"].strip(), choices, LETTERS[choices.index(right)])


def _mmlu_pro(raw: Raw) -> dict[str, Any]:
    return _choice(raw["question"], raw["options"], raw["answer"])


def _choice(question: str, choices: list[str], answer: str) -> dict[str, Any]:
    options = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
    return _row(f"{question}\n\n{options}\n\n{CHOICE}", "choice", answer)


def _row(text: str, method: str, truth: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": text}],
        "env_class": "answer",
        "reward_spec": {"method": method, "ground_truth": truth},
    }


BENCHMARKS: Mapping[str, Benchmark] = {
    "gsm8k": Benchmark(("openai/gsm8k", "main", "test"), _gsm8k),
    "math500": Benchmark(("HuggingFaceH4/MATH-500", None, "test"), _maths),
    "aime24": Benchmark(("HuggingFaceH4/aime_2024", None, "train"), _maths),
    "aime25": Benchmark(("math-ai/aime25", None, "test"), _maths),
    "gpqa": Benchmark(("Idavidrein/gpqa", "gpqa_diamond", "train"), _gpqa),
    "ifeval": Benchmark(("google/IFEval", None, "train"), ifeval_row),
    "mmlu-pro": Benchmark(("TIGER-Lab/MMLU-Pro", None, "test"), _mmlu_pro),
}
"""Benchmarks by name. `docs/guides/evaluation.md` has their sizes and licences."""


def benchmark_rows(source: str, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a benchmark. `data_source` is its name.

    Args:
        source: a name of `BENCHMARKS`, for the Hub; ``name=file.jsonl`` for raw rows in a file, with the Hub's columns;
            or ``name=sample`` for a few problems of this project, which only show that everything works.
        limit: maximum number of rows, the first ones.

    Raises:
        InvalidSettings: there is no such benchmark.
        ImportError: the package `datasets` is not installed.
        UnreadableData: the file cannot be read.
        ValueError: a row lacks a column, or has an invalid answer.
    """
    name, _, origin = source.partition("=")
    if name not in BENCHMARKS:
        hint = suggest_name(name, list(BENCHMARKS))
        raise InvalidSettings(f"there is no benchmark {name!r}.{hint} Benchmarks: {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    for index, raw in enumerate(islice(_raw_rows(name, benchmark, origin), limit)):
        try:
            row = benchmark.convert(raw)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            reason = f"it has no column {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"row {index} of {source}: {reason}; it needs the columns of {benchmark.hub[0]}"
            ) from error
        yield {**row, "data_source": name, "extra_info": {"index": index}}


def _raw_rows(name: str, benchmark: Benchmark, origin: str) -> Iterator[Raw]:
    if origin == "sample":
        samples = yaml.safe_load(resources.files("skyrl_gym.benchmarks").joinpath("samples.yaml").read_text("utf-8"))
        return iter(samples[name])
    if origin:
        path = Path(origin).expanduser()
        if path.suffix not in SUFFIXES:
            raise InvalidSettings(f"{name}={origin}: use sample, or a file that ends in {', '.join(SUFFIXES)}")
        rows = open_file(str(path), path, name)
        return (raw for index in range(len(rows)) for raw in rows.read([index]))
    require("datasets", "benchmarks", "benchmarks of the Hub")
    import datasets

    dataset, config, split = benchmark.hub
    return iter(datasets.load_dataset(dataset, config, split=split))
