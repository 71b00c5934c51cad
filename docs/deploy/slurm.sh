#!/bin/bash
# TwIST on SLURM, in one of two ways:
#   sbatch slurm.sh torchrun my.toml     one job, every GPU a rank; a death ends the job, the checkpoint carries on
#   sbatch slurm.sh hub my.toml          a hub on the first node, every GPU a worker; a death costs one result
#   sbatch slurm.sh worker HOST:29400    more workers for a hub that runs already; come and go as you like
#SBATCH --job-name=twistlm
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append

set -euo pipefail
mode=${1:?torchrun, hub or worker}
what=${2:?a config, or HOST:PORT of a hub}
gpus=8       # per node, as above
port=29400   # free on the first node
n_gpus=$((SLURM_JOB_NUM_NODES * gpus))
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts%%$'\n'*}

# The run's secret: in a file that only you can read, the same for every job of this run.
secret_file=${TWISTLM_SECRET_FILE:-$HOME/.twistlm-secret}
if [ ! -s "$secret_file" ]; then (umask 077 && openssl rand -hex 32 > "$secret_file"); fi
TWISTLM_SECRET=$(cat "$secret_file")
export TWISTLM_SECRET

workers() {  # one task per GPU, each with its own; a task that dies leaves the others alone
  srun --overlap --kill-on-bad-exit=0 --ntasks-per-node="$gpus" --ntasks="$n_gpus" --gpus-per-task=1 \
    --cpus-per-task=4 twistlm worker --connect "$1"
}

case "$mode" in
  torchrun)
    # --max-restarts=0: torchrun launches, and does not try to mend. Requeued, the job goes on from the checkpoint.
    srun torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$gpus" --max-restarts=0 \
      --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first:$port" \
      -m twistlm train "$what" --resume run.variant=sharded train.n_workers="$n_gpus"
    ;;
  hub)
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$first" --cpus-per-task=8 \
      twistlm hub "$what" --resume hub.bind="$first:$port" train.n_workers="$n_gpus" &
    hub=$!
    workers "$first:$port" &
    wait "$hub"  # the job is over when the hub is
    ;;
  worker)
    workers "$what"
    ;;
  *)
    echo "use torchrun, hub or worker, not $mode" >&2
    exit 2
    ;;
esac
