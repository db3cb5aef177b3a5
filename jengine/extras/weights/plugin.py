"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "array_files": {
        "list_npz": "jengine.extras.weights.npz_files",
        "read_npz": "jengine.extras.weights.npz_files",
    },
    "commands": {
        "ckpt export": "jengine.extras.weights.commands",
    },
    "jengine.checkpoint": {
        "find_best_checkpoint": "jengine.extras.weights.best",
        "list_best_checkpoints": "jengine.extras.weights.best",
        "publish": "jengine.extras.weights.published_copy",
    },
    "hook_checks": {
        "check_load_best": "jengine.extras.weights.best",
    },
    "hub_models": {
        "clip": "jengine.extras.weights.hub_clip",
        "convnext": "jengine.extras.weights.hub_convnext",
        "gemma": "jengine.extras.weights.hub_gemma",
        "gemma2": "jengine.extras.weights.hub_gemma",
        "gemma3_text": "jengine.extras.weights.hub_gemma3",
        "gpt2": "jengine.extras.weights.hub_gpt2",
        "llama": "jengine.extras.weights.hub_llama",
        "mistral": "jengine.extras.weights.hub_llama",
        "qwen2": "jengine.extras.weights.hub_qwen",
        "qwen3": "jengine.extras.weights.hub_qwen",
        "resnet": "jengine.extras.weights.hub_resnet",
        "vit": "jengine.extras.weights.hub_vit",
    },
    "names": {
        "HubModel": "jengine.extras.weights.huggingface",
        "WeightReader": "jengine.extras.weights.weight_source",
        "WeightSource": "jengine.extras.weights.weight_source",
        "export_hub": "jengine.extras.weights.hub",
        "export_params": "jengine.extras.weights.export",
        "hub_module": "jengine.extras.weights.huggingface",
        "import_batch_stats": "jengine.extras.weights.export",
        "import_params": "jengine.extras.weights.export",
        "load_pretrained": "jengine.extras.weights.pretrained",
        "locate_weights": "jengine.extras.weights.weight_source",
        "open_weights": "jengine.extras.weights.weight_source",
        "transformer_arguments": "jengine.extras.weights.huggingface",
    },
    "readers": {
        "eqx": "jengine.extras.weights.sources",
        "msgpack": "jengine.extras.weights.sources",
        "npz": "jengine.extras.weights.sources",
        "orbax": "jengine.extras.weights.sources",
        "safetensors": "jengine.extras.weights.sources",
    },
    "requires": {
        "networks": "jengine.extras.networks",
    },
    "starts": {
        "parse_start": "jengine.extras.weights.starts",
    },
}
