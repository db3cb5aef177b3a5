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
    "jengine.logging": {
        "print_log": "jengine.extras.mmengine.log_calls",
    },
    "jengine.parallel": {
        "all_gather": "jengine.extras.mmengine.dist",
        "all_gather_object": "jengine.extras.mmengine.dist",
        "all_reduce": "jengine.extras.mmengine.dist",
        "all_reduce_dict": "jengine.extras.mmengine.dist",
        "barrier": "jengine.extras.mmengine.dist",
        "broadcast": "jengine.extras.mmengine.dist",
        "broadcast_object_list": "jengine.extras.mmengine.dist",
        "collect_results": "jengine.extras.mmengine.dist",
        "gather_object": "jengine.extras.mmengine.dist",
        "get_dist_info": "jengine.extras.mmengine.dist",
        "get_rank": "jengine.extras.mmengine.dist",
        "get_world_size": "jengine.extras.mmengine.dist",
        "is_distributed": "jengine.extras.mmengine.dist",
        "is_main_process": "jengine.extras.mmengine.dist",
        "master_only": "jengine.extras.mmengine.dist",
        "sync_random_seed": "jengine.extras.mmengine.dist",
    },
    "names": {
        "Config": "jengine.extras.mmengine.config",
        "drop_without_effect": "jengine.extras.mmengine.mmengine_keys",
        "load_checkpoint": "jengine.extras.mmengine.runner_calls",
        "resume": "jengine.extras.mmengine.runner_calls",
    },
}
