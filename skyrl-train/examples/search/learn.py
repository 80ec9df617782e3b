"""A tiny model learns to use a search engine.

    python -m examples.search.learn --seed 42

Each question is about a box in a room, and only the search engine knows what is in it. The model starts with the form
only: it searches for some box of the room, or for nothing, and answers with what it has read, or with any digit. To be
right, it must search for the box it was asked about, always, and say what the document says. Validation asks about
rooms that training never mentions, so that there is nothing to learn by heart. A retrieval server
(`skyrl_gym.retrieval`) runs meanwhile. The exit status is 1 if it did not learn.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import urllib3

from examples.learning import Recipe, main
from skyrl_gym.envs.base_text_env import ConversationType

ROOMS, N_TRAIN = range(100, 1000), 850
COLOURS = ("red", "blue", "green", "grey")
START_SECONDS = 60.0
P_SEARCH, P_REPEAT = 0.9, 0.3  # of an attempt: to search, and to answer with what was read


def contents(room: int, colour: str) -> int:
    """What is in a box: a digit."""
    return random.Random(f"{room} {colour}").randrange(10)


def document(room: int, colour: str) -> str:
    """What the search engine knows of a box."""
    return f"room {room} {colour} box: {contents(room, colour)}"


def question(room: int, colour: str) -> dict[str, Any]:
    """A dataset row."""
    return {
        "data_source": "boxes",
        "prompt": [{"role": "user", "content": f"What is in the {colour} box of room {room}?"}],
        "env_class": "search",
        "reward_spec": {"method": "rule", "ground_truth": {"target": [str(contents(room, colour))]}},
        "extra_info": {"room": room, "colour": colour},
    }


def write_data(folder: Path) -> None:
    """The corpus, the questions about most rooms to train on, and those about the others to validate."""
    folder.mkdir(parents=True, exist_ok=True)
    rooms = list(ROOMS)
    random.Random(0).shuffle(rooms)
    lines = [json.dumps({"id": f"{r} {c}", "contents": document(r, c)}) for r in rooms for c in COLOURS]
    (folder / "corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for name, some in (("train", rooms[:N_TRAIN]), ("validation", rooms[N_TRAIN:])):
        rows = [question(room, colour) for room in some for colour in COLOURS]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def attempt(row: dict[str, Any], rng: random.Random) -> ConversationType:
    """A question, perhaps a search for some box of the room, and an answer that is what was read, or anything."""
    room = row["extra_info"]["room"]
    conversation = list(row["prompt"])
    answer = rng.randrange(10)
    if rng.random() < P_SEARCH:
        colour = rng.choice(COLOURS)
        told = json.dumps({"result": f"Doc 1: {document(room, colour)}\n"})
        answer = contents(room, colour) if rng.random() < P_REPEAT else answer
        conversation += [
            {"role": "assistant", "content": f"<search>room {room} {colour} box</search>"},
            {"role": "user", "content": f"\n<information>{told}</information>\n"},
        ]
    return [*conversation, {"role": "assistant", "content": f"<answer>{answer}</answer>"}]


@contextmanager
def search_engine(folder: Path) -> Iterator[Sequence[str]]:
    """The retrieval server over the corpus."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "skyrl_gym.retrieval",
        "--corpus",
        str(folder / "corpus.jsonl"),
        "--port",
        str(port),
    ]
    with subprocess.Popen(command) as process:
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", process)
            yield (f"environment.skyrl_gym.search.search_url=http://127.0.0.1:{port}/retrieve",)
        finally:
            process.terminate()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib3.request("GET", url, retries=False, timeout=1)
            return
        except urllib3.exceptions.HTTPError:
            time.sleep(0.1)
    raise RuntimeError(f"the retrieval server does not answer at {url}; its own words stand above")


RECIPE = Recipe(
    name="search",
    write_data=write_data,
    attempt=attempt,
    overrides=(
        "trainer.train_batch_size=32",
        "trainer.policy_mini_batch_size=8",
        "generator.n_samples_per_prompt=32",
        "generator.max_turns=2",
        "generator.batched=false",
        "generator.sampling_params.max_generate_length=16",
        "environment.skyrl_gym.search.topk=1",
    ),
    metric="eval/all/avg_score",
    required=0.9,
    chance=0.16,
    n_steps=80,
    context_length=256,
    n_start_steps=300,
    world=search_engine,
)

if __name__ == "__main__":
    main(RECIPE, __doc__ or "")
