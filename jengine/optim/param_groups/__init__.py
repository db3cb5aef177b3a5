"""Parameter groups, by rules over paths, module types and layers."""
