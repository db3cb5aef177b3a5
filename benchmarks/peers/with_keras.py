"""Measure Keras 3 on JAX: `fit` with a logging callback."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras

from benchmarks.peers import bare_jax
from benchmarks.peers.common import (
    CLASSES,
    FEATURES,
    HIDDEN,
    LOG_EVERY,
    MOMENTUM,
    RATE,
    Log,
    compare,
)


class LogLoss(keras.callbacks.Callback):
    """Log the mean loss, which `fit` computes, every `LOG_EVERY` batches."""

    def __init__(self):
        super().__init__()
        self._log = Log()

    def on_train_batch_end(self, batch, logs=None):
        """Write a log line if one is due."""
        if (batch + 1) % LOG_EVERY == 0:
            self._log.write(batch + 1, float(logs["loss"]))


def run(data):
    """Train on the data once."""
    keras.utils.clear_session()
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(HIDDEN, "tanh"), keras.layers.Dense(CLASSES)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(RATE, momentum=MOMENTUM), loss)
    model.fit(iter(data), steps_per_epoch=len(data), epochs=1, verbose=0, callbacks=[LogLoss()])


compare({"bare": bare_jax.LOOP, "trainer": (run, lambda x, y: (x, y))}, keras.__version__)
