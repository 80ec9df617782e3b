"""SkyRL-train: reinforcement learning for language-model agents."""

import sys

from skyrl_train.absent import AbsentModules

sys.meta_path.append(AbsentModules())  # asked last, for modules that do not exist
