#!/bin/bash
# Trains on several nodes under Slurm. Continues after a time limit, a preemption or a lost node:
#
#   sbatch --nodes 4 --gpus-per-node 8 examples/slurm.sh CONFIG OUTPUT_DIR [key=value ...]
#
# OUTPUT_DIR must be on a shared file system. Do not append resume_from_checkpoint=PATH: each restart
# would begin at PATH again. See docs/many_gpus.md#clusters.
#
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
# Slurm sends SIGTERM to this script only, ten minutes before the time limit.
#SBATCH --signal=B:TERM@600
set -u
config=$1
output_dir=$2
shift 2
node0=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun tune run --nnodes "$SLURM_NNODES" --nproc_per_node "$SLURM_GPUS_ON_NODE" \
  --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$node0:${MASTER_PORT:-29500}" \
  --max-restarts 3 --shutdown_timeout 600 \
  adaptive_full_finetune --config "$config" output_dir="$output_dir" \
  save_every_n_steps=200 keep_last_n_checkpoints=2 resume_from_checkpoint=auto "$@" &
training=$!

# srun forwards the signal to torchrun on each node, and torchrun to its ranks. They finish the step, save and exit with 75.
trap 'kill -TERM "$training"' TERM
wait "$training"
status=$?
# The signal interrupts `wait` while the ranks are still saving.
while kill -0 "$training" 2>/dev/null; do
  wait "$training"
  status=$?
done

# torchrun exits with 1 even if its ranks exit with 75. The run log records whether the run was asked to end.
if tail -n 1 "$output_dir/adaptive_batch/run.jsonl" 2>/dev/null | grep -q '"kind": "preempted"'; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
