#!/bin/bash
# A run on SLURM that saves and starts again after a preemption or at the time limit: sbatch slurm.sh CONFIG WORK_DIR
#SBATCH --job-name=jengine
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300

# SLURM sends SIGTERM to all tasks 300 s before the time limit, and when it preempts the job. Each run saves and
# ends with exit code 143. WORK_DIR is on a file system that all nodes share.
srun --kill-on-bad-exit=0 jengine train "$1" --work-dir "$2" --resume
code=$?

# After a preemption SLURM requeues the job itself; at the time limit this line does.
if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
