"""Adversarial training on the digits: two optimizers, each with its own rate and schedule, in one compiled step.

    python examples/gan.py

Each iteration lets the discriminator act twice and the generator once. At the end a sheet of generated digits is
written to the work dir, if Pillow is installed.
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
    """Noise f[B, 16] to images f[B, 64] in 0..1."""

    @nn.compact
    def __call__(self, noise):
        """Images of noise."""
        x = nn.leaky_relu(nn.LayerNorm()(nn.Dense(128)(noise)))
        x = nn.leaky_relu(nn.LayerNorm()(nn.Dense(128)(x)))
        return nn.sigmoid(nn.Dense(64)(x))


class Discriminator(nn.Module):
    """Images f[B, 64] to logits f[B]: how real they look."""

    @nn.compact
    def __call__(self, image):
        """Logits of images."""
        x = nn.leaky_relu(nn.Dense(128)(image), 0.2)
        x = nn.leaky_relu(nn.Dense(128)(x), 0.2)
        return nn.Dense(1)(x)[:, 0]


GENERATOR, DISCRIMINATOR = Generator(), Discriminator()


def init(rng):
    """The parameters of both, under the names of their optimizers."""
    return {
        "gen": GENERATOR.init(rng, jnp.zeros((1, LATENT)))["params"],
        "disc": DISCRIMINATOR.init(rng, jnp.zeros((1, 64)))["params"],
    }


def generate(params, rng, count):
    """Images f[count, 64] from fresh noise."""
    return GENERATOR.apply({"params": params["gen"]}, jax.random.normal(rng, (count, LATENT)))


def looks_real(params, image):
    """The discriminator's logits f[B]."""
    return DISCRIMINATOR.apply({"params": params["disc"]}, image)


def disc_loss(params, batch, rng):
    """What the discriminator minimises: telling real from generated."""
    real, fake = looks_real(params, batch["image"]), looks_real(params, generate(params, rng, len(batch["image"])))
    accuracy = 0.5 * ((real > 0).mean() + (fake < 0).mean())
    return {"loss_real": nn.softplus(-real), "loss_fake": nn.softplus(fake), "told_apart": accuracy}


def gen_loss(params, batch, rng):
    """What the generator minimises: being told from real."""
    return {"loss_fool": nn.softplus(-looks_real(params, generate(params, rng, len(batch["image"]))))}


def main(max_iters: int = 6000, work_dir: str = "work_dirs/gan") -> Runner:
    """Trains and returns the Runner."""
    adam = dict(type="Adam", betas=(0.5, 0.99))
    runner = Runner(
        model=FunctionalModel(init, loss={"disc": disc_loss, "gen": gen_loss}),
        work_dir=work_dir,
        train_dataloader=dict(batch_size=64, dataset=dict(type="Digits", split="train", flat=True)),
        train_cfg=dict(by_epoch=False, max_iters=max_iters, phases=[("disc", 2), ("gen", 1)]),
        optim_wrapper=dict(disc=dict(optimizer={**adam, "lr": 4e-4}), gen=dict(optimizer={**adam, "lr": 1e-3})),
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


def write_sheet(runner: Runner, rows: int = 8) -> str:
    """Writes a square of generated digits as a PNG and returns its path."""
    from PIL import Image

    images = np.asarray(generate(runner.state.params, jax.random.key(0), rows * rows)).reshape(rows, rows, 8, 8)
    framed = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=0.5)
    sheet = (framed.transpose(0, 2, 1, 3).reshape(10 * rows, 10 * rows) * 255).astype(np.uint8)
    path = os.path.join(runner.work_dir, "generated.png")
    Image.fromarray(sheet).resize((60 * rows, 60 * rows), Image.Resampling.NEAREST).save(path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-iters", type=int, default=6000)
    parser.add_argument("--work-dir", default="work_dirs/gan")
    args = parser.parse_args()
    trained = main(args.max_iters, args.work_dir)
    try:
        print(write_sheet(trained))
    except ImportError:
        print("pip install pillow to see what was generated")
