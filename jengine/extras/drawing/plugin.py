"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "HOOKS": {
        "NaiveVisualizationHook": "jengine.extras.drawing.naive_visualization",
    },
    "VISUALIZERS": {
        "LocalVisualizer": "jengine.extras.drawing.local_visualizer",
    },
    "default_visualizer": {
        "LocalVisualizer": "jengine.extras.drawing.local_visualizer",
    },
    "names": {
        "Canvas": "jengine.extras.drawing.canvas",
    },
}
