#!/bin/bash
# A run on a spot TPU slice: tpu_queued_resource.sh NAME ZONE TYPE CONFIG WORK_DIR
# WORK_DIR is a file system that all hosts mount, for instance a bucket with Cloud Storage FUSE, or Filestore.
# After a preemption run the same command again: the slice is created anew, and the run continues.
set -e
name=$1 zone=$2 type=$3 config=$4 work_dir=$5

gcloud compute tpus queued-resources describe "$name" --zone "$zone" >/dev/null 2>&1 ||
    gcloud compute tpus queued-resources create "$name" --node-id "$name" --zone "$zone" \
        --accelerator-type "$type" --runtime-version "${RUNTIME:-v2-alpha-tpuv5-lite}" --spot
until [ "$(gcloud compute tpus queued-resources describe "$name" --zone "$zone" --format 'value(state.state)')" = ACTIVE ]; do
    sleep 30
done
gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all \
    --command "pip install -q 'jengine[tpu]' && jengine train '$config' --work-dir '$work_dir' --resume --launcher tpu"
