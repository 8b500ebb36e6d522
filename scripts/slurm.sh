#!/usr/bin/env bash
# Runs a command of this project as a Slurm job, on one node or several. Training saves before the time limit, requeues
# itself and resumes.
#   sbatch --nodes=2 --gpus-per-node=8 --ntasks-per-node=8 scripts/slurm.sh train.py experiment=tread size=xl2
#   sbatch --array=0-2 --gpus-per-node=1 scripts/slurm.sh train.py model=tread name='x-${model.name}-seed${seed}'
#                                                        one seed each, which is the task's number
#   sbatch --gpus-per-node=1 scripts/slurm.sh fid.py checkpoint=runs/xl2 reference=ref.npz
# One task is one process with one GPU. All nodes must have the same folders of data, runs and code. Options on sbatch's
# command line, such as --time or --account, override those below.
#SBATCH --job-name=tread
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}" || exit 1
[ $# -gt 0 ] || { echo "slurm.sh: give a command to run, as train.py experiment=tread." >&2; exit 2; }

[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || set -- "$@" "seed=$SLURM_ARRAY_TASK_ID"
MASTER_ADDR=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-localhost}" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# Since Slurm 22.05 srun does not take over what sbatch was given, and each task would have a single core.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}"

# The ranks are Slurm's own tasks, without a launcher, which would kill them 30 s after a signal. If one fails or is
# killed, srun ends the others.
srun --kill-on-bad-exit=1 bash -c '
    trap "" USR1    # would kill what does not handle it: another command, or training before its first step
    if [ "$SLURM_NTASKS" -gt 1 ]; then
        export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
        export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
    fi
    exec "${PYTHON:-python}" "$@"' bash "$@"
code=$?

# Five minutes before the time limit Slurm sends USR1 to the tasks (never to srun, which would kill them at TERM).
# Training saves and exits with 138. At a preemption it gets TERM and saves too, and Slurm requeues by its own rules, as
# after the loss of a node. Any other failure, such as a mistake or a full disk, would happen again.
if [ "$code" -eq 138 ]; then
    echo "slurm.sh: the time limit is near; job $SLURM_JOB_ID goes back into the queue."
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    echo "slurm.sh: Slurm refused it: submit the same command again." >&2
fi
exit "$code"
