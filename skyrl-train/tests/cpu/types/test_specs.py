import pytest

from skyrl_train.config.policy import MegatronConfig
from skyrl_train.errors import ConfigError
from skyrl_train.types.specs import Layout, ModelSpec


@pytest.mark.parametrize(
    ("layout", "data_parallel_ranks", "leaders"),  # the last stage has the scores
    [
        (Layout(3), [0, 1, 2], [0, 1, 2]),
        (Layout(8, tensor_size=2, n_stages=2), [0, 0, 1, 1, 0, 0, 1, 1], [4, 6]),
        (Layout(16, tensor_size=2, n_stages=2, context_size=2), ([0] * 4 + [1] * 4) * 2, [8, 12]),
    ],
)
def test_ranks_of_a_group_compute_the_same_rows(
    layout: Layout, data_parallel_ranks: list[int], leaders: list[int]
) -> None:
    assert layout.data_parallel_size == len(leaders)
    assert [layout.data_parallel_rank(rank) for rank in range(layout.n_ranks)] == data_parallel_ranks
    assert [layout.leader(i) for i in range(len(leaders))] == leaders


def test_ranks_that_the_sizes_of_megatron_do_not_divide_are_refused() -> None:
    megatron = MegatronConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    spec = ModelSpec("ref", load=dict, save_tokenizer=print, megatron=megatron)
    assert spec.layout(8) == Layout(8, 2, 2)
    assert spec.layout(1) == Layout(1), "a single rank has the whole model"
    with pytest.raises(
        ConfigError, match=r"trainer\.ref\..*_size=2 times .*_size=2 must divide the 6 ranks of the ref; start 8"
    ):
        spec.layout(6)
    divided = ModelSpec("ref", load=dict, save_tokenizer=print, megatron=MegatronConfig(context_parallel_size=4))
    assert divided.layout(8) == Layout(8, context_size=4)
    with pytest.raises(ConfigError, match=r"megatron_config\.context_parallel_size=4 must divide the 6 ranks of the"):
        divided.layout(6)
