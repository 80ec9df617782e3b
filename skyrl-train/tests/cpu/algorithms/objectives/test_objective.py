import copy

import torch
from train_kit.workers import TEMPERATURE, SingleRankGroup, config, largest_difference, rounding_tolerance
from transformers import PreTrainedModel

from skyrl_train.algorithms.objectives import CrossEntropyObjective
from skyrl_train.types import TrainingBatch

ROWS = [([5, 9, 2], [7, 7, 4]), ([3], [8]), ([6, 6], [9, 5, 3, 4, 2])]  # prompt, answer


def supervised_batch() -> TrainingBatch:
    """Return the rows, prompts padded on the left, answers on the right, with the answers trained."""
    n_prompt, n_answer = (max(len(row[part]) for row in ROWS) for part in (0, 1))
    left, right = ([n - len(row[part]) for row in ROWS] for part, n in ((0, n_prompt), (1, n_answer)))
    pairs = list(zip(ROWS, left, right, strict=True))
    return TrainingBatch(
        sequences=torch.tensor([[0] * n + prompt + answer + [0] * m for (prompt, answer), n, m in pairs]),
        attention_mask=torch.tensor(
            [[0] * n + [1] * len(prompt + answer) + [0] * m for (prompt, answer), n, m in pairs]
        ),
        loss_mask=torch.tensor([[1.0] * len(answer) + [0.0] * m for (_, answer), _, m in pairs]),
        draws=torch.arange(len(ROWS)),
    )


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
