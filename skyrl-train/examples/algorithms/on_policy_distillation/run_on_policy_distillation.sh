#!/usr/bin/env bash
# On-policy distillation on Catch: a trained model scores every token of another model. Any key=value argument
# overrides its settings.
#
#   TEACHER=path/to/a/model bash examples/algorithms/on_policy_distillation/run_on_policy_distillation.sh
set -euo pipefail
TEACHER=${TEACHER:-}
[[ -d $TEACHER ]] && TEACHER=$(realpath "$TEACHER") # otherwise a name on the Hugging Face Hub
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

TRAINED=$PWD/outputs/catch/teacher/export/global_step_80/policy
if [[ -z $TEACHER && ! -d $TRAINED ]]; then
  echo "error: there is no teacher in $TRAINED; train one with" >&2
  echo "  bash examples/catch/run_catch.sh trainer.run_name=teacher trainer.hf_save_interval=80" >&2
  echo "or name one: TEACHER=path/to/a/model" >&2
  exit 1
fi

KEYS=(
  trainer.run_name=on_policy_distillation
  trainer.algorithm.advantage_estimator=on_policy_distillation
  "trainer.ref.model.path='${TEACHER:-$TRAINED}'"
  trainer.algorithm.policy_loss_type=importance_sampling
  trainer.algorithm.use_kl_loss=false # the teacher is the reference: the advantages already are the divergence
  trainer.algorithm.eps_clip_high=0.2 # back to the default: nothing is clipped
)
exec bash examples/catch/run_catch.sh "${KEYS[@]}" "$@"
