"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "VISBACKENDS": {
        "AimVisBackend": "jengine.extras.trackers.aim",
        "CSVVisBackend": "jengine.extras.trackers.csv_file",
        "ClearMLVisBackend": "jengine.extras.trackers.clearml",
        "CometVisBackend": "jengine.extras.trackers.comet",
        "MLflowVisBackend": "jengine.extras.trackers.mlflow",
        "TrackioVisBackend": "jengine.extras.trackers.trackio",
        "WandbVisBackend": "jengine.extras.trackers.wandb",
    },
    "names": {
        "RunVisBackend": "jengine.extras.trackers.run_backend",
    },
}
