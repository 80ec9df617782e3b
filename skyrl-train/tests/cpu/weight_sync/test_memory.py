from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.weight_sync.memory import decode_handle, encode_handle


@given(st.lists(st.binary(max_size=70) | st.integers(0, 2**63) | st.booleans(), max_size=9))
def test_handles_survive_their_text(fields: list[bytes | int | bool]) -> None:
    found = decode_handle(encode_handle(fields))
    assert found == fields
    assert [type(x) for x in found] == [type(x) for x in fields]
