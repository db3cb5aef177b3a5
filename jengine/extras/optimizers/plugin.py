"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "AVERAGES": {
        "CosineEMA": "jengine.extras.optimizers.averages",
        "ExpMomentumEMA": "jengine.extras.optimizers.averages",
    },
    "HOOKS": {
        "ScheduleFreeHook": "jengine.extras.optimizers.schedule_free",
    },
    "OPTIMIZERS": {
        "ASGD": "jengine.extras.optimizers.averaged_sgd",
        "Adadelta": "jengine.extras.optimizers.adagrad",
        "Adafactor": "jengine.extras.optimizers.aliases",
        "Adagrad": "jengine.extras.optimizers.adagrad",
        "Adamax": "jengine.extras.optimizers.adam_variants",
        "Adan": "jengine.extras.optimizers.aliases",
        "DAdaptAdam": "jengine.extras.optimizers.estimated_rate",
        "LARS": "jengine.extras.optimizers.large_batch",
        "Lamb": "jengine.extras.optimizers.large_batch",
        "Lion": "jengine.extras.optimizers.muon",
        "Muon": "jengine.extras.optimizers.aliases",
        "NAdam": "jengine.extras.optimizers.adam_variants",
        "Prodigy": "jengine.extras.optimizers.estimated_rate",
        "ProximalAdan": "jengine.extras.optimizers.adan",
        "RAdam": "jengine.extras.optimizers.adam_variants",
        "RMSprop": "jengine.extras.optimizers.rmsprop",
        "Rprop": "jengine.extras.optimizers.rmsprop",
        "SparseAdam": "jengine.extras.optimizers.adam_variants",
        "TorchAdafactor": "jengine.extras.optimizers.adafactor",
        "TorchMuon": "jengine.extras.optimizers.muon",
    },
    "PARAM_SCHEDULERS": {
        "CosineRestartLR": "jengine.extras.optimizers.schedules",
        "CosineRestartMomentum": "jengine.extras.optimizers.schedules",
        "CosineRestartParamScheduler": "jengine.extras.optimizers.schedules",
        "OneCycleLR": "jengine.extras.optimizers.schedules",
        "OneCycleParamScheduler": "jengine.extras.optimizers.schedules",
        "PolyLRRatio": "jengine.extras.optimizers.schedules",
        "QuadraticWarmupLR": "jengine.extras.optimizers.schedules",
        "QuadraticWarmupMomentum": "jengine.extras.optimizers.schedules",
        "QuadraticWarmupParamScheduler": "jengine.extras.optimizers.schedules",
    },
    "optimizer_parts": {
        "reset_state": "jengine.extras.optimizers.freeze",
        "restrict_to_trainable": "jengine.extras.optimizers.freeze",
        "select_state": "jengine.extras.optimizers.freeze",
        "skip_frozen": "jengine.extras.optimizers.freeze",
    },
    "parameter_roles": {
        "trace_roles": "jengine.extras.optimizers.parameter_uses",
    },
    "OPTIM_WRAPPER_CONSTRUCTORS": {
        "LayerDecayOptimizerConstructor": "jengine.extras.optimizers.layer_decay",
        "LearningRateDecayOptimWrapperConstructor": "jengine.extras.optimizers.layer_decay",
        "LearningRateDecayOptimizerConstructor": "jengine.extras.optimizers.layer_decay",
        "MultiOptimWrapperConstructor": "jengine.extras.optimizers.multi_constructor",
    },
}
