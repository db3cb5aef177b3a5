#!/bin/bash
# A run under MPI, with one rank for each device: mpi.sh HOSTFILE RANKS CONFIG WORK_DIR
# JAX needs the address of rank 0, the first host in the file, and a port that is free there.
host=$(awk 'NF && $1 !~ /^#/ {print $1; exit}' "$1")
mpirun --hostfile "$1" -np "$2" \
    jengine train "$3" --work-dir "$4" --resume --launcher mpi --coordinator "$host:${PORT:-12345}"
