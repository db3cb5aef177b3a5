"""Train with `fit` of Keras 3 on JAX."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from keras import layers, ops

from benchmarks.peers.whole.tasks import has_decay, iterate, read_arguments, write_result

name, task, data, directory = read_arguments()


class Tokens(layers.Layer):
    """Add positions, and a class token if asked."""

    def __init__(self, count, with_class):
        super().__init__()
        self.with_class = with_class
        self.pos = self.add_weight(shape=(1, count, 64), initializer="random_normal", name="pos")
        if with_class:
            self.cls = self.add_weight(shape=(1, 1, 64), initializer="zeros", name="cls")

    def call(self, x):
        """Return tokens f[B, N, 64]."""
        if self.with_class:
            shape = (ops.shape(x)[0], 1, 64)
            x = ops.concatenate([ops.broadcast_to(self.cls, shape), x], axis=1)
        return x + self.pos


def block(x, hidden, causal):
    """Return tokens after a pre-norm transformer block."""
    y = layers.LayerNormalization(epsilon=1e-6)(x)
    x = x + layers.MultiHeadAttention(4, 16)(y, y, use_causal_mask=causal)
    y = layers.LayerNormalization(epsilon=1e-6)(x)
    return x + layers.Dense(64)(layers.Dense(hidden, "gelu")(y))


def make_model():
    """Return the network of the task."""
    if name == "cnn":
        x = inputs = keras.Input((8, 8, 1))
        for stage, width in enumerate((32, 64)):
            for depth in range(2):
                stride = 2 if stage > 0 and depth == 0 else 1
                x = layers.Conv2D(width, 3, stride, padding="same", use_bias=False)(x)
                x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
        x = layers.Dropout(0.1)(layers.GlobalAveragePooling2D()(x))
        return keras.Model(inputs, layers.Dense(10)(x))
    if name == "vit":
        x = inputs = keras.Input((8, 8, 1))
        x = layers.Reshape((16, 64))(layers.Conv2D(64, 2, 2)(x))
        x = Tokens(17, with_class=True)(x)
        for _ in range(4):
            x = block(x, 128, causal=False)
        x = layers.LayerNormalization(epsilon=1e-6)(x)
        return keras.Model(inputs, layers.Dense(10)(x[:, 0]))
    inputs = keras.Input((64,), dtype="int32")
    x = Tokens(64, with_class=False)(layers.Embedding(256, 64)(inputs))
    for _ in range(2):
        x = block(x, 192, causal=True)
    x = layers.LayerNormalization(epsilon=1e-6)(x)
    return keras.Model(inputs, layers.Dense(256, use_bias=False)(x))


class LogLoss(keras.callbacks.Callback):
    """Log the mean loss, which `fit` computes, as often as the others do."""

    def __init__(self):
        super().__init__()
        self.file = (directory / "log.jsonl").open("w", buffering=1)

    def on_train_batch_end(self, batch, logs=None):
        """Write a line if one is due."""
        if (batch + 1) % task.log_every == 0:
            self.file.write(f'{{"batch": {batch + 1}, "loss": {float(logs["loss"])}}}\n')


keras.utils.set_random_seed(0)
model = make_model()
schedule = keras.optimizers.schedules.CosineDecay(
    0.0, task.steps - task.warmup, warmup_target=task.rate, warmup_steps=task.warmup
)
optimizer = keras.optimizers.AdamW(
    schedule,
    weight_decay=task.decay,
    beta_1=task.betas[0],
    beta_2=task.betas[1],
    global_clipnorm=1.0,
)
optimizer.exclude_from_weight_decay(
    [weight for weight in model.weights if not has_decay(weight.path, len(weight.shape))]
)
if name == "text":
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics, monitor = [], "val_loss"
    train, test = (lambda y: y), data.test[1]
else:
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=task.smoothing)
    metrics, monitor = ["accuracy"], "val_accuracy"
    train, test = (lambda y: np.eye(10, dtype=np.float32)[y]), np.eye(10)[data.test[1]]
model.compile(optimizer, loss, metrics=metrics)
directory.mkdir(parents=True, exist_ok=True)
history = model.fit(
    ((x, train(y)) for x, y in iterate(data, task)),
    steps_per_epoch=task.val_every,
    epochs=task.steps // task.val_every,
    validation_data=(data.test[0], test),
    validation_batch_size=128,
    verbose=0,
    callbacks=[
        LogLoss(),
        keras.callbacks.ModelCheckpoint(directory / "{epoch}.keras", save_freq=task.save_every),
    ],
)
write_result(directory, history.history[monitor][-1])
