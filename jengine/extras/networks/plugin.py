"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "MODELS": {
        "LoRA": "jengine.extras.networks.lora",
        "NnxTransformerLM": "jengine.extras.networks.transformer_nnx",
        "Quantized": "jengine.extras.networks.quantized",
        "SmallCNN": "jengine.extras.networks.networks",
        "SmallViT": "jengine.extras.networks.networks",
        "TransformerLM": "jengine.extras.networks.transformer",
    },
    "module_trees": {
        "select_params": "jengine.extras.networks.equinox_modules",
        "split_module": "jengine.extras.networks.equinox_modules",
    },
    "names": {
        "MixtureOfExperts": "jengine.extras.networks.mixture",
        "attend": "jengine.extras.networks.attention",
        "get_policy": "jengine.extras.networks.transformer",
        "nnx_transformer": "jengine.extras.networks.transformer_nnx",
        "quantize": "jengine.extras.networks.quantized",
        "split_transformer": "jengine.extras.networks.transformer_nnx",
    },
}
