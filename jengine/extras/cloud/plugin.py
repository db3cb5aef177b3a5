"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "HOOKS": {
        "LocalCheckpointHook": "jengine.extras.cloud.local_checkpoint",
    },
}
