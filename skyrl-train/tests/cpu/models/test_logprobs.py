import copy

import pytest
import torch
from transformers import PreTrainedModel

from skyrl_train.models import logprobs as logprobs_module
from skyrl_train.models.logprobs import TokenScores, chosen_logprobs, lm_head_logits, response_logprobs

PROMPT_LENGTHS = [4, 1, 6, 3]
RESPONSE_MASKS = [
    [1, 1, 0, 0, 1],
    [1],
    [0, 1, 1],
    [0, 0],
]  # a gap is an observation; the last row has no trained tokens
N_PROMPT, N_RESPONSE = 7, 6  # wider than any row: padding on both sides
PAD_ID = 0

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Sequences (4, 13), attention mask (4, 13) and loss mask (4, 6)."""
    generator = torch.Generator().manual_seed(1)
    n_rows = len(PROMPT_LENGTHS)
    sequences = torch.full((n_rows, N_PROMPT + N_RESPONSE), PAD_ID)
    attention_mask = torch.zeros_like(sequences)
    loss_mask = torch.zeros(n_rows, N_RESPONSE)
    for row, (n_prompt, mask) in enumerate(zip(PROMPT_LENGTHS, RESPONSE_MASKS, strict=True)):
        columns = slice(N_PROMPT - n_prompt, N_PROMPT + len(mask))
        n_tokens = n_prompt + len(mask)
        sequences[row, columns] = torch.randint(1, 61, (n_tokens,), generator=generator)
        attention_mask[row, columns] = 1
        loss_mask[row, : len(mask)] = torch.tensor(mask)
    return sequences, attention_mask, loss_mask


def naive(model: PreTrainedModel, batch: Batch, temperature: float) -> TokenScores:
    """Score row by row, without padding, from the logits of every position."""
    sequences, attention_mask, loss_mask = batch
    logprobs, entropies, sum_pi_squared = (torch.zeros_like(loss_mask) for _ in range(3))
    for row in range(len(sequences)):
        token_ids = sequences[row][attention_mask[row].bool()]
        n_prompt = int(attention_mask[row, :N_PROMPT].sum())
        logits = model(input_ids=token_ids[None], use_cache=False).logits[0] / temperature
        for column in loss_mask[row].nonzero()[:, 0].tolist():
            position = n_prompt + column
            distribution = torch.distributions.Categorical(logits=logits[position - 1])
            logprobs[row, column] = distribution.log_prob(token_ids[position])
            entropies[row, column] = distribution.entropy()
            sum_pi_squared[row, column] = (distribution.probs**2).sum().detach()
    return TokenScores(logprobs, entropies, sum_pi_squared)


@torch.no_grad()
def assert_naive_scores(model: PreTrainedModel, batch: Batch, temperature: float) -> None:
    scores = response_logprobs(model, *batch, temperature)
    torch.testing.assert_close(scores, naive(model, batch, temperature))
    for values in scores:
        assert (values[batch[2] == 0] == 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_equal_those_of_a_naive_loop(tiny_model: PreTrainedModel, batch: Batch, temperature: float) -> None:
    assert_naive_scores(tiny_model, batch, temperature)


def test_scores_of_other_architectures_equal_those_of_a_naive_loop(other_model: PreTrainedModel, batch: Batch) -> None:
    assert_naive_scores(other_model, batch, 0.8)


def test_gradients_equal_those_of_a_naive_loop(tiny_model: PreTrainedModel, batch: Batch) -> None:
    gradients = []
    for score in (
        lambda model: response_logprobs(model, *batch, 0.6, entropy_grad=True),
        lambda model: naive(model, batch, 0.6),
    ):
        model = copy.deepcopy(tiny_model)
        logprobs, entropy, _ = score(model)
        weights = torch.linspace(-1, 1, logprobs.numel()).reshape(logprobs.shape)
        (weights * logprobs + 0.3 * entropy).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1])


def test_chunks_change_neither_values_nor_gradients(
    tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(11, tiny_model.config.hidden_size, generator=generator)
    token_ids = torch.randint(61, (11,), generator=generator)
    max_logits = 0

    def counting_lm_head_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        nonlocal max_logits
        logits = lm_head_logits(model, hidden)
        max_logits = max(max_logits, logits.numel())
        return logits

    def score() -> tuple[torch.Tensor, ...]:
        leaf = hidden.clone().requires_grad_()
        logprobs, entropies, _ = chosen_logprobs(tiny_model, leaf, token_ids, 0.7, entropy_grad=True)
        head = tiny_model.get_output_embeddings().weight
        gradients = torch.autograd.grad((logprobs * torch.arange(11) + entropies).sum(), [leaf, head])
        return (logprobs.detach(), entropies.detach(), *gradients)

    monkeypatch.setattr(logprobs_module, "_is_linear", lambda head: False)  # the path of heads with an adapter
    monkeypatch.setattr(logprobs_module, "lm_head_logits", counting_lm_head_logits)
    whole = score()
    assert max_logits == 11 * tiny_model.config.vocab_size
    monkeypatch.setattr(logprobs_module, "CHUNK_LOGITS", 4 * tiny_model.config.vocab_size + 1)
    max_logits = 0
    torch.testing.assert_close(score(), whole)
    assert max_logits == 4 * tiny_model.config.vocab_size
    monkeypatch.setattr(logprobs_module, "CHUNK_LOGITS", 7)  # less than the logits of one position
    torch.testing.assert_close(score(), whole)


def test_logits_are_not_kept_between_the_forward_and_the_backward_pass(
    tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "CHUNK_LOGITS", 4 * tiny_model.config.vocab_size)
    hidden = torch.randn(11, tiny_model.config.hidden_size, requires_grad=True)
    saved_shapes: list[torch.Size] = []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        saved_shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        scores = chosen_logprobs(tiny_model, hidden, torch.arange(11), 1.0, entropy_grad=True)
    assert not [shape for shape in saved_shapes if shape[-1:] == (tiny_model.config.vocab_size,)]
    (scores.logprobs + scores.entropy).sum().backward()
    assert hidden.grad is not None


def test_scores_without_trained_tokens_are_zero(tiny_model: PreTrainedModel, batch: Batch) -> None:
    sequences, attention_mask, loss_mask = batch
    logprobs, entropy, _ = response_logprobs(tiny_model, sequences, attention_mask, torch.zeros_like(loss_mask), 1.0)
    assert logprobs.shape == entropy.shape == loss_mask.shape
    assert not logprobs.any()
    assert not entropy.any()


def test_logits_are_computed_in_float32_under_autocast_and_in_bfloat16(tiny_model: PreTrainedModel) -> None:
    hidden = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    expected = hidden @ tiny_model.lm_head.weight.detach().T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = lm_head_logits(tiny_model, hidden)
        assert tiny_model.lm_head(hidden).dtype == torch.bfloat16, "the head alone would round to bfloat16"
    assert under_autocast.dtype == torch.float32
    torch.testing.assert_close(under_autocast, expected)
    half = copy.deepcopy(tiny_model).to(torch.bfloat16)
    exact = hidden.bfloat16().double() @ half.lm_head.weight.detach().double().T
    torch.testing.assert_close(lm_head_logits(half, hidden.bfloat16()).double(), exact, rtol=1e-5, atol=1e-5)


def test_an_adapter_on_the_head_changes_the_logits(tiny_model: PreTrainedModel) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = copy.deepcopy(tiny_model).to(dtype)
        hidden = torch.ones(2, 64, dtype=dtype)
        plain = lm_head_logits(model, hidden)
        model.lm_head.register_forward_hook(lambda module, inputs, output: output + 1)
        assert lm_head_logits(model, hidden)[0, 0] > plain[0, 0] + 0.5
