"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "HOOKS": {
        "OptunaPruningHook": "jengine.extras.sweeps.pruning",
    },
    "commands": {
        "sweep": "jengine.extras.sweeps.commands",
    },
    "jengine": {
        "sweep": "jengine.extras.sweeps.run",
    },
    "names": {
        "sweep": "jengine.extras.sweeps.run",
    },
    "requires": {
        "report": "jengine.extras.report",
    },
}
