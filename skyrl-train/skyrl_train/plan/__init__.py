"""What runs where, derived from the configuration before anything is loaded.

Only the forecast of memory imports PyTorch, when it is asked for.
"""

from skyrl_train.plan.run_plan import RunPlan, TrainingPlan, limit_steps
