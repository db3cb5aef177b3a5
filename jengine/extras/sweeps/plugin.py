"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "jengine": {
        "sweep": "jengine.extras.sweeps.run",
    },
    "names": {
        "sweep": "jengine.extras.sweeps.run",
    },
}
