"""Keeps the memory of ODC in order while training goes on: centroids, small clusters, weights of classes."""

import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jengine.contrib.selfsup.clustering import class_weights, describe_clusters
from jengine.contrib.selfsup.entries import memory_bank, put_beside, state_entry, with_memory_bank, with_state_entry
from jengine.contrib.selfsup.memory_bank import MemoryBank, count_labels, deal_with_small_clusters, update_centroids
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS

_SAVE_INTERVAL = 10  # epochs between files of labels, as in MMSelfSup


@HOOKS.register_module()
class ODCHook(Hook):
    """Works on the `MemoryBank` in the model's state after each iteration, with compiled functions on its device.

    The model itself moves the bank's features and labels in its loss (`update_samples`). Nothing of this waits for the
    device, but for the line of the log every `evaluate_interval` iterations. Every ten epochs the labels are written to
    `cluster_epoch_{n}.npy` in the work dir, n the epochs done.

    Args:
      centroids_update_interval: iterations from one update of the centroids to the next.
      deal_with_small_clusters_interval: iterations from one search for small clusters to the next.
      evaluate_interval: iterations between lines of the log on the sizes of clusters.
      reweight: set the model's state entry `loss_weight` f32[K] after each iteration, to weights that fall with the
        clusters' sizes.
      reweight_pow: how fast they fall: 0 not at all, 1 inversely.
      dist_mode: only True: the memory is part of the training state, on however many devices.
      min_cluster: clusters of fewer samples are dealt with.

    Raises:
      AssertionError: `dist_mode` is False; at the beginning of the run, if the model's state has no memory bank, one
        too small for its clusters, or no `loss_weight`.
    """

    def __init__(
        self,
        centroids_update_interval: int,
        deal_with_small_clusters_interval: int,
        evaluate_interval: int,
        reweight: bool,
        reweight_pow: float,
        dist_mode: bool = True,
        min_cluster: int = 20,
    ) -> None:
        if not dist_mode:
            raise AssertionError("ODCHook: dist_mode=False is not offered; its memory lies in the training state")
        self.centroids_update_interval = centroids_update_interval
        self.deal_with_small_clusters_interval = deal_with_small_clusters_interval
        self.evaluate_interval = evaluate_interval
        self.reweight = reweight
        self.reweight_pow = reweight_pow
        self.min_cluster = min_cluster
        # Not donated: until the step that used it is done, a bank's buffers may be read.
        self._update_centroids = jax.jit(update_centroids)
        self._deal = jax.jit(functools.partial(deal_with_small_clusters, min_cluster=min_cluster))
        self._weigh = jax.jit(lambda bank: class_weights(count_labels(bank), reweight_pow))
        self._count = jax.jit(count_labels)

    def before_run(self, runner: Runner) -> None:
        """Holds that the model has what is needed."""
        if runner.train_loop is None or runner.state is None:
            return
        bank = self._bank(runner)
        if len(bank.features) < self.min_cluster * len(bank.centroids):
            raise AssertionError(
                f"ODCHook: {len(bank.features)} samples are too few for {len(bank.centroids)} clusters of "
                f"min_cluster={self.min_cluster} or more"
            )
        if self.reweight:
            state_entry(runner.state.model_state, "loss_weight", type(self).__name__)

    def next_step(self, runner: Runner, step: int) -> float:
        """Return the next step with something to do."""
        if self.reweight:
            return step
        intervals = (self.centroids_update_interval, self.deal_with_small_clusters_interval, self.evaluate_interval)
        return min(self.next_multiple(n, step) for n in intervals)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        """Does what is due after this iteration."""
        if self.every_n_train_iters(runner, self.centroids_update_interval):
            self.update_centroids(runner)
        if self.every_n_train_iters(runner, self.deal_with_small_clusters_interval):
            self.deal_with_small_clusters(runner)
        if self.reweight:
            self.set_reweight(runner)
        if self.every_n_train_iters(runner, self.evaluate_interval):
            self.evaluate(runner)

    def after_train_epoch(self, runner: Runner) -> None:
        """Writes the labels every ten epochs."""
        if self.every_n_epochs(runner, _SAVE_INTERVAL) and runner.is_main_process:
            path = os.path.join(runner.work_dir, f"cluster_epoch_{runner.epoch + 1}.npy")
            np.save(path, np.asarray(self._bank(runner).labels).astype(np.int64))

    def update_centroids(self, runner: Runner) -> None:
        """Moves the centroids to the means of their features."""
        self._set_bank(runner, self._update_centroids(self._bank(runner)))

    def deal_with_small_clusters(self, runner: Runner) -> None:
        """Empties small clusters and fills them with halves of large ones."""
        assert runner.state is not None
        rng = jax.random.fold_in(runner.state.key, runner.iter)
        self._set_bank(runner, self._deal(self._bank(runner), rng))

    def set_reweight(self, runner: Runner) -> None:
        """Sets the weights of classes from the sizes of clusters."""
        assert runner.state is not None
        model_state = runner.state.model_state
        old = state_entry(model_state, "loss_weight", type(self).__name__)
        weights = put_beside(self._weigh(self._bank(runner)), old)
        runner.state = runner.state.replace(model_state=with_state_entry(model_state, "loss_weight", weights))

    def evaluate(self, runner: Runner) -> None:
        """Writes a line on the sizes of clusters to the log."""
        runner.logger.info(describe_clusters(np.asarray(self._count(self._bank(runner)))))

    def _bank(self, runner: Runner) -> MemoryBank:
        assert runner.state is not None
        return memory_bank(runner.state.model_state, type(self).__name__)

    def _set_bank(self, runner: Runner, bank: MemoryBank) -> None:
        assert runner.state is not None
        placed = put_beside(bank, self._bank(runner))
        runner.state = runner.state.replace(model_state=with_memory_bank(runner.state.model_state, placed))
