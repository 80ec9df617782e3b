"""What the dataset scripts share: their command line, where raw rows come from, and how the files are written.

A script says how one raw row becomes one row of the dataset; `prepare` does the rest:

    python -m examples.gsm8k.gsm8k_dataset --output_dir ~/data/gsm8k --source sample

writes ``train.parquet`` and ``validation.parquet`` (run it from the folder that holds `examples`).
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_train.dataset.files import Row, read_rows
from skyrl_train.errors import DataError, SkyRLError

T = TypeVar("T")

SPLITS = ("train", "validation")
VALIDATION_NAMES = ("validation", "val", "dev", "test")
SUFFIXES = (".parquet", ".jsonl", ".json")
MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
HELD_OUT = 0.2  # of the tasks, where there is no validation split
MOST_HELD_OUT = 500


@dataclass(frozen=True, slots=True)
class HubSplit:
    """A split of a dataset on the Hugging Face Hub, and which of its configurations, where it has several."""

    name: str
    split: str
    config: str | None = None

    def __str__(self) -> str:
        config = f"/{self.config}" if self.config else ""
        return f"{self.name}{config}:{self.split}"


def every_row(rows: Iterable[Row]) -> list[Row]:
    """All of them."""
    return list(rows)


def prompt_text(row: Row) -> str:
    """What the messages of a row's prompt say."""
    return "\n".join(message["content"] for message in row["prompt"])


@dataclass(frozen=True, slots=True)
class Preparation:
    """How one dataset is made.

    schema: the columns of both files.
    convert: makes a row of a raw row, for a split and with its number there. It raises DataError for one that it
        cannot read; see `field`.
    sample: raw rows that this project made, drawn with a seed.
    hub: where the raw rows of both splits are on the Hub; None for a dataset that is not there.
    select: which of the converted rows are kept.
    identity: what tells a task from others: rows that have it in common are in the same file.
    """

    schema: pa.Schema
    convert: Callable[[Row, str, int], Row]
    sample: Callable[[int], list[Row]]
    hub: tuple[HubSplit, HubSplit] | None = None
    select: Callable[[Iterable[Row]], list[Row]] = every_row
    identity: Callable[[Row], str] = prompt_text


def row_schema(
    extra_info: Mapping[str, pa.DataType], ground_truth: pa.DataType | None = None, **more: pa.DataType
) -> pa.Schema:
    """SkyRL's columns, with `split` and these fields in `extra_info`, and `more` columns after them."""
    spec = {"method": pa.string(), "ground_truth": ground_truth or pa.string()}
    return pa.schema(
        {
            "data_source": pa.string(),
            "prompt": MESSAGES,
            "env_class": pa.string(),
            "reward_spec": pa.struct(spec),
            "extra_info": pa.struct({"split": pa.string(), **extra_info}),
            **more,
        }
    )


def field(raw: Row, name: str, kind: type[T]) -> T:
    """A field of a raw row; DataError if it is missing or of another kind."""
    if raw.get(name) is None:
        raise DataError(f"it has no {name!r}; its columns are {', '.join(map(str, raw))}")
    value = raw[name]
    if not isinstance(value, kind):
        raise DataError(f"{name}={str(value)[:80]!r} is of the type {type(value).__name__}, not {kind.__name__}")
    return value


def text_field(raw: Row, name: str) -> str:
    """A field that is text, or a whole number, which is written out."""
    value = raw.get(name)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else field(raw, name, str)


def prompt_field(raw: Row) -> list[dict[str, str]]:
    """The chat messages in `prompt`, without what else they may hold than role and content."""
    messages = field(raw, "prompt", list)
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise DataError(f'prompt={str(messages)[:80]!r} is no list of messages: [{{"role": "user", "content": "…"}}]')
    return [{"role": field(message, "role", str), "content": field(message, "content", str)} for message in messages]


