"""Muon by role, and with the formulas of torch.optim.Muon, NorMuon, and Lion: optimizers that
replace the momentum by a normalized one.
"""

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from optax import Updates

from jengine.config import paths
from jengine.config.annotations import Decay, Finite, Fraction, NonNegative, Range
from jengine.config.registry import OPTIMIZERS
from jengine.extras.optimizers import matrices, trees
from jengine.extras.optimizers.matrices import MatrixKind
from jengine.model.roles import Role
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts, Scalar
from jengine.optim.optimizers.optimizer import Optimizer, define_optimizer

logger = logging.getLogger("jengine")

Triple = tuple[Finite, Finite, Finite]
HIDDEN: tuple[MatrixKind, ...] = ("hidden", "convolution")


@define_optimizer("lr", "weight_decay", "beta", by_role=matrices.split_settings)
def Muon(
    lr: NonNegative,
    weight_decay: NonNegative = 0.0,
    beta: Decay = 0.95,
    nesterov: bool = True,
    ns_coeffs: Triple | Sequence[Triple] = (3.4445, -4.775, 2.0315),
    ns_steps: Annotated[int, Range(ge=1, lt=100)] = 5,
    preconditioning: Literal["frobenius", "spectral", "aol", "schatten"] = "frobenius",
    adaptive: bool = False,
    eps: NonNegative = 1e-8,
    beta2: Decay | None = None,
    consistent_rms: NonNegative | None = None,
    mu_dtype: str | None = None,
    per_head: bool = False,
    cautious: bool = False,
    kinds: Sequence[MatrixKind] = HIDDEN,
    adam: bool = False,
    adam_learning_rate: NonNegative | None = None,
    adam_weight_decay: NonNegative = 0.0,
    adam_b1: Decay = 0.9,
    adam_b2: Decay = 0.999,
    *,
    roles: Updates,
) -> Parts:
    """Build Muon, orthogonalized momentum for the hidden matrices, and AdamW for the other
    parameters (Jordan et al., https://kellerjordan.github.io/posts/muon, 2024).

    Each layer, each expert and each of several fused projections is a matrix of its own; a
    convolution is one with spatial and input axes as inputs. What is a hidden matrix tells its
    role, see `jengine.model.roles`. The update of a matrix is optax's.

    Args:
      lr: learning rate.
      weight_decay: decoupled weight decay.
      beta: momentum decay.
      nesterov: use Nesterov momentum.
      ns_coeffs: coefficients of the Newton-Schulz iteration: three numbers, or three for each
        iteration.
      ns_steps: number of iterations, unless each has its own coefficients.
      preconditioning: scale before the iterations, see `optax.contrib.muon`.
      adaptive: multiply by the dual norm of the momentum (arXiv:2409.20325).
      eps: added to denominators, also in Adam.
      beta2: decay rate of the average size of rows in `NorMuon`; None for no average.
      consistent_rms: multiply by `consistent_rms * sqrt(max(inputs, outputs))`, 0.2 for updates as
        large as AdamW's (Liu et al., arXiv:2502.16982); None for `sqrt(max(1, outputs / inputs))`.
      mu_dtype: dtype of the momentum, such as 'bfloat16'; None for float32.
      per_head: whether each attention head is a matrix of its own.
      cautious: decay only elements that the update moves towards 0 (Chen et al., arXiv:2510.12402).
      kinds: kinds of parameters that are trained as matrices.
      adam: train by AdamW; usually a setting of parameter groups.
      adam_learning_rate: AdamW's learning rate; None for `lr`. Schedules change both in proportion.
      adam_weight_decay: AdamW's weight decay.
      adam_b1, adam_b2: decay rates of Adam's moments.
    """
    if adam:
        scale = matrices.adam_parts(adam_b1, adam_b2, eps)
    else:
        coefficients = jnp.asarray(ns_coeffs)
        steps = len(ns_coeffs) if coefficients.ndim == 2 else ns_steps

        def orthogonalize(matrix: jax.Array) -> jax.Array:
            # Without momentum, which is the parameter's, it is a function of the matrix.
            tx = optax.contrib.scale_by_muon(
                ns_coeffs,
                steps,
                0.0,
                eps,
                nesterov=False,
                adaptive=adaptive,
                preconditioning=preconditioning,
            )
            return tx.update(matrix, tx.init(matrix))[0]

        def layer(
            role: Role, numbers: Sequence[Any], arrays: Any, _: Any
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            split, *rows = (matrices.split_matrices(x, role, per_head) for x in arrays)
            inputs, outputs = split.values.shape[1:]
            if consistent_rms is None:
                factor = max(1.0, outputs / inputs) ** 0.5
            else:
                factor = max(inputs, outputs) ** 0.5 * consistent_rms
            if not rows:
                updates = matrices.map_matrices(orthogonalize, split.values)
                return [factor * split.join(updates)], []
            normalize = functools.partial(_normalize_rows, orthogonalize, numbers[0], eps)
            updates, new = matrices.map_matrices(normalize, split.values, rows[0].values)
            return [factor * split.join(updates), rows[0].join(new)], []

        def leaf(role: Role, *arrays: jax.Array) -> list[jax.Array]:
            numbers = () if beta2 is None else (beta2,)
            return matrices.map_layers(layer, role, arrays, shared=numbers)[0]

        def init_rows(role: Role, p: jax.Array) -> jax.Array:
            split = matrices.split_matrices(p, role, per_head)
            return split.join(jnp.zeros_like(split.values[:, :1], common.state_dtype(p.dtype)))

        tx = scale_by_orthogonal(
            leaf, None if beta2 is None else init_rows, beta, nesterov, mu_dtype, roles
        )
        scale = [("scale_by_muon", tx)]
    return matrices.complete_chain(scale, lr, weight_decay, cautious)


def _variant(
    name: str, **changes: Any
) -> Callable[[Callable[..., Optimizer]], Callable[..., Optimizer]]:
    """Register a function of keywords with the arguments of `Muon`, and their docstring.

    `changes` are new names (strings) or defaults of arguments.
    """
    parameters = []
    # Python 3.13 stores docstrings without their indentation, others with it
    meanings = inspect.cleandoc(Muon.__doc__ or "").partition("\nArgs:\n")[2]
    for parameter in inspect.signature(Muon).parameters.values():
        change = changes.get(parameter.name)
        if isinstance(change, str):
            meanings = meanings.replace(f"  {parameter.name}:", f"  {change}:")
            parameter = parameter.replace(name=change)
        elif change is not None:
            parameter = parameter.replace(default=change)
        parameters.append(parameter)
    signature = inspect.Signature(parameters, return_annotation=Optimizer)

    def define(build: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
        @functools.wraps(build)
        def call(*args: Any, **arguments: Any) -> Optimizer:
            bound = signature.bind(*args, **arguments)
            bound.apply_defaults()
            return dataclasses.replace(build(**bound.arguments), name=name)

        vars(call)["__signature__"] = signature
        call.__doc__ = f"{inspect.cleandoc(build.__doc__ or '')}\n\nArgs:\n{meanings}"
        return OPTIMIZERS.register_module()(call)

    return define


@_variant("Muon", lr="learning_rate")
def muon(learning_rate: float, **arguments: Any) -> Optimizer:
    """Build `Muon`, with optax's name of the learning rate."""
    return Muon(learning_rate, **arguments)


@_variant("NorMuon", beta2=0.95)
def NorMuon(**arguments: Any) -> Optimizer:
    """Build NorMuon, Muon with rows of equal size: each output's row is divided by a moving average
    of its size, and the matrix keeps its own (Li et al., arXiv:2510.05491)."""
    return Muon(**arguments)


@define_optimizer("lr", "weight_decay", "momentum", decay="decoupled", whole_tensor=True)
def TorchMuon(
    lr: NonNegative = 1e-3,
    weight_decay: NonNegative = 0.1,
    momentum: Fraction = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[Finite, Finite, Finite] = (3.4445, -4.775, 2.0315),
    eps: NonNegative = 1e-7,
    ns_steps: Annotated[int, Range(ge=1, lt=100)] = 5,
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
) -> Parts:
    """Build Muon, orthogonalised momentum for matrices (Jordan et al., 2024), by Newton-Schulz
    iterations in bfloat16.

    It trains only matrices, in Flax's layout (in, out), and raises ValueError at `init` for other
    parameters; use another optimizer for these. `Muon` trains them by AdamW.

    Args:
      lr: learning rate.
      weight_decay: decoupled weight decay.
      momentum: momentum decay.
      nesterov: use Nesterov momentum.
      ns_coefficients: coefficients of the quintic polynomial.
      eps: lower bound for the norm in the denominator.
      ns_steps: number of Newton-Schulz iterations.
      adjust_lr_fn: learning rate scale of a matrix: 'original' (None) multiplies lr by `sqrt(max(1,
        out / in))`, 'match_rms_adamw' by `0.2 sqrt(max(out, in))`.
    """
    return [
        (
            "scale_by_muon",
            scale_by_muon(momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn),
        )
    ]


@define_optimizer("lr", "betas", "weight_decay", decay="decoupled")
def Lion(
    lr: NonNegative = 1e-4,
    betas: tuple[Decay, Decay] = (0.9, 0.99),
    weight_decay: NonNegative = 0.0,
) -> Parts:
    """Build Lion, the sign of an interpolated momentum (Chen et al., arXiv:2302.06675), with
    decoupled weight decay.

    Args:
      lr: learning rate.
      betas: decay rates for the interpolation whose sign is the update, and for the momentum.
      weight_decay: weight decay coefficient.
    """
    return [("scale_by_lion", optax.scale_by_lion(*betas))]


def warn_of_muon(params: Any, roles: Mapping[str, Role]) -> None:
    """Warn if `optax.contrib.muon`, which trains what has two axes, trains other parameters than
    `Muon`.
    """
    leaves = paths.flatten(params)
    hidden = {path for path in leaves if path in roles and roles[path].kind in HIDDEN}
    chosen = {path for path, leaf in leaves.items() if leaf.ndim == 2}
    if chosen != hidden:
        wrong, missing = (
            f"{len(names)} ({', '.join(sorted(names)[:3])}{', ...' * (len(names) > 3)})"
            if names
            else "0"
            for names in (chosen - hidden, hidden - chosen)
        )
        logger.warning(
            "optax.contrib.muon without muon_weight_dimension_numbers trains each parameter with "
            f"two axes: {wrong} that are no hidden matrices, and not {missing} that are; "
            "type='Muon' goes by role"
        )


class MuonState(NamedTuple):
    """Muon's state."""

    momentum: Updates  # float32, like the parameters


class OrthogonalState(NamedTuple):
    """State of Muon by role."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    mu: Updates  # momentum, like the parameters
    # average squares by output, like the parameters with inputs of the size 1; None for Muon
    nu: Updates | None


def scale_by_orthogonal(
    leaf: Callable[..., Sequence[jax.Array]],
    init_nu: Callable[[Role, jax.Array], jax.Array] | None,
    beta: Scalar,
    nesterov: bool,
    mu_dtype: str | None,
    roles: Updates,
) -> optax.GradientTransformation:
    """Average gradients as `optax.contrib.muon` and apply a function to the average.

    Args:
      leaf: `(role, average) -> [update]`, with `init_nu` `(role, average, nu) -> [update, nu]`.
      init_nu: `(role, parameter) -> nu`, or None.
      beta, nesterov, mu_dtype: see `Muon`.
      roles: tree of `Role`s like the parameters.
    """

    def init(params: Any) -> OrthogonalState:
        matrices.check_matrices("Muon", roles)
        mu = jax.tree.map(
            lambda p: jnp.zeros_like(p, mu_dtype or common.state_dtype(p.dtype)), params
        )

        nu = None if init_nu is None else jax.tree.map(init_nu, roles, params)
        return OrthogonalState(common.zero_count(), mu, nu)

    def update(
        grads: Updates, state: OrthogonalState, params: Any | None = None
    ) -> tuple[Updates, OrthogonalState]:
        count = state.count + 1
        average = common.moving_average(state.mu, beta, grads)
        now = common.bias_correction(beta, count)
        later = common.bias_correction(beta, count + 1)
        ahead = jax.tree.map(
            lambda m, g: beta * m / later + (1 - beta) * g / now if nesterov else m / now,
            average,
            grads,
        )
        memory = () if state.nu is None else (state.nu,)
        updates, *nu = trees.map_unzipped(leaf, roles, ahead, *memory)
        mu = jax.tree.map(lambda new, old: new.astype(old.dtype), average, state.mu)
        return updates, OrthogonalState(count, mu, *(nu or (None,)))

    return optax.GradientTransformation(init, update)


def _normalize_rows(
    orthogonalize: Callable[[jax.Array], jax.Array],
    beta2: Scalar,
    eps: float,
    matrix: jax.Array,
    nu: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return NorMuon's update for a matrix, float[inputs, outputs], and the new average of squares,
    float[1, outputs].
    """
    x = orthogonalize(matrix)
    nu = beta2 * nu + (1 - beta2) * jnp.mean(x * x, axis=0, keepdims=True)
    scaled = x / (jnp.sqrt(nu) + eps)
    # Of the size that Muon gives it, so that the same learning rate fits.
    return scaled * (trees.norm(x) / (trees.norm(scaled) + eps)), nu


def scale_by_muon(
    momentum: Scalar,
    nesterov: bool,
    ns_coefficients: Sequence[float],
    eps: float,
    ns_steps: int,
    adjust_lr_fn: str | None,
) -> optax.GradientTransformation:
    """Orthogonalise the momentum of matrices in bfloat16.

    `optax.contrib.scale_by_muon` also corrects its bias.

    The arguments are those of `TorchMuon`.

    Raises:
      ValueError: at `init`, a parameter that is not a matrix.
    """

    def init(params: Any) -> MuonState:
        # At `init`, before the step is traced and compiled.
        for path, leaf in paths.flatten(params).items():
            if leaf.ndim != 2:
                raise ValueError(
                    f"TorchMuon: parameter {path!r} must be a matrix, got shape {leaf.shape}; use "
                    "another optimizer for it, or 'Muon', which trains the matrices in any model "
                    "and leaves the other parameters to AdamW"
                )
        return MuonState(common.zeros_like(params))

    def update(
        grads: Updates, state: MuonState, params: Any | None = None
    ) -> tuple[Updates, MuonState]:
        average = common.moving_average(state.momentum, momentum, grads)
        # PyTorch's lerp of the gradient towards the new average, with its order of operations.
        ahead = (
            jax.tree.map(lambda b, g: g + momentum * (b - g), average, grads)
            if nesterov
            else average
        )

        def leaf(x: jax.Array) -> jax.Array:
            # Flax kernels are (in, out), PyTorch's weights (out, in): the factor of the paper is
            # rows over columns of the latter.
            inputs, outputs = x.shape
            if adjust_lr_fn == "match_rms_adamw":
                factor = 0.2 * max(inputs, outputs) ** 0.5
            else:
                factor = max(1.0, outputs / inputs) ** 0.5
            return factor * _orthogonalise(x, ns_coefficients, ns_steps, eps).astype(x.dtype)

        return jax.tree.map(leaf, ahead), MuonState(average)

    return optax.GradientTransformation(init, update)


def _orthogonalise(
    matrix: jax.Array, coefficients: Sequence[float], steps: int, eps: float
) -> jax.Array:
    a, b, c = coefficients
    x = matrix.astype(jnp.bfloat16)
    is_wide = x.shape[0] <= x.shape[1]
    x = x if is_wide else x.T  # the smaller Gram matrix
    x = x / jnp.maximum(jnp.linalg.norm(x), eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x if is_wide else x.T
