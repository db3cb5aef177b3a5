"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "adapted_weights": {
        "split_adapters": "jengine.extras.networks.adapted_weights",
    },
    "MODELS": {
        "CLIP": "jengine.extras.networks.vision_transformer",
        "ConvNeXt": "jengine.extras.networks.convnext",
        "LoRA": "jengine.extras.networks.lora",
        "NnxTransformerLM": "jengine.extras.networks.transformer_nnx",
        "Quantized": "jengine.extras.networks.quantized",
        "ResNet": "jengine.extras.networks.resnet",
        "SmallCNN": "jengine.extras.networks.networks",
        "SmallViT": "jengine.extras.networks.networks",
        "TransformerLM": "jengine.extras.networks.transformer",
        "ViT": "jengine.extras.networks.vision_transformer",
    },
    "activation_checkpointing": {
        "check_patterns": "jengine.extras.networks.remat",
        "remat_linen": "jengine.extras.networks.remat",
        "remat_nnx": "jengine.extras.networks.remat",
    },
    "module_trees": {
        "select_params": "jengine.extras.networks.equinox_modules",
        "split_module": "jengine.extras.networks.equinox_modules",
    },
    "training_announcements": {
        "announce_training": "jengine.extras.networks.nnx_filters",
    },
    "trained_variables": {
        "build_filter": "jengine.extras.networks.nnx_filters",
        "select_trained": "jengine.extras.networks.nnx_filters",
    },
    "names": {
        "MixtureOfExperts": "jengine.extras.networks.mixture",
        "attend": "jengine.extras.networks.attention",
        "contrastive_loss": "jengine.extras.networks.vision_transformer",
        "get_policy": "jengine.extras.networks.transformer",
        "nnx_transformer": "jengine.extras.networks.transformer_nnx",
        "quantize": "jengine.extras.networks.quantized",
        "split_transformer": "jengine.extras.networks.transformer_nnx",
    },
}
