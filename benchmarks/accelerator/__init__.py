"""Suite for a machine with an accelerator: correctness of the whole card, speed, memory, saves,
input and tests.
"""