def command_line(description: str | None, name: str, default_source: str = "hub") -> argparse.ArgumentParser:
    """The parser of a script, to which it may add flags of its own; `description` is the module's docstring."""
    parser = argparse.ArgumentParser(
        description=(description or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--output_dir", "--local_dir", type=Path, default=Path(f"~/data/{name}"), help="folder to write to")
    add("--source", default=default_source, help="hub, sample, or a local file or folder with raw rows")
    add("--max_rows", type=int, help="of each file; %(default)s means all there are")
    add("--seed", type=int, default=42, help="of what is drawn: a sample, the rows held out, those of --max_rows")
    return parser


def prepare(preparation: Preparation, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Write both files and say so; what is wrong with the flags or the data ends the command with a line."""
    try:
        if args.max_rows is not None and args.max_rows < 1:
            raise DataError(f"--max_rows={args.max_rows} leaves no rows; use 1 or more")
        splits = {
            split: at_most(rows, args.max_rows, args.seed)
            for split, rows in make_splits(preparation, args.source, args.seed).items()
        }
        for line in write_splits(splits, args.output_dir.expanduser(), preparation.schema):
            print(line)
    except (SkyRLError, OSError) as problem:
        parser.error(str(problem))


def make_splits(preparation: Preparation, source: str, seed: int) -> dict[str, list[Row]]:
    """The converted rows of both splits. Where the source has only one, part of it is held out.

    Raises:
        DataError: the source cannot be read, or a row of it cannot be converted.
    """
    splits = {
        split: preparation.select(_converted(preparation, rows, split, source))
        for split, rows in raw_splits(preparation, source, seed).items()
    }
    for split, rows in splits.items():
        if not rows:
            raise DataError(f"--source={source} has no rows for {split}.parquet")
    return splits if "validation" in splits else hold_out(preparation, splits["train"], source, seed)


def raw_splits(preparation: Preparation, source: str, seed: int) -> dict[str, Iterable[Row]]:
    """The raw rows of a source: of both splits, or of `train` only."""
    if source == "sample":
        return {"train": preparation.sample(seed)}
    if source != "hub":
        return _local_rows(Path(source).expanduser())
    if preparation.hub is None:
        raise DataError("--source=hub: this dataset is not on the Hub; use --source sample")
    return {split: rows_on_hub(place) for split, place in zip(SPLITS, preparation.hub, strict=True)}


def rows_on_hub(place: HubSplit) -> Iterable[Row]:
    """The rows of a split on the Hub, one at a time: some of them do not fit into memory as Python objects.

    Raises:
        DataError: it cannot be loaded.
    """
    import datasets

    try:
        rows: Iterable[Row] = datasets.load_dataset(place.name, place.config, split=place.split)
    except Exception as error:  # the boundary to the Hub: its client raises dozens of types
        raise DataError(
            f"cannot load {place} from the Hugging Face Hub ({type(error).__name__}: {error}); give its files with "
            "--source PATH, or try --source sample"
        ) from error
    return rows


def hold_out(preparation: Preparation, rows: Sequence[Row], source: str, seed: int) -> dict[str, list[Row]]:
    """A fifth of the tasks for validation, 500 at most, and the other rows for training. No task is in both."""
    tasks = list(dict.fromkeys(map(preparation.identity, rows)))
    if len(tasks) < 2:
        raise DataError(
            f"--source={source} has a single task, which cannot be in both files; give more rows, or a folder with a "
            "train and a test file"
        )
    n_held_out = min(max(1, int(len(tasks) * HELD_OUT)), MOST_HELD_OUT)
    held_out = set(random.Random(seed).sample(tasks, n_held_out))
    splits: dict[str, list[Row]] = {split: [] for split in SPLITS}
    for row in rows:
        split = "validation" if preparation.identity(row) in held_out else "train"
        splits[split].append(row | {"extra_info": row["extra_info"] | {"split": split}})
    return splits


def at_most(rows: list[Row], max_rows: int | None, seed: int) -> list[Row]:
    """`max_rows` of the rows, drawn at random, in the order that they had."""
    if max_rows is None or len(rows) <= max_rows:
        return rows
    return [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), max_rows))]


def write_splits(splits: Mapping[str, list[Row]], output_dir: Path, schema: pa.Schema) -> list[str]:
    """Write a file for each split, which appear together when they are complete; a line for each that says where."""
    tables = {output_dir / f"{split}.parquet": _table(rows, split, schema) for split, rows in splits.items()}
    output_dir.mkdir(parents=True, exist_ok=True)
    partials = {path: path.with_name(f"{path.name}.partial") for path in tables}
    try:
        for path, table in tables.items():
            pq.write_table(table, partials[path])
        for path, partial in partials.items():
            partial.replace(path)
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
    return [f"Wrote {table.num_rows} rows to {path}" for path, table in tables.items()]


def _table(rows: list[Row], split: str, schema: pa.Schema) -> pa.Table:
    try:
        return pa.Table.from_pylist(rows, schema)
    except (ValueError, pa.ArrowException) as error:  # of ValueError: text that is no Unicode
        raise DataError(f"the rows of {split} cannot be stored as parquet: {error}") from error


def _converted(preparation: Preparation, raws: Iterable[Row], split: str, source: str) -> Iterator[Row]:
    for i, raw in enumerate(raws):
        try:
            yield preparation.convert(raw, split, i)
        except DataError as error:
            raise DataError(f"row {i} of the {split} split of {source}: {error}") from error


def _local_rows(path: Path) -> dict[str, Iterable[Row]]:
    """The rows of a file, or those of the train and validation files in a folder."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"--source={path} must end in one of {', '.join(SUFFIXES)}")
        return {"train": read_rows(str(path))}
    if not path.is_dir():
        raise DataError(f"--source={path} is no file and no folder; use hub, sample, or a path")
    train = _files_of(path, "train")
    if not train:
        raise DataError(f"the folder {path} has no train{SUFFIXES[0]}, train{SUFFIXES[1]} or train{SUFFIXES[2]}")
    validation = next(filter(None, (_files_of(path, name) for name in VALIDATION_NAMES)), [])
    files = {"train": train, "validation": validation}
    return {
        split: [row for file in of_split for row in read_rows(str(file))]
        for split, of_split in files.items()
        if of_split
    }


def _files_of(folder: Path, split: str) -> list[Path]:
    """`train.parquet` or the like, or the parts of one that the Hub stores as `train-00000-of-00002.parquet`."""
    name = re.compile(rf"{split}(-\d+-of-\d+)?")
    files = sorted(path for path in folder.iterdir() if name.fullmatch(path.stem))
    of_each = ([path for path in files if path.suffix == suffix] for suffix in SUFFIXES)
    return next(filter(None, of_each), [])
