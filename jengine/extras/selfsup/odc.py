"""ODC's memory during training: centroids, small clusters and class weights."""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jengine.config.annotations import Count, Index, NonNegative
from jengine.config.errors import ArgumentError
from jengine.config.registry import HOOKS
from jengine.extras.selfsup.clustering import class_weights, describe_clusters
from jengine.extras.selfsup.memory_bank import (
    MemoryBank,
    count_labels,
    deal_with_small_clusters,
    update_centroids,
)
from jengine.extras.selfsup.model_entries import (
    drop_replica_axis,
    find_memory_bank,
    find_state_entry,
    replace_memory_bank,
    replace_state_entry,
)
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol

_SAVE_INTERVAL = 10  # epochs between files of labels, as in MMSelfSup


@HOOKS.register_module()
@dataclasses.dataclass(eq=False, repr=False)
class ODCHook(Hook):
    """Hook that maintains the `MemoryBank` in the model's state, by compiled functions on the
    bank's device.

    The model updates the bank's features and labels in the loss (`update_samples`). The host never
    waits for the device, except for the log line every `evaluate_interval` iterations. Every ten
    epochs the labels are written to `cluster_epoch_{n}.npy` in the work dir, where n is the number
    of completed epochs.

    >>> hook = ODCHook(
    ...     centroids_update_interval=10,
    ...     deal_with_small_clusters_interval=1,
    ...     evaluate_interval=50,
    ...     reweight=True,
    ...     reweight_pow=0.5,
    ... )

    Args:
      centroids_update_interval: number of iterations between centroid updates.
      deal_with_small_clusters_interval: number of iterations between searches for small clusters.
      evaluate_interval: number of iterations between log lines about the cluster sizes.
      reweight: set the model's state entry `loss_weight` f32[k] after each iteration, to weights
        that decrease with the cluster size.
      reweight_pow: exponent of the weights: 0 for equal weights, 1 for weights inverse to the size.
      dist_mode: must be True; the memory is part of the training state on any number of devices.
      min_cluster: smallest cluster size; smaller clusters are refilled.

    Raises:
      ArgumentError: `dist_mode` is False; at the beginning of the run, if the model's state has no
        memory bank, one that is too small for the clusters, or no `loss_weight`.
    """

    centroids_update_interval: Count
    deal_with_small_clusters_interval: Count
    evaluate_interval: Count
    reweight: bool
    reweight_pow: NonNegative
    dist_mode: bool = True
    min_cluster: Index = 20

    def __post_init__(self) -> None:
        if not self.dist_mode:
            raise ArgumentError(
                f"ODCHook: `dist_mode` must be True, got {self.dist_mode}; its memory is part of "
                "the training state"
            )
        # Without donation: a bank's buffers may still be read by the step that uses it.
        self._update_centroids = jax.jit(update_centroids)
        refill = functools.partial(deal_with_small_clusters, min_cluster=self.min_cluster)
        power = self.reweight_pow
        self._deal_with_small_clusters = jax.jit(refill)
        self._class_weights = jax.jit(lambda bank: class_weights(count_labels(bank), power))
        self._count_labels = jax.jit(count_labels)

    def before_run(self, runner: RunnerProtocol) -> None:
        """Check that the model's state has the required entries."""
        if runner.train_loop is None or runner.state is None:
            return
        bank = self._bank(runner)
        # Otherwise the hook would split clusters in every iteration, as there are not enough
        # samples for all.
        num_samples = len(bank.features)
        num_clusters = len(bank.centroids)
        if num_samples < self.min_cluster * num_clusters:
            raise ArgumentError(
                f"ODCHook: `min_cluster` must be at most {num_samples // num_clusters} for "
                f"{num_samples} samples in {num_clusters} clusters, got {self.min_cluster}"
            )
        if self.reweight:
            find_state_entry(runner.state.model_state, "loss_weight", type(self).__name__)

    def next_step(self, runner: RunnerProtocol, step: int) -> float:
        """Return the next step at which one of the intervals ends."""
        if self.reweight:
            return step
        intervals = (
            self.centroids_update_interval,
            self.deal_with_small_clusters_interval,
            self.evaluate_interval,
        )
        return min(self.next_multiple(n, step) for n in intervals)

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Run the tasks whose interval ends with this iteration."""
        if self.every_n_train_iters(runner, self.centroids_update_interval):
            # The order of the original hook: clusters are compared by centroids, and the weights by
            # the sizes after both.
            self.update_centroids(runner)
        if self.every_n_train_iters(runner, self.deal_with_small_clusters_interval):
            self.deal_with_small_clusters(runner)
        if self.reweight:
            self.set_reweight(runner)
        if self.every_n_train_iters(runner, self.evaluate_interval):
            self.evaluate(runner)

    def after_train_epoch(self, runner: RunnerProtocol) -> None:
        """Write the labels every ten epochs."""
        if self.every_n_epochs(runner, _SAVE_INTERVAL):
            # on all processes, between which the first replica is sent
            labels = np.asarray(self._bank(runner).labels)
            if runner.is_main_process:
                path = os.path.join(runner.local_dir, f"cluster_epoch_{runner.epoch + 1}.npy")
                np.save(path, labels.astype(np.int64))

    def update_centroids(self, runner: RunnerProtocol) -> None:
        """Set the centroids to the means of their features."""
        self._set_bank(runner, self._update_centroids(self._bank(runner)))

    def deal_with_small_clusters(self, runner: RunnerProtocol) -> None:
        """Empty small clusters and refill them with halves of large ones."""
        rng = jax.random.fold_in(runner.state.key, runner.iter)
        self._set_bank(runner, self._deal_with_small_clusters(self._bank(runner), rng))

    def set_reweight(self, runner: RunnerProtocol) -> None:
        """Set the class weights from the cluster sizes."""
        weights = self._class_weights(self._bank(runner))
        name = type(self).__name__
        model_state = replace_state_entry(runner.state.model_state, "loss_weight", weights, name)
        runner.state = runner.state.replace(model_state=model_state)

    def evaluate(self, runner: RunnerProtocol) -> None:
        """Log the cluster sizes."""
        runner.logger.info(describe_clusters(np.asarray(self._count_labels(self._bank(runner)))))

    def _bank(self, runner: RunnerProtocol) -> MemoryBank:
        bank = find_memory_bank(runner.state.model_state, type(self).__name__)
        return drop_replica_axis(bank, runner.strategy)

    def _set_bank(self, runner: RunnerProtocol, bank: MemoryBank) -> None:
        model_state = replace_memory_bank(runner.state.model_state, bank, type(self).__name__)
        runner.state = runner.state.replace(model_state=model_state)
