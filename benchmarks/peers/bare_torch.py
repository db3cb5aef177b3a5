"""Define the hand-written loop in plain PyTorch."""

import torch

from benchmarks.peers.common import CLASSES, FEATURES, HIDDEN, LOG_EVERY, MOMENTUM, RATE, Log

torch.set_num_threads(1)  # more threads slow down a network of this size


def make_net():
    """Build the network."""
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, CLASSES)
    )


def make_optimizer(params):
    """Build the optimizer."""
    return torch.optim.SGD(params, lr=RATE, momentum=MOMENTUM)


def pack(x, y):
    """Convert a batch to PyTorch tensors."""
    return torch.from_numpy(x), torch.from_numpy(y).long()


def run(data):
    """Train on the data once."""
    net = make_net()
    log = Log()
    optimizer = make_optimizer(net.parameters())
    losses = []
    for i, (x, y) in enumerate(data, 1):
        loss = torch.nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if i % LOG_EVERY == 0:
            log.write(i, float(torch.stack(losses).mean()))
            losses.clear()


LOOP = (run, pack)
