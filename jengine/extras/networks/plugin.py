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
    "names": {
        "MixtureOfExperts": "jengine.extras.networks.mixture",
        "attend": "jengine.extras.networks.attention",
        "nnx_transformer": "jengine.extras.networks.transformer_nnx",
        "quantize": "jengine.extras.networks.quantized",
        "split_transformer": "jengine.extras.networks.transformer_nnx",
    },
}
