"""Suite for a machine with an accelerator: correctness of the whole card, speed, memory, saves,
input and tests.
"""

# Operations with one order of sums, and without autotuning, which may choose another algorithm in
# each process.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
