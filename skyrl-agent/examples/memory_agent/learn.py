"""A tiny model learns to remember what it will need.

    PYTHONPATH=../skyrl-agent/examples python -m memory_agent.learn --seed 42

Three documents name the contents of three boxes. The agent sees one document at a time, and forgets everything except
the summary that it writes for itself. At the start, the model often acts at random: it writes down the digit that it
sees, or keeps its summary. To be correct, it must write down the right box's digit, carry it through the other
sections, and answer with it. The validation boxes have numbers that do not occur in training. Exit status 1 means that
the model did not learn.
"""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from examples.learning import Recipe, main
from memory_agent.task import BoxesTask
from skyrl_agent.config import AgentConfig
from skyrl_agent.integrations.skyrl_train import AgentExp, to_overrides
from skyrl_agent.tasks.memagent import Reader
from skyrl_agent.tools.base import create_tools, format_tools
from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.tools.messages import append_to_system
from skyrl_train.config import SkyRLConfig

AGENT = AgentConfig.load(Path(__file__).parent / "task.yaml")
COLOURS = ("red", "blue", "green", "grey")
N_BOXES, N_TRAIN, N_VALIDATION = 3, 2000, 256
NOTHING = "none"  # a summary without a digit
P_RIGHT = 0.5  # probability that an attempt is not random


def row(rng: random.Random) -> dict[str, Any]:
    """Return a question about one of the boxes, and a document about each."""
    colours, digits = rng.sample(COLOURS, N_BOXES), [str(rng.randrange(10)) for _ in range(N_BOXES)]
    documents = [
        f"Document {i}: {c} box has {d}.\n" for i, (c, d) in enumerate(zip(colours, digits, strict=True), start=1)
    ]
    asked = rng.randrange(N_BOXES)
    return {
        "data_source": "boxes",
        "prompt": [{"role": "user", "content": f"What is in the {colours[asked]} box?"}],
        "context": "".join(documents),
        "answer": digits[asked],
    }


def write_data(folder: Path) -> None:
    """Write training and validation questions. The two sets have no text in common."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < N_TRAIN + N_VALIDATION:
        new = row(rng)
        rows.setdefault(new["context"], new)
    ordered = list(rows.values())
    for name, part in (("train", ordered[:N_TRAIN]), ("validation", ordered[N_TRAIN:])):
        pq.write_table(pa.Table.from_pylist(part), folder / f"{name}.parquet")


def attempt(row: dict[str, Any], rng: random.Random) -> ConversationType:
    """Return a section with a random summary of the earlier sections, and a random action."""
    reader = Reader(row["prompt"][-1]["content"], row["context"], BoxesTask.max_section_chars)
    messages, memory = reader.messages(), NOTHING
    for _ in range(rng.randrange(N_BOXES)):
        memory = rng.choice([NOTHING, str(rng.randrange(10))])
        messages = reader.next_messages(memory)
    (seen,) = (text for text in messages[-1]["content"].splitlines() if text.startswith("Document"))
    is_asked = row["prompt"][-1]["content"].split()[-2] in seen.split()
    keeps_seen = is_asked if rng.random() < P_RIGHT else rng.random() < 0.5
    kept = seen[-2] if keeps_seen else memory
    name, parameter = ("finish", "answer") if reader.is_at_end else ("next_with_summary", "summary")
    call = f"<function={name}>\n<parameter={parameter}>{kept}</parameter>\n</function>"
    prompt = append_to_system([dict(m) for m in messages], format_tools(create_tools(AGENT.tools).values()))
    return [*prompt, {"role": "assistant", "content": call}]


class MemoryExp(AgentExp):
    """Training of the agent in task.yaml."""

    def __init__(self, cfg: SkyRLConfig) -> None:
        super().__init__(AGENT, cfg)


RECIPE = Recipe(
    name="memory_agent",
    write_data=write_data,
    attempt=attempt,
    overrides=(
        *to_overrides(AGENT),
        "generator.batched=false",
        "trainer.train_batch_size=16",
        "trainer.policy_mini_batch_size=4",
    ),
    metric="eval/all/avg_score",
    required=0.9,
    chance=0.6,
    n_steps=40,
    context_length=128,
    n_start_steps=1200,
    vocab_size=1024,
)

if __name__ == "__main__":
    main(RECIPE, __doc__ or "", experiment=MemoryExp)
