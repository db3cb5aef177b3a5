"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "commands": {
        "ckpt export": "jengine.extras.weights.commands",
    },
    "continue": {
        "continue_other_loop": "jengine.extras.weights.optimizer_state",
    },
    "layouts": {
        "torch_layouts": "jengine.extras.weights.torch_layout",
    },
    "names": {
        "export_hub": "jengine.extras.weights.hub",
        "export_params": "jengine.extras.weights.export",
        "import_batch_stats": "jengine.extras.weights.export",
        "import_params": "jengine.extras.weights.export",
        "transformer_arguments": "jengine.extras.weights.huggingface",
    },
    "readers": {
        "eqx": "jengine.extras.weights.sources",
        "msgpack": "jengine.extras.weights.sources",
        "npz": "jengine.extras.weights.sources",
        "orbax": "jengine.extras.weights.sources",
        "safetensors": "jengine.extras.weights.sources",
    },
    "rename": {
        "gpt2": "jengine.extras.weights.huggingface",
        "llama": "jengine.extras.weights.huggingface",
        "mistral": "jengine.extras.weights.huggingface",
    },
    "requires": {
        "networks": "jengine.extras.networks",
    },
}
