"""Divide parameters into groups by rules: paths, module types, layer depth."""
