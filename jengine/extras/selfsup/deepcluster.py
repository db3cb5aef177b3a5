"""Training on clusters of the features as labels."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from optax import OptState

from jengine.config.annotations import Count, NonNegative
from jengine.config.errors import ArgumentError, closest, config_path
from jengine.config.plugins import load_provided
from jengine.config.registry import HOOKS
from jengine.data.host_entries import select_arrays
from jengine.extras.selfsup.clustering import build_clustering, class_weights, describe_clusters
from jengine.extras.selfsup.features import Extractor
from jengine.extras.selfsup.memory_bank import fill_bank
from jengine.extras.selfsup.model_entries import (
    drop_replica_axis,
    find_memory_bank,
    find_state_entry,
    replace_memory_bank,
    replace_state_entry,
    save_array,
)
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.model.model import Model, PyTree
from jengine.optim.wrapper import OptimWrapper
from jengine.optim.wrapper_dict import OptimWrapperDict
from jengine.train.state import TrainState


@HOOKS.register_module()
@dataclasses.dataclass(eq=False, repr=False)
class DeepClusterHook(Hook):
    """Hook that labels the training data by clustering features, before training and every
    `interval` epochs.

    Each clustering computes the features of all samples in inference mode (the entry `features` in
    the model's predictions) and runs k-means on the host. The labels go to the dataset
    (`assign_labels`, see `PseudoLabelDataset`) and to `cluster_epoch_{n}.npy` in the work dir,
    where n is the number of completed epochs. The head and the head's optimizer state are
    reinitialized, because clusters from different clusterings do not correspond. All of this
    depends on the state and the seed only; a resumed run reads the labels from the file.

    >>> hook = DeepClusterHook(
    ...     dict(batch_size=256, dataset=dict(type="MyData")),
    ...     dict(type="Kmeans", k=100),
    ...     unif_sampling=True,
    ...     reweight=False,
    ...     reweight_pow=0.5,
    ... )

    Args:
      extract_dataloader: loader over all training samples in order, or a config for one.
      clustering: `dict(type='Kmeans', k=..., pca_dim=...)`, or of type 'PIC'.
      unif_sampling: visit all clusters equally often in the next epoch; needs
        `sampler=dict(type='DeepClusterSampler')`.
      reweight: set the model's state entry `loss_weight` f32[k] to weights that decrease with the
        cluster size.
      reweight_pow: exponent of the weights: 0 for equal weights, 1 for weights inverse to the size.
      init_memory: fill the model's `MemoryBank`, for `ODCHook`.
      initial: cluster before training.
      interval: number of epochs between clusterings.
      seed: clustering seed; None for the run's seed.
      head: name of the head module in the parameter paths.

    Raises:
      ArgumentError: at the beginning of the run, if the dataset, the sampler, the model's state or
        the parameters lack what the arguments require.
    """

    extract_dataloader: Any
    clustering: Mapping[str, Any]
    unif_sampling: bool
    reweight: bool
    reweight_pow: NonNegative
    init_memory: bool = False
    initial: bool = True
    interval: Count = 1
    seed: int | None = None
    head: str = "head"

    def __post_init__(self) -> None:
        with config_path("clustering"):
            self._run_clustering = build_clustering(self.clustering)
        self._clustered: int | None = None  # number of completed epochs at the last clustering

    # --- When to cluster. ---

    def before_run(self, runner: RunnerProtocol) -> None:
        """Check the requirements and build the parts of a clustering."""
        if runner.train_loop is None:
            return
        self._train_loader: Any = runner.train_dataloader
        self._check(runner)
        self._reset_head = _build_reset(runner.model, runner.optim_wrapper, runner.state, self.head)
        self._extract_features = Extractor(self.extract_dataloader)
        self._example_batch = select_arrays(self._train_loader.example())

    def before_train(self, runner: RunnerProtocol) -> None:
        """Cluster, or load the labels that the run was trained on before a restart."""
        if runner.state.is_abstract:  # `jengine plan` only compiles
            return
        if self._clustered is not None:
            path = self._path(runner, self._clustered)
            if os.path.exists(path):
                self._assign_labels(np.load(path), self._clustered)
                return
            runner.logger.warning(
                f"DeepClusterHook: {path} with the labels of this run is missing; clustering again."
            )
        if self._clustered is not None or self.initial:
            self._cluster(runner, runner.epoch)

    def after_train_epoch(self, runner: RunnerProtocol) -> None:
        """Cluster for the next epochs, every `interval` epochs."""
        if self.every_n_epochs(runner, self.interval):
            self._cluster(runner, runner.epoch + 1)

    # --- Clustering. ---

    def _check(self, runner: RunnerProtocol) -> None:
        name = type(self).__name__
        if not runner.train_loop.by_epoch:
            raise ArgumentError(
                f"{name}: `train_cfg.by_epoch` must be True, got False; it clusters between epochs"
            )
        dataset = self._train_loader.dataset  # of any class
        sampler = self._train_loader.sampler
        if not hasattr(dataset, "assign_labels"):
            raise ArgumentError(
                f"{name}: the training dataset must have assign_labels(), got "
                f"{type(dataset).__name__}; use a PseudoLabelDataset"
            )
        if self.unif_sampling and not hasattr(sampler, "set_uniform_indices"):
            raise ArgumentError(
                f"{name}: the sampler must have set_uniform_indices(), got "
                f"{type(sampler).__name__}; use a DeepClusterSampler"
            )
        if self.reweight:
            find_state_entry(runner.state.model_state, "loss_weight", name)
        if self.init_memory:
            find_memory_bank(runner.state.model_state, name)

    def _cluster(self, runner: RunnerProtocol, epoch: int) -> None:
        """Cluster the data, and set up data and state for training on these labels from `epoch`
        on.
        """
        features = self._extract_features(runner)
        seed = runner.seed if self.seed is None else self.seed
        # by epoch, also after a resume
        kmeans_seed = np.random.RandomState([seed % 2**32, epoch]).randint(1234)
        labels = self._run_clustering(features, int(kmeans_seed))
        if runner.is_main_process:
            os.makedirs(runner.local_dir, exist_ok=True)
            save_array(self._path(runner, epoch), labels)
        self._clustered = epoch
        self._assign_labels(labels, epoch)
        counts = np.bincount(labels, minlength=self._run_clustering.k)
        runner.logger.info(describe_clusters(counts))
        name = type(self).__name__
        model_state = runner.state.model_state
        if self.reweight:
            weights = class_weights(counts, self.reweight_pow)
            model_state = replace_state_entry(model_state, "loss_weight", weights, name)
        if self.init_memory:
            bank = drop_replica_axis(find_memory_bank(model_state, name), runner.strategy)
            model_state = replace_memory_bank(model_state, fill_bank(bank, features, labels), name)
        state = runner.state.replace(model_state=model_state)
        rng = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 2), jnp.uint32(epoch))
        runner.state = self._reset_head(state, rng, self._example_batch)

    def _assign_labels(self, labels: np.ndarray, epoch: int) -> None:
        self._train_loader.dataset.assign_labels(labels)
        if self.unif_sampling:
            self._train_loader.sampler.set_uniform_indices(
                labels, self._run_clustering.k, epoch=epoch
            )
        if hasattr(self._train_loader, "close"):  # an `IterableLoader` reads nothing ahead
            self._train_loader.close()  # drops batches that were read ahead with the old labels

    @staticmethod
    def _path(runner: RunnerProtocol, epoch: int) -> str:
        return os.path.join(runner.local_dir, f"cluster_epoch_{epoch}.npy")

    # --- Checkpointing. ---

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch of the last clustering."""
        return {} if self._clustered is None else {"clustered": self._clustered}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the epoch of the last clustering."""
        self._clustered = state_dict.get("clustered")


def _build_reset(
    model: Model, optim_wrapper: OptimWrapper | OptimWrapperDict, state: TrainState, module: str
) -> Callable[[TrainState, jax.Array, PyTree], TrainState]:
    """Build `reset(state, rng, batch) -> state`, which reinitializes the parameters of one module.

    The module, such as 'head', is a component of parameter paths. The old state is donated; all
    other arrays and all shardings stay the same.
    """
    if isinstance(optim_wrapper, OptimWrapperDict):
        raise ArgumentError(
            "`optim_wrapper` must be one optimizer for DeepClusterHook, got "
            f"{sorted(optim_wrapper)}"
        )
    layout = optim_wrapper.grouped.layout(state.params)
    flags = [jnp.array(True) if module in path.split(".") else None for path in layout.paths]
    if not any(flags):
        modules = {part for path in layout.paths for part in path.split(".")[:-1]} or layout.paths
        raise ArgumentError(
            f"`head` must be a module of the model, got {module!r}{closest(module, modules)}"
        )

    def reset_arrays(
        params: PyTree, opt_state: OptState, rng: jax.Array, batch: PyTree
    ) -> tuple[PyTree, OptState]:
        leaves = zip(
            flags, layout.flatten(model.init(rng, batch)[0]), layout.flatten(params), strict=True
        )
        params = layout.treedef.unflatten(
            [new.astype(old.dtype) if flag else old for flag, new, old in leaves]
        )
        # The module's optimizer state is new, too: momentum from the old weights must not move the
        # new ones.
        select_state = load_provided("optimizer_parts", "select_state")
        new_state = optim_wrapper.tx.init(params)
        chains = optim_wrapper.grouped.chains
        return params, select_state(layout, flags, chains, new_state, opt_state)

    shardings = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state))
    # as the step expects them
    compiled = jax.jit(reset_arrays, donate_argnums=(0, 1), out_shardings=shardings)

    def reset(state: TrainState, rng: jax.Array, batch: PyTree) -> TrainState:
        params, opt_state = compiled(state.params, state.opt_state, rng, batch)
        return state.replace(params=params, opt_state=opt_state)

    return reset
