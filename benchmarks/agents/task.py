"""The task of `make bench-agent`: write a word to a file, with one shell command."""

import json
import random
from pathlib import Path
from typing import Any

WORDS = [
    "apple",
    "lemon",
    "river",
    "stone",
    "cloud",
    "tiger",
    "bread",
    "chair",
    "grass",
    "horse",
    "light",
    "metal",
    "night",
    "ocean",
    "paper",
    "queen",
    "salad",
    "table",
    "train",
    "water",
    "beach",
    "candy",
    "dance",
    "eagle",
    "flame",
    "ghost",
    "honey",
    "juice",
    "knife",
    "maple",
    "nurse",
    "olive",
    "piano",
    "robot",
    "sheep",
    "toast",
    "uncle",
    "video",
    "whale",
    "zebra",
    "amber",
    "brick",
    "crown",
    "delta",
    "ember",
    "frost",
    "globe",
    "hotel",
    "index",
    "jewel",
]
FILES = ["answer.txt", "note.txt", "word.txt", "out.txt"]
N_TRACES, N_HELD_OUT = 24, 12
SYSTEM = "Answer with one bash command."


def write_rows(folder: Path) -> None:
    """Write traces for the warm start, tasks for training, and tasks with unseen words for validation."""
    rng = random.Random(0)
    words = rng.sample(WORDS, len(WORDS))
    held_out, seen = words[:N_HELD_OUT], words[N_HELD_OUT:]
    pairs = [(word, file) for word in seen for file in FILES]
    rng.shuffle(pairs)
    rows = {
        "traces": [_trace(*pair) for pair in pairs[:N_TRACES]],
        "train": [_task(*pair) for pair in pairs[N_TRACES:]],
        "validation": [_task(word, rng.choice(FILES)) for word in held_out],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")


def _instruction(word: str, file: str) -> str:
    return f"Write {word} to {file}."


def _task(word: str, file: str) -> dict[str, Any]:
    prompt = [{"role": "user", "content": _instruction(word, file)}]
    return {"prompt": prompt, "verifier": f'test "$(cat {file})" = {word}'}


def _trace(word: str, file: str) -> dict[str, Any]:
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": _instruction(word, file)}]
    return {"prompt": prompt, "response": f"```bash\necho {word} > {file}\n```"}
