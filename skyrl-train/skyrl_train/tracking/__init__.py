"""Metrics, progress line and the run folder's log."""

from skyrl_train.tracking.jsonl import MetricsFile
from skyrl_train.tracking.progress import Progress
from skyrl_train.tracking.run_folder import create_run_folder, log_to_file
from skyrl_train.tracking.tracker import Tracker, Tracking
