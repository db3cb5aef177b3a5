"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "HOOKS": {
        "SegVisualizationHook": "jengine.extras.segmentation.visualization_hook",
    },
}
