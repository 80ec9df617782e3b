"""Rollouts with images: retries show the images again, and memory stays flat."""

import asyncio
import gc
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from train_kit.engines import LIMITS
from train_kit.messages import system
from train_kit.models import load_on_cpu
from train_kit.processes import run_python
from train_kit.vision_models import PictureEnv, picture, save_vision_model

import skyrl_gym
from skyrl_gym.envs.registration import deregister
from skyrl_gym.images import EncodedImage, read_image
from skyrl_train.config import load_config
from skyrl_train.generators.base import BatchMetadata, RolloutRequest
from skyrl_train.generators.gym_generator import GymGenerator
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.inference_engines.hf.general import GeneralEngine
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.types import PromptRow, Trajectory, TrajectoryID

N_IMAGES = 1000
N_WARM_UP = 250  # images until all caches are full
MAX_GROWTH = 3000  # memory blocks, four for each of the other images. Names that Python interns take up to 1100


class FragilePictureEnv(PictureEnv):
    """A `PictureEnv` whose first instance fails at its second turn."""

    def __init__(self, made: list[int], env_config: Any, extras: Any) -> None:
        super().__init__(env_config, extras)
        made.append(len(made))
        self._fails = len(made) == 1

    def step(self, action: str) -> Any:
        if self._fails and self.turns == 1:
            raise RuntimeError("the screen went black")
        return super().step(action)


@asynccontextmanager
async def open_generator(folder: Path) -> AsyncIterator[GymGenerator]:
    """A generator with a tiny Idefics 3, which is saved into the folder."""
    path = save_vision_model(folder / "model", "idefics3")
    model, tokenizer = load_on_cpu(path), load_tokenizer(str(path))
    cfg = load_config({"trainer": {"max_prompt_length": 1}, "generator": {"max_turns": 3, "n_rollout_retries": 1}})
    engine = GeneralEngine(model, tokenizer, **LIMITS)
    generator = GymGenerator(cfg.generator, cfg.environment.skyrl_gym, engine, tokenizer)
    skyrl_gym.register("pictures", PictureEnv)
    skyrl_gym.register("fragile_pictures", partial(FragilePictureEnv, []))
    yield generator
    for name in ("pictures", "fragile_pictures"):
        deregister(name)
    await generator.close()
    await engine.close()


async def play(generator: GymGenerator, *seeds: int, env_class: str = "pictures") -> list[Trajectory]:
    """Play an episode with the pictures of each seed: three turns, whose replies have one token."""
    requests = [
        RolloutRequest(
            TrajectoryID(str(seed), 0, draw=seed),
            PromptRow(str(seed), [system("Look.")], env_class, {"extra_info": {"seed": seed}}),
        )
        for seed in seeds
    ]
    trajectories = await generator.rollout(requests, SamplingParams(max_new_tokens=1), BatchMetadata(1, "train"))
    assert [t.error for t in trajectories] == [None] * len(seeds)
    return trajectories


async def test_a_retried_rollout_has_the_images_of_its_own_attempt(tmp_path: Path) -> None:
    async with open_generator(tmp_path) as generator:
        (retried,) = await play(generator, 7, env_class="fragile_pictures")
        (expected,) = await play(generator, 7)
    assert (retried.n_attempts, expected.n_attempts) == (2, 1)
    assert retried.segments == expected.segments
    shown = [span.image for span in retried.segments[0].images]
    assert shown == [read_image(picture(seed)) for seed in (70, 71, 72)]


def count_objects() -> tuple[int, int, int]:
    """Return the number of images, of tensors, and of all blocks of memory that Python objects take."""
    gc.collect()
    kinds = [type(value) for value in gc.get_objects()]
    return kinds.count(EncodedImage), kinds.count(torch.Tensor), sys.getallocatedblocks()


async def measure_growth(folder: Path) -> tuple[int, int, int]:
    """Play with 1,000 images, and return the images that are kept, and how many tensors and blocks were added."""
    n_images, n_tensors, n_blocks = 0, 0, 0
    async with open_generator(folder) as generator:
        while n_images < N_IMAGES:
            if not n_blocks and n_images >= N_WARM_UP:
                _, n_tensors, n_blocks = count_objects()
            trajectories = await play(generator, *range(n_images, n_images + 32))
            n_images += sum(len(t.segments[0].images) for t in trajectories)
            del trajectories
        n_kept_images, n_tensors_after, n_blocks_after = count_objects()
    return n_kept_images, n_tensors_after - n_tensors, n_blocks_after - n_blocks


def test_memory_stays_flat_with_new_images(tmp_path: Path) -> None:
    """The caches reach their limits, which are lowered, and nothing else keeps an object per image.

    Measured in a process of its own, because tests before this one leave threads, caches and images behind.
    """
    run_python(__file__, str(tmp_path), env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    n_kept_images, n_new_tensors, n_new_blocks = json.loads((tmp_path / "growth.json").read_text())
    assert n_kept_images == 0
    assert n_new_tensors < 10
    assert n_new_blocks < MAX_GROWTH


if __name__ == "__main__":
    with (
        mock.patch("skyrl_train.media.processing.CACHED_BYTES", 2**18),
        mock.patch("skyrl_train.media.processing.CACHED_TOKENS", 2**10),
        mock.patch("skyrl_train.models.vision.CACHED_BYTES", 2**14),
        mock.patch("skyrl_train.generators.chat_template.CACHED_TOKENS", 2**10),
    ):
        growth = asyncio.run(measure_growth(Path(sys.argv[1])))
    (Path(sys.argv[1]) / "growth.json").write_text(json.dumps(growth))
