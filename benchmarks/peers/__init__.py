"""Compare other trainers on the same tiny network, each with a hand-written loop in its
framework.
"""
