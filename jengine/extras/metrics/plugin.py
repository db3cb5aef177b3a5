"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "METRICS": {
        "AUROC": "jengine.extras.metrics.ranking",
        "AveragePrecision": "jengine.extras.metrics.ranking",
        "BLEU": "jengine.extras.metrics.language",
        "BitsPerByte": "jengine.extras.metrics.language",
        "CalibrationError": "jengine.extras.metrics.classification",
        "ConfusionMatrix": "jengine.extras.metrics.classification",
        "IoUMetric": "jengine.extras.metrics.segmentation",
        "MetricAdapter": "jengine.extras.metrics.adapter",
        "MeanAbsoluteError": "jengine.extras.metrics.regression",
        "MeanSquaredError": "jengine.extras.metrics.regression",
        "Perplexity": "jengine.extras.metrics.language",
        "PrecisionRecallF1": "jengine.extras.metrics.classification",
        "R2Score": "jengine.extras.metrics.regression",
    },
    "metric_adapters": {
        "adapt_metric": "jengine.extras.metrics.adapter",
    },
    "names": {
        "MeanSquaredErrorMetric": "jengine.extras.metrics.regression",
    },
}
