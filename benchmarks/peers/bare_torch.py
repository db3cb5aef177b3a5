"""The loop by hand in PyTorch alone."""

import torch

from benchmarks.peers.common import CLASSES, FEATURES, HIDDEN, LOG_EVERY, MOMENTUM, RATE, Log

torch.set_num_threads(1)  # for networks of this size more threads only cost


def make_net():
    """The network."""
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, CLASSES))


def make_optimizer(params):
    """Its optimizer."""
    return torch.optim.SGD(params, lr=RATE, momentum=MOMENTUM)


def pack(x, y):
    """A batch as PyTorch takes it."""
    return torch.from_numpy(x), torch.from_numpy(y).long()


def run(data):
    """Trains over the data once."""
    net, log = make_net(), Log()
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
