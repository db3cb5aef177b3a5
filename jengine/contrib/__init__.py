"""Support hooks, metrics and configs of code bases around MMEngine: iMIX, MMSelfSup and MMSegmentation."""
