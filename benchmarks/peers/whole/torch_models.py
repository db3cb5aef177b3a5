"""Define the three networks and their optimizer in PyTorch, for Lightning and the HF Trainer."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.peers.whole.tasks import has_decay, iterate, rate_factor


class CNN(nn.Module):
    """Two stages of two convolutions with BatchNorm."""

    def __init__(self):
        super().__init__()
        parts, last = [], 1
        for stage, width in enumerate((32, 64)):
            for depth in range(2):
                stride = 2 if stage > 0 and depth == 0 else 1
                convolution = nn.Conv2d(last, width, 3, stride, padding=1, bias=False)
                parts += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
                last = width
        self.parts = nn.Sequential(*parts)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(last, 10)

    def forward(self, x):
        """Return logits f[B, 10]."""
        x = self.parts(x.permute(0, 3, 1, 2))
        return self.head(self.dropout(x.mean((2, 3))))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, hidden, causal):
        super().__init__()
        self.causal = causal
        self.ln1, self.ln2 = nn.LayerNorm(64, eps=1e-6), nn.LayerNorm(64, eps=1e-6)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.fc1, self.fc2 = nn.Linear(64, hidden), nn.Linear(hidden, 64)

    def forward(self, x):
        """Return tokens f[B, N, 64]."""
        q, k, v = self.qkv(self.ln1(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = functional.gelu(self.fc1(self.ln2(x)), approximate="tanh")
        return x + self.fc2(y)


class ViT(nn.Module):
    """Four blocks over patches of 2 x 2 pixels and a class token."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, 64, 2, 2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 64))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, 64) * 0.02)
        self.blocks = nn.Sequential(*(Block(128, causal=False) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(64, eps=1e-6), nn.Linear(64, 10)

    def forward(self, x):
        """Return logits f[B, 10]."""
        x = self.patch(x.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x)[:, 0]))


class Text(nn.Module):
    """Two causal blocks over 64 bytes with learned positions."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.pos_embed = nn.Parameter(torch.randn(1, 64, 64) * 0.02)
        self.blocks = nn.Sequential(*(Block(192, causal=True) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(64, eps=1e-6), nn.Linear(64, 256, bias=False)

    def forward(self, x):
        """Return logits f[B, 64, 256]."""
        return self.head(self.norm(self.blocks(self.embed(x) + self.pos_embed)))


NETWORKS = {"cnn": CNN, "vit": ViT, "text": Text}


def make_loss(task):
    """Return the mean cross-entropy of `(logits, y)`."""

    def loss(logits, y):
        return functional.cross_entropy(
            logits.flatten(0, -2), y.flatten(), label_smoothing=task.smoothing
        )

    return loss


def score(logits, y, name):
    """Return the sums over a batch: right ones, or losses of bytes."""
    if name == "text":
        return functional.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum")
    return (logits.argmax(-1) == y).sum()


def make_optimizer(model, task):
    """Return AdamW with its decayed group and the others, and the schedule of each iteration."""
    groups = {True: [], False: []}
    for path, parameter in model.named_parameters():
        groups[has_decay(path, parameter.ndim)].append(parameter)
    settings = [
        dict(params=groups[True], weight_decay=task.decay),
        dict(params=groups[False], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(settings, task.rate, task.betas)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate_factor(step, task)
    )


def to_tensors(x, y):
    """Return the arrays as tensors, targets as int64."""
    x = torch.from_numpy(x)
    return x if x.is_floating_point() else x.long(), torch.from_numpy(y).long()


class Batches(torch.utils.data.IterableDataset):
    """Provide the training batches, whole."""

    def __init__(self, data, task):
        self.data, self.task = data, task

    def __len__(self):
        return self.task.steps

    def __iter__(self):
        for x, y in iterate(self.data, self.task):
            yield to_tensors(x, y)


class TestBatches(torch.utils.data.Dataset):
    """Provide the batches of the test data."""

    def __init__(self, data):
        self.x, self.y = to_tensors(*data.test)

    def __len__(self):
        return -(-len(self.x) // 128)

    def __getitem__(self, index):
        part = slice(index * 128, (index + 1) * 128)
        return self.x[part], self.y[part]
