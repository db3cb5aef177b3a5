"""Divide parameters into groups by rules over paths, module types and layers."""
