"""Support what other code bases than MMEngine define: iMIX, MMSelfSup and MMSegmentation."""
