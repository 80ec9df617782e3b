import copy

import torch
from train_kit.trajectories import make_trajectory
from train_kit.workers import TEMPERATURE, SingleRankGroup, config, largest_difference, rounding_tolerance
from transformers import PreTrainedModel

from skyrl_train.algorithms.objectives import CrossEntropyObjective
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.types import TrainingBatch

ROWS = [([5, 9, 2], [7, 7, 4]), ([3], [8]), ([6, 6], [9, 5, 3, 4, 2])]  # prompt, answer


def supervised_batch() -> TrainingBatch:
    """Return the rows, prompts padded on the left, answers on the right, with the answers trained."""
    answers = [
        make_trajectory(str(i), [0.0] * len(answer), prompt_ids=prompt, response_ids=answer)
        for i, (prompt, answer) in enumerate(ROWS)
    ]
    return build_training_batch(answers, pad_token_id=0)


def test_the_gradient_is_that_of_the_mean_cross_entropy_over_answer_tokens(tiny_model: PreTrainedModel) -> None:
    token_losses = []
    naive = copy.deepcopy(tiny_model)
    for prompt, answer in ROWS:
        logits = naive(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
        predictions = logits[len(prompt) - 1 : -1] / TEMPERATURE
        token_losses.append(torch.nn.functional.cross_entropy(predictions, torch.tensor(answer), reduction="none"))
    expected = torch.cat(token_losses).mean()
    expected.backward()

    for split in ({}, {"micro_train_batch_size_per_gpu": 1}):
        worker = SingleRankGroup("policy", copy.deepcopy(tiny_model), config(**split).trainer, CrossEntropyObjective())
        metrics = worker.forward_backward(supervised_batch())
        torch.testing.assert_close(torch.tensor(metrics["policy/loss"]), expected.detach())
        ours = {name: p.grad for name, p in worker.model.named_parameters() if p.grad is not None}
        theirs = {name: p.grad for name, p in naive.named_parameters() if p.grad is not None}
        assert largest_difference(ours, theirs) < rounding_tolerance(theirs)
