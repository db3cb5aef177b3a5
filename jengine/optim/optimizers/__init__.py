"""Optimizers, one family per module."""
