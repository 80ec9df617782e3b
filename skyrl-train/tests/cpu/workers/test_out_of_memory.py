"""Passes that run out of memory."""

import asyncio
import copy
import logging
import multiprocessing
import subprocess
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit.batches import random_batch
from train_kit.processes import TRAIN_FOLDER, python
from train_kit.ranks import close, load_policy
from train_kit.shortages import SHORTAGES, limit_tokens
from train_kit.workers import SingleRankGroup, complete, gradients, make_worker
from transformers import PreTrainedModel

from skyrl_train.distributed import FSDP2Strategy
from skyrl_train.errors import OutOfMemoryError, WorkerError
from skyrl_train.launch.process import ProcessRank, RankHost
from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.types.specs import World
from skyrl_train.weight_sync.sync import free_port

LORA = {"model": {"lora": {"rank": 4}}}
ROWS = {"n_prompts": 4, "n_samples": 2}


def results(worker: SingleRankGroup) -> list[Any]:
    """Return everything that an update on several batches computes, with the random state after it."""
    torch.manual_seed(0)
    found: list[Any] = []
    for seed in range(2):
        rows = random_batch(seed, **ROWS)
        found += [worker.score(rows)["logprobs"], worker.forward_backward(rows)]
        found += [p.grad.clone() for p in worker.model.parameters() if p.grad is not None]
        found.append(complete(worker.group.optim_step()).numbers())
    return [*found, torch.get_rng_state()]


