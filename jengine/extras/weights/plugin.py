"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "commands": {
        "ckpt export": "jengine.extras.weights.commands",
    },
    "names": {
        "FORMATS": "jengine.extras.weights.sources",
        "WeightSource": "jengine.extras.weights.sources",
        "export_hub": "jengine.extras.weights.hub_export",
        "export_params": "jengine.extras.weights.export",
        "import_batch_stats": "jengine.extras.weights.export",
        "import_params": "jengine.extras.weights.export",
        "is_pytree_of_arrays": "jengine.extras.weights.sources",
        "load_pretrained": "jengine.extras.weights.pretrained",
        "locate_weights": "jengine.extras.weights.sources",
        "open_weights": "jengine.extras.weights.sources",
        "transformer_arguments": "jengine.extras.weights.huggingface",
    },
    "requires": {
        "networks": "jengine.extras.networks",
    },
}
