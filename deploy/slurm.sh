#!/bin/bash
#SBATCH --job-name=marl-pool
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=16G
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
# Train on a Ray cluster of this job's nodes, and queue the job again where its time was
# too short:
#   sbatch deploy/slurm.sh experiment=simple_centroid total_steps=10_000_000
# RUN names the run, and STORAGE its storage, a URL that all nodes can reach; a folder
# that they share needs none, and then STORAGE may stay empty.
set -euo pipefail

run=${RUN:-$SLURM_JOB_NAME-$SLURM_JOB_ID}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 20000))
address=${nodes[0]}:$port
# Only processes with this token may join.
RAY_AUTH_TOKEN=$(od -An -N 32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

# Ray on the first node, and on the others.
srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --overlap \
  ray start --head --port="$port" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
sleep "${RAY_START_SECONDS:-20}"
others=$((${#nodes[@]} - 1))
if ((others)); then
  srun --nodes="$others" --ntasks="$others" --exclude="${nodes[0]}" --overlap \
    ray start --address="$address" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
  sleep "${RAY_START_SECONDS:-20}"
fi

runners=$((2 * ${#nodes[@]}))
storage=()
if [[ -n ${STORAGE:-} ]]; then
  storage=(--storage "$STORAGE")
fi

# The training, which saves a checkpoint on SIGINT, as after Ctrl-C.
again=
training=
trap 'again=yes; kill -INT "$training"' USR1
trap 'kill -INT "$training"' TERM
marl-pool train --run-dir "runs/$run" --or-resume "${storage[@]}" \
  --address "$address" --num-env-runners "$runners" "$@" &
training=$!
status=0
# A signal ends the first wait.
wait "$training" || status=$?
if kill -0 "$training" 2> /dev/null; then
  status=0
  wait "$training" || status=$?
fi
# The time is over, and the training is not.
if [[ $again && $status -ne 0 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
