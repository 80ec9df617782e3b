"""A tiny vision-language model learns to press a button that it sees.

    python -m examples.browser.learn --seed 42

The page of the site `button` has one button, in a different place in each task. A warm start on screenshots teaches a
random model to say where it sees the button, and then to click anywhere. GRPO rewards the press, which the site's
server reports, so the model learns to click at what it sees. The tasks of the validation are new. Exit status 1 means
that the model did not learn.
"""

import asyncio
import json
import random
from pathlib import Path

from examples.browser.browser_dataset import main as write_tasks
from examples.learning import Recipe, main
from examples.tiny_vision_model import Example, make_tiny_vision_model
from skyrl_gym.data.files import Row
from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.envs.browser.env import BrowserEnv
from skyrl_gym.envs.browser.sites.button import HEIGHT, WIDTH, ButtonSite
from skyrl_gym.images import join_texts
from skyrl_train.dataset.files import read_rows
from skyrl_train.entrypoints.tiny import TURN_END

SIDE, N_PATCHES = 200, 10
SETTINGS = {"width": SIDE, "height": SIDE, "coordinates": "thousandths"}
N_TASKS = 300
N_SCREENSHOTS = 160
VOCABULARY = 1024  # merges the description of the tool into a few tokens
N_COLUMNS = N_ROWS = 4
Cell = tuple[int, int]
"""Column and row of a cell, of which the screen has 4 x 4."""


def write_data(folder: Path) -> None:
    """Write the tasks."""
    write_tasks(["--output_dir", str(folder), "--sites", "button", "--num_tasks", str(N_TASKS), "--seed", "0"])


def make_model(data: Path, model: Path, seed: int) -> None:
    """Write the model, warm-started on screenshots of training tasks."""
    rows = list(read_rows(str(data / "train.parquet")))[:N_SCREENSHOTS]
    starts = asyncio.run(_open_all(rows))
    cells = [(column, row) for column in range(N_COLUMNS) for row in range(N_ROWS)]
    texts = [[*_remove_images(starts[0][0]), {"role": "assistant", "content": _reply(cell, cell)}] for cell in cells]

    def draw_example(rng: random.Random) -> Example:
        prompt, cell = rng.choice(starts)
        return prompt, _reply(cell, rng.choice(cells))

    loss = make_tiny_vision_model(
        texts, draw_example, model, seed, image_size=SIDE, n_patches=N_PATCHES, vocab_size=VOCABULARY
    )
    print(f"Wrote a tiny Idefics 3 to {model} (loss: {loss:.3f} nats per token)")


async def _open_all(rows: list[Row]) -> list[tuple[ConversationType, Cell]]:
    """Return the first prompt of each task, and the cell of its button."""

    async def open_task(row: Row) -> tuple[ConversationType, Cell]:
        env = BrowserEnv(SETTINGS, row)
        try:
            prompt, _ = await env.init_async(row["prompt"])
        finally:
            await env.close_async()
        assert isinstance(env.site, ButtonSite)
        return prompt, find_cell(env.site)

    return list(await asyncio.gather(*map(open_task, rows)))


def find_cell(site: ButtonSite) -> Cell:
    """Return the cell of the screen in which the middle of the button is."""
    x, y = site.left + WIDTH / 2, site.top + HEIGHT / 2  # in percent
    return int(x * N_COLUMNS / 100), int(y * N_ROWS / 100)


def _reply(seen: Cell, clicked: Cell) -> str:
    """Return a reply that says in which cell the button is, and clicks into a cell."""
    call = {"name": "computer", "arguments": {"action": "left_click", "coordinate": _center(clicked)}}
    return f"The button is at {_center(seen)}.\n<tool_call>\n{json.dumps(call)}\n</tool_call>{TURN_END}"


def _center(cell: Cell) -> list[int]:
    """Return the middle of a cell in thousandths of the screen."""
    return [(2 * index + 1) * 1000 // (2 * n) for index, n in zip(cell, (N_COLUMNS, N_ROWS), strict=True)]


def _remove_images(prompt: ConversationType) -> ConversationType:
    return [{**message, "content": join_texts(message["content"])} for message in prompt]


RECIPE = Recipe(
    name="browser",
    write_data=write_data,
    attempt=None,
    make_model=make_model,
    metric="eval/all/avg_score",
    required=0.6,
    chance=1 / 16,
    n_steps=40,
    overrides=(
        *(f"environment.skyrl_gym.browser.{name}={value}" for name, value in SETTINGS.items()),
        "trainer.policy.model.freeze_vision=false",
        "trainer.policy.optimizer_config.lr=5e-4",  # twice as much, or less KL loss, and it settles on one place
        "trainer.algorithm.kl_loss_coef=0.05",
        "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=4",
        "generator.n_samples_per_prompt=16",
        "generator.max_turns=1",
        "trainer.max_prompt_length=400",
        "generator.sampling_params.max_generate_length=48",
        "generator.eval_sampling_params.max_generate_length=48",
    ),
)

if __name__ == "__main__":
    main(RECIPE, __doc__)
