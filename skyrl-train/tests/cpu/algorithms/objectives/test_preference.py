import copy
from dataclasses import replace

import pytest
import torch
from train_kit.trajectories import make_trajectory
from train_kit.workers import SingleRankGroup, config
from transformers import PreTrainedModel

from skyrl_train.algorithms.objectives import PreferenceObjective
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.types import TrainingBatch

BETA = 0.5
PROMPT, A, B = [5, 9, 2], [7, 7, 4], [8, 3]


def pairs(*chosen_first: tuple[list[int], list[int]]) -> TrainingBatch:
    """Return a row for each answer to the prompt, chosen and rejected in turn."""
    answers = [
        make_trajectory(str(draw), [0.0] * len(answer), prompt_ids=PROMPT, response_ids=answer)
        for draw, pair in enumerate(chosen_first)
        for answer in pair
    ]
    return build_training_batch(answers, pad_token_id=0)


def answer_logprob(model: PreTrainedModel, answer: list[int]) -> torch.Tensor:
    logprobs = model(input_ids=torch.tensor([PROMPT + answer]), use_cache=False).logits[0].log_softmax(dim=-1)
    return torch.stack([logprobs[len(PROMPT) - 1 + i, token] for i, token in enumerate(answer)]).sum()


@pytest.mark.parametrize("split", [{}, {"micro_train_batch_size_per_gpu": 1}, {"micro_train_batch_size_per_gpu": 2}])
def test_loss_and_gradient_are_those_of_the_formula(tiny_model: PreTrainedModel, split: dict[str, int]) -> None:
    batch = pairs((A, B), (B, A), (A, B))
    noise = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(0))
    batch = replace(batch, ref_logprobs=noise * batch.loss_mask)
    naive = copy.deepcopy(tiny_model)
    answers = (A, B, B, A, A, B)
    ratios = [answer_logprob(naive, answer) - noise[i, : len(answer)].sum() for i, answer in enumerate(answers)]
    losses = [-torch.nn.functional.logsigmoid(BETA * (ratios[i] - ratios[i + 1])) for i in (0, 2, 4)]
    expected = torch.stack(losses).mean()
    expected.backward()

    cfg = config(**split, algorithm={"temperature": 1.0}).trainer
    worker = SingleRankGroup("policy", copy.deepcopy(tiny_model), cfg, PreferenceObjective(BETA))
    metrics = worker.forward_backward(batch)
    assert metrics["policy/loss"] == pytest.approx(expected.item(), abs=1e-6)
    for (name, ours), theirs in zip(worker.model.named_parameters(), naive.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-6, rtol=1e-5, msg=name)
