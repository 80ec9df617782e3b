import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples.catch.prompt import format_state, parse_state
from skyrl_train.entrypoints.tiny import tiny_qwen3


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_survives_a_round_trip(tiny_tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_are_single_tokens_and_fixed_wording_is_short(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    state = format_state(parse_state("State: grid_w=7, grid_h=6, ball=(5,0), paddle_x=2, turns_left=5."))
    tokens = tiny_tokenizer.convert_ids_to_tokens(tiny_tokenizer.encode(state, add_special_tokens=False))
    assert [token for token in tokens if any(c.isdigit() for c in token)] == ["7", "6", "5", "0", "2", "5"]
    assert len(tokens) < 20


def test_weights_depend_on_the_seed_only(tiny_tokenizer: PreTrainedTokenizerBase, tiny_model: PreTrainedModel) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    same, other = (tiny_qwen3(tiny_tokenizer, seed=seed) for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(same.lm_head.weight, tiny_model.lm_head.weight)
    assert not torch.equal(other.lm_head.weight, tiny_model.lm_head.weight)
    assert same.num_parameters() < 300_000
