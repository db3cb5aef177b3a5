"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "HOOKS": {
        "SegVisualizationHook": "jengine.extras.segmentation.visualization_hook",
    },
    "METRICS": {
        "IoUMetric": "jengine.extras.segmentation.iou_metric",
    },
    "requires": {
        "metrics": "jengine.extras.metrics",
    },
}
