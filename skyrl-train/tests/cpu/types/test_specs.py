import pytest

from skyrl_train.config.policy import MegatronConfig
from skyrl_train.errors import ConfigError
from skyrl_train.types.specs import Layout, ModelSpec


def test_ranks_of_a_group_compute_the_same_rows() -> None:
    layout = Layout(8, tensor_size=2, n_stages=2)
    assert layout.data_parallel_size == 2
    assert [layout.data_parallel_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.leader(i) for i in range(2)] == [4, 6], "the last stage has the scores"


def test_context_ranks_compute_the_same_rows() -> None:
    layout = Layout(16, tensor_size=2, n_stages=2, context_size=2)
    assert layout.data_parallel_size == 2
    assert [layout.data_parallel_rank(rank) for rank in range(16)] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
    assert [layout.leader(i) for i in range(2)] == [8, 12]


def test_every_rank_of_a_sharded_model_has_its_own_rows() -> None:
    layout = Layout(3)
    assert [layout.data_parallel_rank(rank) for rank in range(3)] == [layout.leader(i) for i in range(3)] == [0, 1, 2]


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
