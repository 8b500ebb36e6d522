#!/usr/bin/env bash
# Runs a command of this project as a Slurm job, on one node or several. It saves before the time limit, requeues itself
# and resumes.
#   sbatch --nodes=2 --gpus-per-node=8 --ntasks-per-node=8 scripts/slurm.sh train.py experiment=tread size=xl2
#   sbatch --array=0-2 --gpus-per-node=1 scripts/slurm.sh train.py model=tread name='x-${model.name}-seed${seed}'
#                                                        one seed each, which is the task's number
#   sbatch --gpus-per-node=1 scripts/slurm.sh fid.py checkpoint=runs/xl2 reference=ref.npz
# One task is one process with one GPU. All nodes must have the same folders of data, runs and code. Options on sbatch's
# command line, such as --time or --account, override those below.
#SBATCH --job-name=tread
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}" || exit 1
[ $# -gt 0 ] || { echo "slurm.sh: give a command to run, as train.py experiment=tread." >&2; exit 2; }

# Five minutes before the end Slurm sends USR1 (to this script alone), before a preemption TERM. The processes get one
# TERM, as a second would end them at once; they save and exit with 143.
stopping=
stop() {
    [ -z "$stopping" ] || return 0
    stopping=$1
    echo "slurm.sh: $1; the run saves."
    kill -TERM "$step" 2>/dev/null      # srun hands it on to every task
}
trap 'stop USR1' USR1
trap 'stop TERM' TERM

[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || set -- "$@" "seed=$SLURM_ARRAY_TASK_ID"
MASTER_ADDR=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-localhost}" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# Since Slurm 22.05 srun does not take over what sbatch was given, and each task would have a single core.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}"

# The ranks are Slurm's own tasks, without a launcher, which would kill them 30 s after a signal. If one fails or is
# killed, srun ends the others.
srun --kill-on-bad-exit=1 bash -c '
    if [ "$SLURM_NTASKS" -gt 1 ]; then
        export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
        export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
    fi
    exec "${PYTHON:-python}" "$@"' bash "$@" &
step=$!
# A signal ends a wait, not the step.
while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done

# A process that saved after TERM exits with 143. Any other failure, such as a mistake or a full disk, would happen
# again. Slurm requeues a job that a lost node ended (--requeue).
if [ -n "$stopping" ] && [ "$code" -eq 143 ]; then
    echo "slurm.sh: stopped by $stopping; job $SLURM_JOB_ID goes back into the queue."
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    echo "slurm.sh: Slurm refused it: submit the same command again." >&2
elif [ -n "$stopping" ] && [ "$code" -ne 0 ]; then
    echo "slurm.sh: the run was stopped by $stopping and failed with $code: it stays out of the queue." >&2
fi
exit "$code"
