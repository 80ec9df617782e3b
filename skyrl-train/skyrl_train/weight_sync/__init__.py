"""Transfer new weights from the policy to engines and to the reference."""

from skyrl_train.weight_sync.base import Receipt, SyncPlan
from skyrl_train.weight_sync.mirror import MirroredReceiver, WeightMirror
from skyrl_train.weight_sync.sync import SyncOptions, WeightSink, WeightSource, WeightSync
from skyrl_train.weight_sync.transfer import Receiver, send
