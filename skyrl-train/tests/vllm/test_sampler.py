"""Choices survive the transfer through vLLM."""

from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.inference_engines.sampling import SampledToken
from skyrl_train.inference_engines.vllm.sampler import from_columns, to_columns

TOKEN_IDS = st.integers(0, 2**31 - 1)
LOGPROBS = st.floats(-1e6, 0, width=32) | st.just(-float("inf"))
CHOICES = st.builds(
    SampledToken,
    TOKEN_IDS,
    LOGPROBS,
    st.none() | LOGPROBS,
    st.none() | st.dictionaries(TOKEN_IDS, LOGPROBS, min_size=1, max_size=5),
)


@given(st.lists(CHOICES, min_size=1, max_size=6))
def test_packed_choices_are_unpacked_unchanged(choices: list[SampledToken]) -> None:
    columns = to_columns(choices).tolists()
    assert from_columns(columns) == choices
    assert [from_columns(columns.slice_request(row, 1)) for row in range(len(choices))] == [[c] for c in choices]
