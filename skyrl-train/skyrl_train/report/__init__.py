"""The report page and the learning curves of a run."""

from skyrl_train.report.learning_curve import compare_curves, plot_learning_curve
from skyrl_train.report.page import report_own_run, report_run, write_report
