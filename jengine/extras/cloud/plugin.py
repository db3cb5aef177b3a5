"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "HOOKS": {
        "LocalCheckpointHook": "jengine.extras.cloud.local_checkpoint",
    },
    "path_schemes": {
        "gs": "jengine.extras.cloud.schemes",
        "s3": "jengine.extras.cloud.schemes",
    },
    "newer_checkpoints": {"find_newer_copy": "jengine.extras.cloud.local_copies"},
    "shared_reads": {"read_shared": "jengine.extras.cloud.shared_reads"},
    "fitting_checkpoints": {"replace_unfit_copy": "jengine.extras.cloud.local_copies"},
}
