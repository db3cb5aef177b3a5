"""Train a GAN on the digits with two optimizers, each with its own learning rate and schedule, in
one compiled step.

    python examples/gan.py

Each iteration updates the discriminator twice and the generator once. At the end, a grid of
generated digits is saved in the work dir if Pillow is installed.
"""

import argparse
import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jengine import Runner
from jengine.model import FunctionalModel

LATENT = 16


class Generator(nn.Module):
    """Generate images f[B, 64] in [0, 1] from noise f[B, 16]."""

    @nn.compact
    def __call__(self, noise):
        """Return the images."""
        x = nn.leaky_relu(nn.LayerNorm()(nn.Dense(128)(noise)))
        x = nn.leaky_relu(nn.LayerNorm()(nn.Dense(128)(x)))
        return nn.sigmoid(nn.Dense(64)(x))


class Discriminator(nn.Module):
    """Classify images f[B, 64] as real or generated; return logits f[B]."""

    @nn.compact
    def __call__(self, image):
        """Return the logits, which are positive for real images."""
        x = nn.leaky_relu(nn.Dense(128)(image), 0.2)
        x = nn.leaky_relu(nn.Dense(128)(x), 0.2)
        return nn.Dense(1)(x)[:, 0]


GENERATOR = Generator()
DISCRIMINATOR = Discriminator()


def init(rng):
    """Return the parameters of both networks, keyed by the names of their optimizers."""
    return {
        "gen": GENERATOR.init(rng, jnp.zeros((1, LATENT)))["params"],
        "disc": DISCRIMINATOR.init(rng, jnp.zeros((1, 64)))["params"],
    }


def generate(params, rng, count):
    """Return `count` images f[count, 64] from random noise."""
    return GENERATOR.apply({"params": params["gen"]}, jax.random.normal(rng, (count, LATENT)))


def discriminate(params, image):
    """Return the discriminator's logits f[B]."""
    return DISCRIMINATOR.apply({"params": params["disc"]}, image)


def disc_loss(params, batch, rng):
    """Return the losses of the discriminator, and its accuracy."""
    real = discriminate(params, batch["image"])
    fake = discriminate(params, generate(params, rng, len(batch["image"])))
    accuracy = 0.5 * ((real > 0).mean() + (fake < 0).mean())
    return {"loss_real": nn.softplus(-real), "loss_fake": nn.softplus(fake), "accuracy": accuracy}


def gen_loss(params, batch, rng):
    """Return the loss of the generator, which is small if the discriminator classifies its
    images as real.
    """
    return {
        "loss_fool": nn.softplus(-discriminate(params, generate(params, rng, len(batch["image"]))))
    }


def main(max_iters: int = 6000, work_dir: str = "work_dirs/gan") -> Runner:
    """Train and return the Runner."""
    adam = dict(type="Adam", betas=(0.5, 0.99))
    runner = Runner(
        model=FunctionalModel(init, loss={"disc": disc_loss, "gen": gen_loss}),
        work_dir=work_dir,
        train_dataloader=dict(batch_size=64, dataset=dict(type="Digits", split="train", flat=True)),
        train_cfg=dict(by_epoch=False, max_iters=max_iters, phases=[("disc", 2), ("gen", 1)]),
        optim_wrapper=dict(
            disc=dict(optimizer={**adam, "lr": 4e-4}), gen=dict(optimizer={**adam, "lr": 1e-3})
        ),
        param_scheduler=dict(
            disc=dict(type="ConstantLR", factor=1.0, by_epoch=False),
            gen=dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=max_iters // 10 + 1),
        ),
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=100),
            checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1000),
        ),
    )
    runner.train()
    return runner


def save_samples(runner: Runner, size: int = 8) -> str:
    """Save a `size` x `size` grid of generated digits as a PNG and return its path."""
    from PIL import Image

    images = np.asarray(generate(runner.state.params, jax.random.key(0), size * size)).reshape(
        size, size, 8, 8
    )
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=0.5)
    grid = (padded.transpose(0, 2, 1, 3).reshape(10 * size, 10 * size) * 255).astype(np.uint8)
    path = os.path.join(runner.work_dir, "generated.png")
    Image.fromarray(grid).resize((60 * size, 60 * size), Image.Resampling.NEAREST).save(path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-iters", type=int, default=6000)
    parser.add_argument("--work-dir", default="work_dirs/gan")
    args = parser.parse_args()
    runner = main(args.max_iters, args.work_dir)
    try:
        print(save_samples(runner))
    except ImportError:
        print("Install Pillow to save the generated digits: pip install 'jengine[examples]'")