@pytest.mark.parametrize("section", [{}, LORA, {"optimizer_config": {"cpu_offload": True}}])
@pytest.mark.parametrize(("kind", "backward"), [("cuda", False), ("cpu", False), ("numpy", False), ("cpu", True)])
def test_a_retry_computes_what_the_smaller_budget_computes(
    section: dict[str, Any],
    kind: str,
    backward: bool,
    policy: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    retried = make_worker(copy.deepcopy(policy), policy=section)
    with monkeypatch.context() as patch:
        limit_tokens(patch, 40, kind, backward=backward)
        if backward:
            retried.forward_backward(random_batch(0, **ROWS))  # a forward pass alone would keep the larger budget
            retried.optimizer.zero_grad()
        found = results(retried)
    budget = retried.group.reduced_max_tokens
    assert budget is not None
    assert 10 < budget <= 40
    assert f"Set trainer.max_tokens_per_microbatch={budget} to start with them" in caplog.text
    assert [r.levelno for r in caplog.records if "is retried" in r.message].count(logging.WARNING) == 2
    expected = results(make_worker(policy, policy=section, max_tokens_per_microbatch=budget))
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def test_a_row_that_does_not_fit_alone_ends_the_pass_without_gradients(
    policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, rows = make_worker(policy), random_batch(0)
    expected = gradients(make_worker(copy.deepcopy(policy)), rows)
    longest = int(rows.attention_mask.sum(dim=1).max())
    with monkeypatch.context() as patch:
        limit_tokens(patch, longest - 1)
        with pytest.raises(OutOfMemoryError) as error:
            worker.forward_backward(rows)
    message = str(error.value)
    assert message.startswith("the policy ran out of memory during forward_backward (peak ")
    assert f"Its largest micro-batch had {longest} tokens in 1 row, and a micro-batch cannot be smaller" in message
    assert error.value.stage == "forward_backward"
    assert all(p.grad is None for p in policy.parameters())
    found = gradients(worker, rows)
    assert all(torch.allclose(found[name], gradient, atol=1e-6) for name, gradient in expected.items())


def test_gradients_of_an_earlier_mini_batch_are_never_dropped_silently(
    policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(policy)
    worker.forward_backward(random_batch(0))
    limit_tokens(monkeypatch, 20)
    with pytest.raises(OutOfMemoryError, match=r"so set trainer\.max_tokens_per_microbatch=\d+ or less"):
        worker.forward_backward(random_batch(1))


def test_the_failed_pass_holds_no_memory_while_it_is_retried(
    policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, forward = make_worker(policy), ScoringModule.forward
    alive: list[weakref.ref[torch.Tensor]] = []

    def limited(self: ScoringModule, rows: Any) -> Any:
        activations = torch.zeros(1000)
        assert all(other() is None for other in alive), "the failed pass still holds its activations"
        alive.append(weakref.ref(activations))
        if len(alive) == 1:
            shortage = SHORTAGES["cpu"]()  # with this variable, its traceback is a reference cycle
            raise shortage
        return forward(self, rows)

    monkeypatch.setattr(ScoringModule, "forward", limited)
    worker.forward_backward(random_batch(0))


def serve_exhausted(connection: Connection, world: World, address: str) -> None:
    """Serve a rank. Copies for checkpoints and the second mini-batch run out of memory on rank 1."""
    run, n_passes = FSDP2Strategy.run, 0

    def run_once(self: FSDP2Strategy, *args: Any) -> Any:
        nonlocal n_passes
        n_passes += 1
        return run(self, *args) if n_passes == 1 else exhaust()

    def exhaust(*_: object) -> None:
        raise SHORTAGES["cuda"]()

    if world.rank == 1:
        FSDP2Strategy.copy = exhaust  # type: ignore[assignment, method-assign]
        FSDP2Strategy.run = run_once  # type: ignore[assignment, method-assign]
    RankHost(world, address, 1).serve(connection)


@pytest.mark.usefixtures("forked_processes")
async def test_one_of_two_ranks_without_memory(tiny_model_path: Path, tmp_path: Path) -> None:
    """Ranks agree that a checkpoint is not saved and continue. In a pass, they wait for each other, so the run ends."""
    context, address = multiprocessing.get_context("spawn"), f"tcp://127.0.0.1:{free_port()}"
    ranks = []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve_exhausted, args=(theirs, World(rank, 2), address), daemon=True)
        process.start()
        theirs.close()
        ranks.append(ProcessRank(rank, ours, process))
    try:
        async with asyncio.timeout(30):
            group = await load_policy(ranks, tiny_model_path)
            for _ in range(2):  # the second save would wait for the first
                with pytest.raises(OSError, match="host memory has no room for a copy of the policy"):
                    await group.save(tmp_path)
            assert list(tmp_path.iterdir()) == []
            await group.update(random_batch(0))
            with pytest.raises(OutOfMemoryError, match=r"so set trainer\.max_tokens_per_microbatch=\d+ or less"):
                await group.forward_backward(random_batch(0))
            with pytest.raises(WorkerError, match="the policy is unusable after OutOfMemoryError"):
                await group.save(tmp_path)
    finally:
        for rank in ranks:
            rank._process.kill()  # rank 0 waits for rank 1
        await close(ranks)


PROGRAM = """
import logging, resource, sys
import psutil, torch
from train_kit.batches import random_batch
from train_kit.models import load_on_cpu
from train_kit.workers import make_worker

logging.basicConfig(level=logging.WARNING)
torch.set_num_threads(1)
worker = make_worker(load_on_cpu(sys.argv[1]), max_tokens_per_microbatch=1 << 20)
worker.update(random_batch(0))  # allocates gradients and moments
rows = random_batch(1, n_prompts=800, n_samples=2)
used = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]), -1))
worker.update(rows)
print("trained with", worker.group.reduced_max_tokens)
"""


def test_a_process_with_a_limit_trains_with_smaller_micro_batches(tiny_model_path: Path) -> None:
    """The allocator itself runs out of memory."""
    limited, unlimited = (
        subprocess.run(
            [python(), "-c", PROGRAM, str(tiny_model_path), str(n_bytes)],
            cwd=TRAIN_FOLDER,
            capture_output=True,
            text=True,
            timeout=120,
        )
        for n_bytes in (100 << 20, 1 << 36)
    )
    assert "trained with None" in unlimited.stdout, unlimited.stderr
    assert "can't allocate memory" in limited.stderr
    assert 0 < int(limited.stdout.split()[-1]) < 1 << 15, limited.stderr
