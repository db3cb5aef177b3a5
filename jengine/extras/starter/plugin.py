"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "commands": {
        "new": "jengine.extras.starter.commands",
    },
}
