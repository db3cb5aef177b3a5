"""Measure a million iterations of a chain of five schedulers on the host. The target is less than 5
seconds.

python -m benchmarks.schedules
"""

import time
from types import SimpleNamespace

from jengine.optim.schedules import build_param_schedulers

ITERS = 1_000_000
CHAIN = [
    {"type": "LinearLR", "start_factor": 0.01, "end": ITERS // 100},
    {"type": "CosineAnnealingLR", "begin": ITERS // 100, "eta_min": 1e-6},
    {"type": "MultiStepLR", "milestones": [ITERS // 2, ITERS * 3 // 4]},
    {"type": "PolyLR", "power": 0.9, "begin": ITERS // 2},
    {"type": "CosineAnnealingMomentum", "eta_min": 0.85},
]


def time_chain(iters: int = ITERS) -> float:
    """Return the CPU time in seconds for `iters` iterations of the chain on one parameter group."""
    wrapper = SimpleNamespace(param_groups=[{"lr": 0.1, "momentum": 0.9}])
    cfgs = [{**cfg, "by_epoch": False} for cfg in CHAIN]
    chain = build_param_schedulers(
        cfgs, wrapper, max_epochs=None, max_iters=ITERS, epoch_length=None
    )
    start = time.process_time()
    for _ in range(iters):
        for scheduler in chain:
            scheduler.step()
    return time.process_time() - start


if __name__ == "__main__":
    seconds = time_chain()
    print(
        f"{ITERS:,} iterations of {len(CHAIN)} schedulers: {seconds:.2f} s, "
        f"{seconds / ITERS * 1e6:.2f} us each"
    )
