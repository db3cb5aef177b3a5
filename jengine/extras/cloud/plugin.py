"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "HOOKS": {
        "LocalCheckpointHook": "jengine.extras.cloud.local_checkpoint",
    },
    "changed_data": {"continue_with": "jengine.extras.cloud.changed_data"},
    "save_policies": {"OrbaxPolicies": "jengine.extras.cloud.orbax_policies"},
    "jengine.parallel": {
        "launch": "jengine.extras.cloud.launchers",
    },
    "path_schemes": {
        "gs": "jengine.extras.cloud.schemes",
        "s3": "jengine.extras.cloud.schemes",
    },
    "url_checkpoints": dict.fromkeys(
        (
            "abandon",
            "begin",
            "clean_up",
            "delete",
            "finish",
            "list_sealed",
            "move",
            "validate_checkpoint",
        ),
        "jengine.extras.cloud.object_checkpoints",
    ),
    "url_files": {
        **dict.fromkeys(
            (
                "copy_file",
                "download_file",
                "list_directory",
                "list_files",
                "read_bytes",
                "read_many",
                "remove_files",
                "upload_file",
                "write_bytes",
            ),
            "jengine.extras.cloud.url_files",
        ),
        "fetch": "jengine.extras.cloud.downloads",
        "temporary_copies": "jengine.extras.cloud.downloads",
        "fetch_base": "jengine.extras.cloud.url_configs",
        "fetch_config": "jengine.extras.cloud.url_configs",
        "fetch_modules": "jengine.extras.cloud.url_configs",
    },
    "newer_checkpoints": {"find_newer_copy": "jengine.extras.cloud.local_copies"},
    "shared_reads": {"read_shared": "jengine.extras.cloud.shared_reads"},
    "fitting_checkpoints": {"replace_unfit_copy": "jengine.extras.cloud.local_copies"},
}
