"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "HOOKS": {
        "SyncBuffersHook": "jengine.extras.replicas.sync_buffers",
    },
    "STRATEGIES": {
        "DataParallel": "jengine.extras.replicas.data_parallel",
        "DiLoCo": "jengine.extras.replicas.diloco",
        "Replica": "jengine.extras.replicas.data_parallel",
    },
    "jengine.hooks": {
        "SyncBuffersHook": "jengine.extras.replicas.sync_buffers",
    },
    "jengine.parallel": {
        "DataParallel": "jengine.extras.replicas.data_parallel",
        "DiLoCo": "jengine.extras.replicas.diloco",
    },
}
