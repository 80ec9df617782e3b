"""Names that SkyRL's scripts import from this module."""

from skyrl_train.compat.skyrl.batch import (
    convert_prompts_responses_to_batch_tensors as convert_prompts_responses_to_batch_tensors,
)
