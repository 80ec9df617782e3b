"""A tiny model learns to use a search engine.

    python -m examples.search.learn --seed 42

Each question asks for the content of a box in a room. Only the search engine knows it. At the start, the model knows
only the format: it searches for some box in the room, or not at all, and answers with a retrieved or an arbitrary
digit. To be correct, it must always search for the right box and repeat the digit in the document. The validation rooms
do not occur in training, so nothing can be memorized. A retrieval server (`skyrl_gym.retrieval`) runs during training.
Exit status 1 means that the model did not learn.
"""

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
P_SEARCH, P_REPEAT = 0.9, 0.3  # probabilities that an attempt searches, and that it repeats the result


def contents(room: int, colour: str) -> int:
    """Return a box's content: a digit."""
    return random.Random(f"{room} {colour}").randrange(10)


def document(room: int, colour: str) -> str:
    """Return the search engine's document about a box."""
    return f"room {room} {colour} box: {contents(room, colour)}"


def question(room: int, colour: str) -> dict[str, Any]:
    """Return a box's dataset row."""
    return {
        "data_source": "boxes",
        "prompt": [{"role": "user", "content": f"What is in the {colour} box of room {room}?"}],
        "env_class": "search",
        "reward_spec": {"method": "rule", "ground_truth": {"target": [str(contents(room, colour))]}},
        "extra_info": {"room": room, "colour": colour},
    }


def write_data(folder: Path) -> None:
    """Write the corpus, training questions about most rooms, and validation questions about the rest."""
    folder.mkdir(parents=True, exist_ok=True)
    rooms = list(ROOMS)
    random.Random(0).shuffle(rooms)
    lines = [json.dumps({"id": f"{r} {c}", "contents": document(r, c)}) for r in rooms for c in COLOURS]
    (folder / "corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for name, split_rooms in (("train", rooms[:N_TRAIN]), ("validation", rooms[N_TRAIN:])):
        rows = [question(room, colour) for room in split_rooms for colour in COLOURS]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def attempt(row: dict[str, Any], rng: random.Random) -> ConversationType:
    """Return a question, possibly a search for some box in the room, and a retrieved or random answer."""
    room = row["extra_info"]["room"]
    conversation = list(row["prompt"])
    answer = rng.randrange(10)
    if rng.random() < P_SEARCH:
        colour = rng.choice(COLOURS)
        result = json.dumps({"result": f"Doc 1: {document(room, colour)}\n"})
        answer = contents(room, colour) if rng.random() < P_REPEAT else answer
        conversation += [
            {"role": "assistant", "content": f"<search>room {room} {colour} box</search>"},
            {"role": "user", "content": f"\n<information>{result}</information>\n"},
        ]
    return [*conversation, {"role": "assistant", "content": f"<answer>{answer}</answer>"}]


@contextmanager
def search_engine(folder: Path) -> Iterator[Sequence[str]]:
    """Run the retrieval server over the corpus."""
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
    raise RuntimeError(f"the retrieval server does not respond at {url}; see its output above")


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
    service=search_engine,
)

if __name__ == "__main__":
    main(RECIPE, __doc__ or "")
