"""The resident memory of long runs: `docs/internals/processes.md` has the figures."""

import psutil
import pytest
from train_kit.processes import find_descendants
from train_kit.runs import AtStepEnd, train_with

N_STEPS = 1000
WARM_UP = N_STEPS // 5
"""Steps until allocators and caches have reached their size."""

INTERVAL = N_STEPS // 20
MAX_GROWTH = 8 << 20
"""Maximum growth of a process from the end of the warm-up to the end of the run, in bytes."""

SMALLEST = [
    "trainer.train_batch_size=2",
    "trainer.policy_mini_batch_size=2",
    "generator.n_samples_per_prompt=2",
    "generator.max_turns=2",
    "trainer.eval_interval=-1",
    "trainer.ckpt_interval=100",
    "trainer.max_ckpts_to_keep=1",
    f"trainer.epochs={N_STEPS}",
    f"trainer.max_training_steps={N_STEPS}",
]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("is_async", [False, True])
def test_the_memory_of_a_run_does_not_grow_with_its_steps(catch_run: list[str], is_async: bool) -> None:
    used: dict[int, dict[str, int]] = {}  # resident bytes by step and process

    def measure(_: object, step: int) -> None:
        if step % INTERVAL == 0:
            processes = [psutil.Process(), *find_descendants("spawn_main")]
            used[step] = dict(zip(("driver", "engine"), (p.memory_info().rss for p in processes), strict=False))

    train_with(*catch_run, *SMALLEST, f"trainer.fully_async.enabled={is_async}", last=[AtStepEnd(measure)])
    curves = {name: {step: round(sizes[name] / 1e6) for step, sizes in used.items() if step} for name in used[N_STEPS]}
    assert set(curves) == ({"driver", "engine"} if is_async else {"driver"})
    for name in curves:
        assert used[N_STEPS][name] - used[WARM_UP][name] < MAX_GROWTH, curves
