"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "backend_args": {
        "apply_backend_args": "jengine.extras.mmengine.backend_args",
    },
    "commands": {
        "convert": "jengine.extras.mmengine.commands",
    },
    "config_checks": {
        "adapt_config": "jengine.extras.mmengine.mmengine_keys",
    },
    "config_loaders": {
        "load_flat_config": "jengine.extras.mmengine.flat",
    },
    "config_writers": {
        "format_data": "jengine.extras.mmengine.flat",
    },
    "names": {
        "Config": "jengine.extras.mmengine.config",
        "drop_without_effect": "jengine.extras.mmengine.mmengine_keys",
        "load_checkpoint": "jengine.extras.mmengine.runner_calls",
        "resume": "jengine.extras.mmengine.runner_calls",
    },
}
