"""Names that SkyRL's scripts import from this module."""

from skyrl_train.compat.skyrl.trainer_utils import ResumeMode as ResumeMode
from skyrl_train.compat.skyrl.trainer_utils import validate_generator_output as validate_generator_output
from skyrl_train.compat.skyrl.trainer_utils import zero_variance_filter as zero_variance_filter
