#!/bin/bash
# TwIST on SLURM, in one of three ways:
#   sbatch slurm.sh ray my.toml          Ray on all nodes of the job, every GPU a worker; a death costs one result
#   sbatch slurm.sh join HOST:6379       more nodes for a cluster that runs already; come and go as you like
#   sbatch slurm.sh torchrun my.toml     every GPU a rank; a death ends the job, the checkpoint carries on
#SBATCH --job-name=twistlm
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
mode=${1:?ray, join or torchrun}
what=${2:?a config, or HOST:PORT of a head}
gpus=8       # per node, as above
n_gpus=$((SLURM_JOB_NUM_NODES * gpus))
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts%%$'\n'*}

# The cluster's token: in a file that only you can read, the same for every job of this run.
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")"
if [ ! -s "$RAY_AUTH_TOKEN_PATH" ]; then (umask 077 && openssl rand -hex 32 > "$RAY_AUTH_TOKEN_PATH"); fi

case "$mode" in
  ray)
    # the command behind -- runs on the first node; requeued, the job goes on from the checkpoint
    srun ray symmetric-run --address "$first:6379" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
      twistlm train "$what" --auto-resume run.variant=ray ray.address="$first:6379" train.n_workers="$n_gpus"
    ;;
  join)
    srun --kill-on-bad-exit=0 twistlm node --join "$what"
    ;;
  torchrun)
    # --max-restarts=0: torchrun launches, and does not try to mend
    srun torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$gpus" --max-restarts=0 \
      --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first:29400" \
      -m twistlm train "$what" --auto-resume run.variant=sharded train.n_workers="$n_gpus"
    ;;
  *)
    echo "use ray, join or torchrun, not $mode" >&2
    exit 2
    ;;
esac
