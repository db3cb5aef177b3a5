"""LoRA: fine-tune a model with low-rank updates to chosen kernels, while the other parameters stay
fixed.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021,
https://arxiv.org/abs/2106.09685

The fixed parameters are in the model state, so they have no gradients, optimizer state or averages,
and optimizer rules do not see them. The updates are added to the kernels inside the step.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from jengine.config import paths
from jengine.config.annotations import ConfigOf, Count, Index, Positive
from jengine.config.errors import ConfigError, config_path
from jengine.config.registry import MODELS, check_arguments
from jengine.extras.networks.path_rules import Rule, check_match, compile_rule, is_match
from jengine.model.model import (
    FROZEN,
    Batch,
    Losses,
    ModelState,
    ModelWrapper,
    Params,
    PyTree,
    predict_with_key,
)
from jengine.model.module_types import layer_shape, stacked_axes

_A = ".lora_a"
_B = ".lora_b"
# Modules whose kernels have one input axis followed by several output axes; in others only the last
# axis is an output.
_PROJECTION = re.compile(r"(^|\.)(query|key|value|qkv|[qkv]|[qkv]_proj|qkv_proj)$")


@dataclasses.dataclass(frozen=True)
class Target:
    """Update for the kernels that a rule matches."""

    rank: Count
    alpha: Positive | None = None  # the update is multiplied by `alpha / rank`; None for `rank`
    # Number of leading axes along which separate kernels are stacked, as by `nn.scan`; None for
    # those that the model knows, of Linen modules and Flax's own NNX modules.
    stacked: Index | None = None
    # input axes that follow; None: 1 for query, key and value, else all but the last
    in_axes: Count | None = None


@MODELS.register_module()
class LoRA(ModelWrapper):
    """Model with low-rank updates to another one's kernels: `kernel + alpha / rank * reshape(lora_a
    @ lora_b)`.

    Where `nn.scan`, `nn.vmap` or a mixture of experts stacks kernels, each has an update of its
    own.

    `lora_a` f[in, rank] is random and `lora_b` f[rank, out] is zero, so training starts from the
    model itself. Input and output axes are merged, [height * width * in, out] for a convolution and
    [in, heads * size] for an attention. `load_from` loads the model's parameters, which are in
    `model_state['frozen']`, under their own names, and `jengine ckpt export` exports the sum.

    >>> inner = dict(
    ...     type="LinenModel", module=dict(type="SmallViT"), loss=dict(type="CrossEntropy")
    ... )
    >>> model = LoRA(inner, targets=["attn"], rank=4, trainable=["head"])

    Args:
      model: the model or a config.
      targets: regular expressions, searched in each dotted parameter path and torch alias; the
        first match is used. Biases, and parameters with fewer than two axes, are not updated. A
        dict, or a list with pairs, sets `rank`, `alpha`, `stacked` or `in_axes` for each rule:
        `[('attn', dict(rank=4))]`; see `Target`.
      rank: default rank.
      alpha: default factor, which is divided by the rank; None for the rank.
      trainable: regular expressions for parameters that are trained themselves, such as a new head;
        they take precedence over `targets`.

    Raises:
      ConfigError: a rule that matches no kernel, a rank that is larger than a kernel, or an invalid
        expression.
    """

    def __init__(
        self,
        model: Annotated[Any, ConfigOf(MODELS)],
        targets: Sequence[Any] | Mapping[str, Any],
        rank: Count = 8,
        alpha: Positive | None = None,
        trainable: Sequence[str] = (),
    ) -> None:
        super().__init__(model)
        with config_path("targets"):
            self._targets = _parse_targets(targets, {"rank": rank, "alpha": alpha})
        with config_path("trainable"):
            self._trainable = [compile_rule(pattern, "LoRA") for pattern in trainable]
        self._treedef: Any = None
        self._paths: list[str] = []

    def init(self, rng: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        """Initialize the model and split the parameters into trained and fixed ones.

        Returns:
          The parameters, `lora_a` and `lora_b` below each updated kernel's path and the trainable
          parameters; and the model state, `frozen` with the fixed parameters, `scale`, f32[] for
          each updated kernel, and `state`, the inner model's state.
        """
        params, model_state = self.model.init(rng, batch)
        leaves = paths.flatten(params)
        # The inner model's own containers are built again for each call: nested dicts may not be
        # what it takes.
        self._treedef = jax.tree.structure(params)
        self._paths = list(leaves)
        trained = {
            path: leaf
            for path, leaf in leaves.items()
            if any(is_match(rule, path) for rule in self._trainable)
        }
        frozen = {path: leaf for path, leaf in leaves.items() if path not in trained}
        self._check_all_match(leaves, frozen)
        scales = {}
        keys = jax.random.fold_in(rng, 0x10A)  # apart from the keys of the model
        for index, (path, kernel) in enumerate(frozen.items()):
            matching = (target for rule, target in self._targets if is_match(rule, path))
            target = next(
                (target for target in matching if self._is_kernel(path, kernel, target)), None
            )
            if target is not None:
                stacked = self._count_stacked(path, kernel, target)
                a, b = _init_pair(jax.random.fold_in(keys, index), path, kernel, target, stacked)
                # below the kernel, so that rules find it by the same names
                trained |= {path + _A: a, path + _B: b}
                # In the state, not in this object: `jengine ckpt export` merges without building
                # the model.
                scales[path] = jnp.float32((target.alpha or target.rank) / target.rank)
        return paths.nest(trained), {
            FROZEN: paths.nest(frozen),
            "scale": paths.nest(scales),
            "state": model_state,
        }

    def merge_weights(self, params: Params, model_state: ModelState) -> tuple[PyTree, PyTree]:
        """Return the inner model's parameters, with the updates added to the kernels, and the
        state.
        """
        frozen, scales = (paths.flatten(model_state[name]) for name in (FROZEN, "scale"))
        return self._unflatten(add_updates(paths.flatten(params), frozen, scales)), model_state[
            "state"
        ]

    def base_variables(self, params: Params, model_state: ModelState) -> tuple[PyTree, PyTree]:
        """Return the inner model's parameters and state without the updates."""
        return self._unflatten(
            {**paths.flatten(model_state[FROZEN]), **paths.flatten(params)}
        ), model_state["state"]

    def replace_base(
        self, params: Params, model_state: ModelState, base_params: Params, base_state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Return the variables with the inner model's replaced; the updates stay."""
        base = paths.flatten(base_params)
        new_params = paths.map_with_path(lambda path, leaf: base.get(path, leaf), params)
        # All frozen parameters are the inner model's, so a missing one is an error; `params` has
        # `lora_a` too.
        frozen = paths.map_with_path(lambda path, leaf: base[path], model_state[FROZEN])
        return new_params, {**model_state, FROZEN: frozen, "state": base_state}

    def train_step(self, state: Any, batch: Batch, ctx: Any) -> tuple[Any, Mapping[str, Any]]:
        """Refuse: the inner model's step would update parameters that LoRA keeps fixed."""
        raise ConfigError(
            "LoRA must be around a model without its own `train_step`, got "
            f"{type(self.model).__name__}: its step "
            "updates its own parameters; define `train_step` in a subclass of LoRA"
        )

    def _wrap_loss(
        self,
        loss: Callable[..., Any],
        params: Params,
        model_state: ModelState,
        batch: Batch,
        **kwargs: Any,
    ) -> tuple[Losses, PyTree]:
        """Return the losses with the updates added to the kernels, and the new model state."""
        losses, state = loss(*self.merge_weights(params, model_state), batch, **kwargs)
        return losses, {**model_state, "state": state}

    def predict(
        self, params: Params, model_state: ModelState, batch: Batch, *, rng: jax.Array | None = None
    ) -> PyTree:
        """Return the updated model's predictions."""
        return predict_with_key(self.model, *self.merge_weights(params, model_state), batch, rng)

    def merge(self, params: Params, model_state: ModelState, *, train: bool = False) -> Any:
        """Return the inner model's module, with the updates added to the kernels."""
        return self.model.merge(*self.merge_weights(params, model_state), train=train)

    def _unflatten(self, leaves: Mapping[str, Any]) -> PyTree:
        if self._treedef is None:
            raise RuntimeError("LoRA: `init` must be called or traced before the model is used")
        return self._treedef.unflatten([leaves[path] for path in self._paths])

    def _count_stacked(self, path: str, leaf: jax.Array, target: Target) -> int:
        """Return the number of leading axes along which separate kernels are stacked."""
        if target.stacked is not None:
            return target.stacked
        shape = layer_shape(leaf.shape, stacked_axes(self.model.module_types, path) or ())
        stacked = leaf.ndim - len(shape)
        if leaf.shape[stacked:] != shape:
            raise ConfigError(
                f"LoRA: kernels {shape} must be stacked along the first axes, got {path} "
                f"{leaf.shape}; set `variable_axes={{'params': 0}}` of nn.scan or nn.vmap"
            )
        return stacked

    def _is_kernel(self, path: str, leaf: jax.Array, target: Target) -> bool:
        """Return whether a parameter has inputs and outputs.

        Attention biases and stacked norms have two axes too.
        """
        if path.rpartition(".")[2] in ("bias", "scale"):
            return False
        return leaf.ndim - self._count_stacked(path, leaf, target) >= 2

    def _check_all_match(self, leaves: Mapping[str, Any], frozen: Mapping[str, Any]) -> None:
        for rule, target in self._targets:
            kernels = [path for path, leaf in frozen.items() if self._is_kernel(path, leaf, target)]
            check_match("LoRA", "targets", "a kernel that is not trained itself", rule, kernels)
        for rule in self._trainable:
            check_match("LoRA", "trainable", "a parameter", rule, list(leaves))


def add_updates(
    trained: Mapping[str, Any], frozen: Mapping[str, Any], scales: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Return the inner model's parameters by dotted path, from `LoRA`'s parameters and state by
    dotted path.
    """
    pairs = {path + suffix for path in scales for suffix in (_A, _B)}
    merged = {**frozen, **{path: leaf for path, leaf in trained.items() if path not in pairs}}
    for path, scale in scales.items():
        kernel = jnp.asarray(frozen[path])
        # `matmul` treats leading axes as a batch, so stacked kernels need no loop.
        update = jnp.matmul(trained[path + _A], trained[path + _B]) * scale
        merged[path] = (kernel + update.reshape(kernel.shape)).astype(kernel.dtype)
    return merged


def _parse_targets(targets: Any, defaults: Mapping[str, Any]) -> list[tuple[Rule, Target]]:
    parsed = []
    # A list of pairs is allowed since keys of a ConfigDict must have no dots, which patterns have.
    for item in targets.items() if hasattr(targets, "items") else targets:
        is_pair = isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str)
        if not isinstance(item, str) and not (is_pair and hasattr(item[1], "items")):
            raise TypeError(
                "LoRA: `targets` must be regular expressions, or pairs of one and a dict, got "
                f"{item!r}"
            )
        pattern, settings = (item, {}) if isinstance(item, str) else item
        with config_path(pattern):
            arguments = {**defaults, **dict(settings)}
            check_arguments(Target, arguments)
            parsed.append((compile_rule(pattern, "LoRA"), Target(**arguments)))
    if not parsed:
        raise ConfigError("LoRA: `targets` must have at least one rule, got none")
    return parsed


def _init_pair(
    key: jax.Array, path: str, kernel: jax.Array, target: Target, count: int
) -> tuple[jax.Array, jax.Array]:
    """Return `lora_a` f[..., in, rank] and `lora_b` f[..., rank, out] for a kernel with `count`
    stacked axes.
    """
    stacked = kernel.shape[:count]
    shape = kernel.shape[count:]
    in_axes = target.in_axes
    if in_axes is None:
        in_axes = 1 if _PROJECTION.search(path.rpartition(".")[0]) else len(shape) - 1
    if in_axes >= len(shape):
        raise ConfigError(
            f"LoRA: `in_axes` must be below {len(shape)} for the kernel {path} {shape}, got "
            f"{in_axes}"
        )
    size_in = math.prod(shape[:in_axes])
    size_out = math.prod(shape[in_axes:])
    if target.rank > min(size_in, size_out):
        raise ConfigError(
            f"LoRA: `rank` must be at most {min(size_in, size_out)} for the kernel {path} "
            f"[{size_in}, {size_out}], "
            f"got {target.rank}; set it for this rule, or match fewer parameters"
        )
    # The standard deviation 1 / sqrt(in) gives `x @ lora_a` the scale of `x`, for any width.
    a = jax.random.normal(key, (*stacked, size_in, target.rank), kernel.dtype) / math.sqrt(size_in)
    return a.astype(kernel.dtype), jnp.zeros((*stacked, target.rank, size_out), kernel.dtype)
