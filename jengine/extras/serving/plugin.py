"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "HOOKS": {
        "PrepareTTAHook": "jengine.extras.serving.prepare_tta",
    },
    "METRICS": {
        "DumpResults": "jengine.extras.serving.dump",
    },
    "MODELS": {
        "BaseTTAModel": "jengine.extras.serving.tta",
    },
    "commands": {
        "ckpt export --jax-export": "jengine.extras.serving.export_options",
        "predict": "jengine.extras.serving.commands",
    },
    "known_types": {
        "find_known_class": "jengine.extras.serving.trust",
        "find_known_function": "jengine.extras.serving.trust",
    },
    "predict": {
        "make_module": "jengine.extras.serving.module",
        "predict": "jengine.extras.serving.predictor",
    },
    "jengine": {
        "load_model": "jengine.extras.serving.loaded_model",
    },
    "names": {
        "BaseInferencer": "jengine.extras.serving.inferencer",
        "LoadedModel": "jengine.extras.serving.loaded_model",
        "build_runner_with_tta": "jengine.extras.serving.tta_runner",
        "export_model": "jengine.extras.serving.jax_export",
        "load_model": "jengine.extras.serving.loaded_model",
    },
}
