"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "VISBACKENDS": {
        "AimVisBackend": "jengine.extras.trackers.aim",
        "CSVVisBackend": "jengine.extras.trackers.csv_file",
        "ClearMLVisBackend": "jengine.extras.trackers.clearml",
        "CometVisBackend": "jengine.extras.trackers.comet",
        "MLflowVisBackend": "jengine.extras.trackers.mlflow",
        "TensorboardVisBackend": "jengine.extras.trackers.tensorboard",
        "WandbVisBackend": "jengine.extras.trackers.wandb",
    },
    "jengine.logging": {
        "TensorboardVisBackend": "jengine.extras.trackers.tensorboard",
    },
    "names": {
        "RunVisBackend": "jengine.extras.trackers.run_backend",
    },
}
