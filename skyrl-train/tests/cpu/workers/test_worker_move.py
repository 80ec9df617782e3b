"""A worker whose model moves to host memory and back."""

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit.batches import random_batch
from train_kit.workers import SingleRankGroup, complete, make_worker
from transformers import PreTrainedModel

from skyrl_train.errors import WorkerError
from skyrl_train.workers.worker import REQUIRED_PARTS, Worker

LORA = {"model": {"lora": {"rank": 4}}}


def memory(worker: SingleRankGroup) -> dict[str, int]:
    """Return the bytes on the device of the weights, and of gradients and optimizer state."""
    moments = [value for values in worker.optimizer.state.values() for value in values.values()]
    gradients = [p.grad for p in worker.model.parameters() if p.grad is not None]
    parts = {"weights": [*worker.model.parameters(), *worker.model.buffers()], "optimizer": [*moments, *gradients]}
    return {part: sum(tensor.untyped_storage().nbytes() for tensor in tensors) for part, tensors in parts.items()}


@pytest.mark.parametrize("section", [{}, LORA])
def test_training_with_moves_is_training_without(
    section: dict[str, Any], policy: PreTrainedModel, tmp_path: Path
) -> None:
    policy.config.tie_word_embeddings = True
    policy.tie_weights()
    stationary = make_worker(copy.deepcopy(policy), policy=section)
    moved = make_worker(policy, policy=section)
    for seed in range(3):
        rows = random_batch(seed)
        complete(moved.group.move("cpu", "optimizer"))
        scores = [worker.score(rows)["logprobs"] for worker in (stationary, moved)]
        assert torch.equal(*scores)
        complete(moved.group.move("device"))
        assert stationary.forward_backward(rows) == moved.forward_backward(rows)
        complete(moved.group.move("cpu"))  # with gradients
        assert memory(moved) == {"weights": 0, "optimizer": 0}
        complete(moved.group.move("device"))
        steps = [complete(worker.group.optim_step()).numbers() for worker in (stationary, moved)]
        assert steps[0] == steps[1]
    assert policy.lm_head.weight is policy.get_input_embeddings().weight
    for name, worker in (("stationary", stationary), ("moved", moved)):
        worker.save(tmp_path / name)
    contents = [(tmp_path / name / "__0_0.distcp").read_bytes() for name in ("stationary", "moved")]
    assert contents[0] == contents[1]


def test_parts_move_separately(policy: PreTrainedModel) -> None:
    worker = make_worker(policy)
    worker.update(random_batch(0))
    full = memory(worker)
    assert full["optimizer"] > full["weights"]
    for to, part, expected in (
        ("cpu", "optimizer", {"optimizer": 0}),
        ("cpu", "all", {"optimizer": 0, "weights": 0}),
        ("cpu", "all", {"optimizer": 0, "weights": 0}),
        ("device", "weights", {"optimizer": 0}),
        ("device", "all", {}),
    ):
        complete(worker.group.move(to, part))  # type: ignore[arg-type]
        assert memory(worker) == full | expected


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_a_call_that_needs_a_part_in_host_memory_is_an_error(part: str, policy: PreTrainedModel) -> None:
    worker = make_worker(policy)
    worker.update(random_batch(0))
    complete(worker.group.move("cpu", part))  # type: ignore[arg-type]
    for method, needed in REQUIRED_PARTS.items():
        function = getattr(worker.worker, method)
        if needed not in (part, "all"):
            continue
        arguments = [None] * len(inspect.signature(function).parameters)
        with pytest.raises(WorkerError, match=rf"{method} cannot run while the policy has its {part} in host memory"):
            function(*arguments)


def test_every_method_names_the_part_that_it_needs() -> None:
    untouched = {"close", "facts", "finish_save", "is_written", "move", "tensor_specs"}
    public = {name for name, value in vars(Worker).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert public - REQUIRED_PARTS.keys() == untouched
