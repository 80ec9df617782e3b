"""Metrics, progress line and run folder."""

from skyrl_train.tracking.jsonl import MetricsFile, read_metrics
from skyrl_train.tracking.progress import Progress
from skyrl_train.tracking.run_folder import RunFolder, log_to_file
from skyrl_train.tracking.signal import find_missing_signal
from skyrl_train.tracking.tracker import Tracker, Tracking
