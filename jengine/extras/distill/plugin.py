"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "HOOKS": {
        "DistillHook": "jengine.extras.distill.distill_hook",
        "FrozenModelHook": "jengine.extras.distill.frozen_model",
    },
    "names": {
        "DistilledModel": "jengine.extras.distill.distilled_model",
        "DistillSettings": "jengine.extras.distill.distilled_model",
        "FeatureSettings": "jengine.extras.distill.distilled_model",
        "FrozenModel": "jengine.extras.distill.frozen_model",
    },
}
