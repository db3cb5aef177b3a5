"""Clusters the features of the training data, whose clusters are the labels of the next epochs."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.contrib.selfsup.clustering import build_clustering, class_weights, describe_clusters
from jengine.contrib.selfsup.entries import memory_bank, put_beside, state_entry, with_memory_bank, with_state_entry
from jengine.contrib.selfsup.features import FeatureExtractor
from jengine.contrib.selfsup.memory_bank import fill_bank
from jengine.contrib.selfsup.reset import build_reset
from jengine.data import build_dataloader
from jengine.errors import config_path
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS


@HOOKS.register_module()
class DeepClusterHook(Hook):
    """Gives the training data labels by clustering its features, before training and every `interval` epochs.

    One clustering: features of all samples in inference mode (the entry `features` of the model's predictions);
    k-means on the host; the labels go to the dataset (`assign_labels`, see `PseudoLabelDataset`), and to
    `cluster_epoch_{n}.npy` in the work dir, n the epochs done; the head starts anew, for the clusters of one time have
    nothing to do with those of another, and so does the optimizer's state of it. All of it is a function of the state
    and the seed, and a resumed run reads its labels back from the file.

    Args:
      extract_dataloader: config of a loader over all training samples in their order, or such a loader.
      clustering: `dict(type='Kmeans', k=..., pca_dim=...)`.
      unif_sampling: the next epoch visits all clusters equally often; needs `sampler=dict(type='DeepClusterSampler')`.
      reweight: set the model's state entry `loss_weight` f32[k] to weights that fall with the clusters' sizes.
      reweight_pow: how fast they fall: 0 not at all, 1 inversely.
      init_memory: fill the model's `MemoryBank`, for `ODCHook`.
      initial: cluster before training.
      interval: epochs between clusterings.
      seed: of the clusterings; None: the run's.
      head: the component of the parameters' paths that names the head.

    Raises:
      AssertionError: at the beginning of the run, if the dataset, the sampler, the model's state or its parameters lack
        what is asked for.
    """

    def __init__(
        self,
        extract_dataloader: Any,
        clustering: Mapping[str, Any],
        unif_sampling: bool,
        reweight: bool,
        reweight_pow: float,
        init_memory: bool = False,
        initial: bool = True,
        interval: int = 1,
        seed: int | None = None,
        head: str = "head",
    ) -> None:
        self.extract_dataloader = extract_dataloader
        with config_path("clustering"):
            self.clustering = build_clustering(clustering)
        self.unif_sampling = unif_sampling
        self.reweight = reweight
        self.reweight_pow = reweight_pow
        self.init_memory = init_memory
        self.initial = initial
        self.interval = interval
        self.seed = seed
        self.head = head
        self._clustered: int | None = None  # epochs done at the clustering whose labels are in force

    # --- When. ---

    def before_run(self, runner: Runner) -> None:
        """Builds what a clustering needs, and holds that everything is there."""
        if runner.train_loop is None:
            return
        name = type(self).__name__
        if not runner.train_loop.by_epoch:
            raise AssertionError(f"{name} clusters between epochs; train with train_cfg=dict(by_epoch=True, ...)")
        self._data: Any = runner.train_dataloader
        sampler = getattr(self._data, "sampler", None)  # which an iterable loader lacks
        for part, method in ((self._data.dataset, "assign_labels"), (sampler, "set_uniform_indices")):
            needed = method == "assign_labels" or self.unif_sampling
            if needed and not hasattr(part, method):
                kinds = {"assign_labels": "PseudoLabelDataset", "set_uniform_indices": "DeepClusterSampler"}
                raise AssertionError(f"{name}: {type(part).__name__} has no {method}(); use a {kinds[method]}")
        assert runner.state is not None
        if self.reweight:
            state_entry(runner.state.model_state, "loss_weight", name)
        if self.init_memory:
            memory_bank(runner.state.model_state, name)
        self._reset = build_reset(runner.model, runner.optim_wrapper, runner.state, self.head)
        self._extract = FeatureExtractor(runner.model)
        with config_path("extract_dataloader"):
            self._loader = build_dataloader(self.extract_dataloader, train=False)
        self._example = next(iter(self._data))
        self._data.set_epoch(0)

    def before_train(self, runner: Runner) -> None:
        """Clusters, or goes on with the labels of the clustering before a restart."""
        if self._clustered is not None:
            path = self._path(runner, self._clustered)
            if os.path.exists(path):
                self._serve(np.load(path), self._clustered)
                return
            runner.logger.warning(f"{path} is gone, with the labels that this run was trained on: they are made anew.")
            self._cluster(runner, runner.epoch)
        elif self.initial:
            self._cluster(runner, runner.epoch)

    def after_train_epoch(self, runner: Runner) -> None:
        """Clusters for the next epochs when it is time."""
        if self.every_n_epochs(runner, self.interval):
            self._cluster(runner, runner.epoch + 1)

    # --- What. ---

    def _cluster(self, runner: Runner, epoch: int) -> None:
        """One clustering, whose labels hold from epoch number `epoch` on."""
        state = runner.state
        assert state is not None
        features = self._extract(state.params, state.model_state, self._loader)
        seed = runner.seed if self.seed is None else self.seed
        drawn = np.random.RandomState([seed % 2**32, epoch]).randint(1234)
        labels = self.clustering(features, int(drawn))
        if runner.is_main_process:
            _save(self._path(runner, epoch), labels)
        self._clustered = epoch
        self._serve(labels, epoch)

        counts = np.bincount(labels, minlength=self.clustering.k)
        runner.logger.info(describe_clusters(counts))
        model_state = state.model_state
        if self.reweight:
            weights = class_weights(counts, self.reweight_pow)
            old = state_entry(model_state, "loss_weight", type(self).__name__)
            model_state = with_state_entry(model_state, "loss_weight", put_beside(weights, old))
        if self.init_memory:
            bank = memory_bank(model_state, type(self).__name__)
            filled = put_beside(fill_bank(bank, features, labels), bank)
            model_state = with_memory_bank(model_state, filled)
        rng = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 2), jnp.uint32(epoch))
        runner.state = self._reset(state.replace(model_state=model_state), rng, self._example)

    def _serve(self, labels: np.ndarray, epoch: int) -> None:
        """Hands the labels to the data."""
        self._data.dataset.assign_labels(labels)
        if self.unif_sampling:
            self._data.sampler.set_uniform_indices(labels, self.clustering.k, epoch=epoch)
        if hasattr(self._data, "close"):
            self._data.close()  # what was read ahead has the labels of before

    @staticmethod
    def _path(runner: Runner, epoch: int) -> str:
        return os.path.join(runner.work_dir, f"cluster_epoch_{epoch}.npy")

    # --- Over a restart. ---

    def state_dict(self) -> dict[str, Any]:
        """Which clustering is in force."""
        return {} if self._clustered is None else {"clustered": self._clustered}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back which clustering is in force."""
        self._clustered = state_dict.get("clustered")


def _save(path: str, labels: np.ndarray) -> None:
    """Writes whole or not at all."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    np.save(f"{path}.tmp.npy", labels)
    os.replace(f"{path}.tmp.npy", path)
