"""Learn features of the handwritten digits without labels: SimSiam with LARS, in the form of
MMSelfSup's configs.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jengine.extras.selfsup import random_view


class MLP(nn.Module):
    """Apply layers with batch norms, called `bn0`, `bn1`, ..."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return f[B, widths[-1]]."""
        for i, width in enumerate(self.widths):
            x = nn.Dense(width, use_bias=False, name=f"fc{i}")(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name=f"bn{i}")(x)
            x = nn.relu(x) if i < len(self.widths) - 1 else x
        return x


class SimSiam(nn.Module):
    """Encode two random views of each image, and predict the projection of one from that of the
    other.
    """

    def setup(self) -> None:
        """Create the modules; rules of the optimizer match their names."""
        self.backbone, self.neck, self.predictor = MLP((256, 16)), MLP((128, 128)), MLP((32, 128))

    def __call__(self, image: jax.Array, train: bool = False) -> dict[str, jax.Array]:
        """Return the features f[B, 16] of images f[B, 8, 8, 1]; in training the loss f[B] of two
        views.
        """
        if not train:
            features = self.backbone(image.reshape(len(image), -1), train)
            return {
                "features": self.predictor(self.neck(features, train), train)
                if self.is_initializing()
                else features
            }
        views = [
            random_view(self.make_rng("view"), image).reshape(len(image), -1) for _ in range(2)
        ]
        projections = [self.neck(self.backbone(view, train), train) for view in views]
        predictions = [self.predictor(projection, train) for projection in projections]
        first, second = (
            cosine(predictions[i], jax.lax.stop_gradient(projections[1 - i])) for i in range(2)
        )
        return {"loss": -(first + second) / 2}


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the cosine similarities f[B] of vectors f[B, D]."""
    return (a * b).sum(-1) / (jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1) + 1e-8)


def read_loss(outputs: dict[str, jax.Array], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the loss that the network computed."""
    return outputs


model = dict(type="LinenModel", module=dict(type=SimSiam), loss=read_loss, rngs=["view"])
train_dataloader = dict(
    batch_size=128,
    dataset=dict(type="Digits", split="train"),
    sampler=dict(type="DefaultSampler", shuffle=True),
)

max_epochs = 60
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="LARS", lr=1.0, momentum=0.9, weight_decay=1e-6),
    paramwise_cfg=dict(
        custom_keys={
            "bn": dict(decay_mult=0.0, lars_exclude=True),  # no decay, and no trust ratio
            "predictor": dict(fix_lr=True),
        }
    ),
    accumulative_counts=2,  # an update for each 256 images
)
param_scheduler = [
    dict(
        type="LinearLR",
        start_factor=0.01,
        by_epoch=True,
        begin=0,
        end=4,
        convert_to_iter_based=True,
    ),
    dict(type="CosineAnnealingLR", by_epoch=True, begin=4, end=max_epochs),
]
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=max_epochs)
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=10),
    checkpoint=dict(type="CheckpointHook", interval=10, max_keep_ckpts=3),
)
custom_hooks = [dict(type="SimSiamHook", fix_pred_lr=True, lr=1.0)]
randomness = dict(seed=0)
