import pytest
import torch

from skyrl_train.optimizers.block_quantization import dequantize, quantization_table, quantize


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("n", [20, 256, 600])  # a short block, a whole one, and an incomplete third one
def test_every_value_gets_the_nearest_code_of_its_block(is_signed: bool, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    values = 10 ** (-8 * torch.rand(7, n, generator=generator))
    if is_signed:
        values *= torch.randn(7, n, generator=generator).sign()
    values[2] = 0
    table = quantization_table(is_signed, values.device).values
    assert len(set(table.tolist())) == 256
    codes, scales = quantize(values, is_signed=is_signed)
    restored = dequantize(codes, scales, is_signed=is_signed)
    for start in range(0, n, 256):
        block = values[:, start : start + 256]
        scale = block.abs().amax(1, keepdim=True)
        scaled = block / scale.clamp_min(1e-30)
        nearest = table[(scaled[..., None] - table).abs().argmin(-1)]
        if not is_signed:
            nearest = torch.where((nearest == 0) & (scaled > 0), table[1], nearest)  # AdamW divides by the root
        torch.testing.assert_close(restored[:, start : start + 256], nearest * scale, rtol=1e-6, atol=1e-12)


def test_a_table_has_half_as_many_values_in_each_smaller_decade() -> None:
    for is_signed, n_largest in ((True, 64), (False, 128)):
        values = quantization_table(is_signed, torch.device("cpu")).values
        counts = [int(((values > 10.0**-k / 10) & (values < 10.0**-k)).sum()) for k in range(7)]
        assert counts == [n_largest >> k for k in range(7)]
        assert values[-1] == 1
