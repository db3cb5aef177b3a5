"""Define the reference: a well-written training loop with plain optax, Orbax and a log file.

It has one jitted step with donated state and the schedule inside, prefetches the next batch, and
blocks only to log the loss. Parameter averages and checkpoints are implemented in the simplest way
that does not block the loop.
"""

import datetime
import functools
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

EMA_MOMENTUM = 0.001


def build_step(case, ema):
    """Return the jitted `step(state, batch) -> (state, loss)`."""
    tx = case.tx()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        loss_fn = jax.value_and_grad(case.loss, has_aux=True)
        (loss, batch_stats), grads = loss_fn(state["params"], state["batch_stats"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        next_state = dict(
            params=optax.apply_updates(state["params"], updates),
            batch_stats=batch_stats,
            opt_state=opt_state,
        )
        if ema:
            next_state["ema"] = optax.incremental_update(
                next_state["params"], state["ema"], EMA_MOMENTUM
            )
        return next_state, loss

    return step


class HandWrittenLoop:
    """Run the hand-written loop and hold its state.

    Args:
      case: the `Case` to train.
      work_dir: directory of the log and the checkpoints.
      log_every: iterations between log lines, 0 for none.
      ema: whether to average the parameters.
      save_every: iterations between checkpoints, 0 for none.
      batches: a sequence of batches; by default the batches of the case.
    """

    def __init__(self, case, work_dir, log_every=0, ema=False, save_every=0, batches=None):
        self.batches = case.batches() if batches is None else batches
        self.step = build_step(case, ema)
        params, batch_stats = case.init(self.batches[0])
        self.state = dict(params=params, batch_stats=batch_stats, opt_state=case.tx().init(params))
        if ema:
            self.state["ema"] = jax.tree.map(jnp.copy, params)
        self.put = (lambda batch: batch) if jax.default_backend() == "cpu" else jax.device_put
        self._log_every = log_every
        self._save_every = save_every
        pathlib.Path(work_dir).mkdir(parents=True, exist_ok=True)
        self._log = open(pathlib.Path(work_dir) / "log.jsonl", "w", buffering=1)  # noqa: SIM115 - see close
        self._terminal = open(os.devnull, "w")  # noqa: SIM115 - see close
        self._manager = _make_manager(work_dir) if save_every else None
        self.iter = 0

    def run(self, iters):
        """Train for `iters` more iterations and wait for the last."""
        step = self.step
        put = self.put
        batches = self.batches
        num_batches = len(self.batches)
        state = self.state
        next_batch = put(batches[self.iter % num_batches])
        losses = []
        for i in range(self.iter + 1, self.iter + iters + 1):
            batch = next_batch
            next_batch = put(batches[i % num_batches])
            state, loss = step(state, batch)
            if self._log_every:
                losses.append(loss)
                if i % self._log_every == 0:
                    self._write(i, float(np.mean(jax.device_get(losses))))
                    losses.clear()
            if self._save_every and i % self._save_every == 0:
                self._save(i, state)
        self.state = jax.block_until_ready(state)
        self.iter = self.iter + iters

    def close(self):
        """Close the files and finish pending checkpoints."""
        self._log.close()
        self._terminal.close()
        if self._manager is not None:
            self._manager.close()

    def _write(self, i, loss):
        print(
            f"{datetime.datetime.now():%H:%M:%S} step {i} loss {loss:.4f}",
            file=self._terminal,
            flush=True,
        )
        self._log.write(json.dumps({"step": i, "loss": loss}) + "\n")

    def _save(self, i, state):
        import orbax.checkpoint as ocp

        self._manager.save(i, args=ocp.args.StandardSave(state))


def _make_manager(work_dir):
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    return ocp.CheckpointManager(pathlib.Path(work_dir).absolute() / "checkpoints", options=options)
