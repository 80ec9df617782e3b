"""Merge models into one Hugging Face folder: an adapter into its base, a run's checkpoint, an average of models.

Tensors are read, changed and written one at a time. Then the merged model is loaded and its logits are compared with
its sources' logits before the folder gets its name. After an error, no files are left behind.
"""

from skyrl_train.checkpoint.merge.adapter import merge_adapter
from skyrl_train.checkpoint.merge.average import average_models
from skyrl_train.checkpoint.merge.comparison import MergeReport
from skyrl_train.checkpoint.merge.sharded import merge_checkpoint
