"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "OPTIMIZERS": {
        "Adadelta": "jengine.extras.optimizers.adagrad",
        "Adafactor": "jengine.extras.optimizers.adafactor",
        "Adagrad": "jengine.extras.optimizers.adagrad",
        "Adan": "jengine.extras.optimizers.adan",
        "LARS": "jengine.extras.optimizers.large_batch",
        "Lamb": "jengine.extras.optimizers.large_batch",
        "Lion": "jengine.extras.optimizers.muon",
        "Muon": "jengine.extras.optimizers.muon",
        "ProximalAdan": "jengine.extras.optimizers.adan",
        "RMSprop": "jengine.extras.optimizers.rmsprop",
        "Rprop": "jengine.extras.optimizers.rmsprop",
        "TorchAdafactor": "jengine.extras.optimizers.adafactor",
        "TorchMuon": "jengine.extras.optimizers.muon",
    },
    "OPTIM_WRAPPER_CONSTRUCTORS": {
        "LayerDecayOptimizerConstructor": "jengine.extras.optimizers.layer_decay",
        "LearningRateDecayOptimWrapperConstructor": "jengine.extras.optimizers.layer_decay",
        "LearningRateDecayOptimizerConstructor": "jengine.extras.optimizers.layer_decay",
    },
}
