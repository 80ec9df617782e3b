import pytest

pytest.register_assert_rewrite("adapters.openenv_contract")
