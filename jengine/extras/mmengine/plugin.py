"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "commands": {
        "convert": "jengine.extras.mmengine.commands",
    },
    "names": {
        "Config": "jengine.extras.mmengine.config",
        "drop_without_effect": "jengine.extras.mmengine.mmengine_keys",
    },
}
