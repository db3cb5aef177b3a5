"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "CLUSTERINGS": {
        "Kmeans": "jengine.extras.selfsup.clustering",
        "PIC": "jengine.extras.selfsup.clustering",
    },
    "DATASETS": {
        "PseudoLabelDataset": "jengine.extras.selfsup.pseudo_labels",
    },
    "DATA_SAMPLERS": {
        "DeepClusterSampler": "jengine.extras.selfsup.pseudo_labels",
    },
    "HOOKS": {
        "DeepClusterHook": "jengine.extras.selfsup.deepcluster",
        "DenseCLHook": "jengine.extras.selfsup.densecl",
        "ODCHook": "jengine.extras.selfsup.odc",
        "SimSiamHook": "jengine.extras.selfsup.simsiam",
        "SwAVHook": "jengine.extras.selfsup.swav",
    },
    "VISUALIZERS": {
        "SelfSupVisualizer": "jengine.extras.selfsup.visualizer",
    },
    "names": {
        "Extractor": "jengine.extras.selfsup.features",
        "MemoryBank": "jengine.extras.selfsup.memory_bank",
        "SwAVQueue": "jengine.extras.selfsup.losses",
        "class_weights": "jengine.extras.selfsup.clustering",
        "compare_features": "jengine.extras.selfsup.features",
        "dense_match": "jengine.extras.selfsup.losses",
        "densecl_losses": "jengine.extras.selfsup.losses",
        "describe_clusters": "jengine.extras.selfsup.clustering",
        "empty_bank": "jengine.extras.selfsup.memory_bank",
        "empty_queue": "jengine.extras.selfsup.losses",
        "extract_features": "jengine.extras.selfsup.features",
        "info_nce": "jengine.extras.selfsup.losses",
        "knn_accuracy": "jengine.extras.selfsup.features",
        "projection_accuracy": "jengine.extras.selfsup.features",
        "push": "jengine.extras.selfsup.losses",
        "random_view": "jengine.extras.selfsup.views",
        "sinkhorn": "jengine.extras.selfsup.losses",
        "swav_loss": "jengine.extras.selfsup.losses",
        "update_samples": "jengine.extras.selfsup.memory_bank",
    },
    "requires": {
        "drawing": "jengine.extras.drawing",
    },
}
