"""Names that SkyRL's scripts import from this module."""

from skyrl_train.compat.skyrl.generator import GeneratorInput as GeneratorInput
from skyrl_train.compat.skyrl.generator import GeneratorOutput as GeneratorOutput
from skyrl_train.compat.skyrl.generator import SkyRLGymGenerator as SkyRLGymGenerator
