"""Types of the Runner's arguments that are dicts, for editors and type checkers.

They are plain dicts: `TrainCfg(max_epochs=2)` is `dict(max_epochs=2)`, whose keys and values every
editor completes and every type checker checks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Never, Protocol, Required, TypeAlias, TypedDict

from jengine.config.annotations import Count, Duration, Index
from jengine.hooks.hook import Hook
from jengine.optim.wrapper_dict import AnyWrapper
from jengine.runner.loops import Intervals, Length

MYPY = False  # mypy takes it for True
if MYPY:  # it checks the keys of `dict(...)`, where pyright refuses each call of dict
    Plain: TypeAlias = Never
else:
    Plain: TypeAlias = dict[str, Any]


class TrainCfg(TypedDict, total=False):
    """`train_cfg`: the length of training, and `TrainSettings`."""

    type: str
    by_epoch: bool
    max_epochs: Length | None
    max_iters: Length | None
    epoch_length: Count | None
    val_begin: Index
    val_interval: Count
    dynamic_intervals: Intervals | None
    phases: Sequence[tuple[str, Count] | Mapping[str, Any]] | None
    on_recompile: Literal["warn", "raise"] | None
    steps_per_call: Count
    on_nonfinite: Literal["stop", "warn", "ignore"]
    max_time: Duration | None
    load_best_at_end: bool | str
    micro_batch: Count | None


class EvaluationCfg(TypedDict, total=False):
    """Settings for one of several evaluations: `EvalSettings`."""

    fp16: bool
    epoch_length: Count | None
    interval: Count | None


class EvalCfg(TypedDict, total=False):
    """`val_cfg` and `test_cfg`: settings for all evaluations."""

    type: str
    fp16: bool
    epoch_length: Count | None
    evaluations: Mapping[str, EvaluationCfg] | None


class LoaderCfg(TypedDict, total=False):
    """A dataloader: see `DataLoader` and `build_dataloader`."""

    type: Any
    dataset: Any
    batch_size: Any
    global_batch_size: Any
    example_length: Any
    sampler: Any
    drop_last: bool
    num_workers: Index
    num_threads: Index
    prefetch_factor: Count
    collate_fn: Callable[..., Any] | Mapping[str, Any] | str | None
    num_batch_per_epoch: Count | None
    device_prefetch: Index
    batch_axis: Literal[0] | None
    batch_rules: Any


class OptimWrapperCfg(TypedDict, total=False):
    """`optim_wrapper`: see `OptimWrapper` and `AmpOptimWrapper`."""

    type: str
    optimizer: Required[Any]
    accumulative_counts: Any
    clip_grad: Mapping[str, Any] | None
    axis_name: str | None
    accumulation_weight: Literal["examples", "equal"]
    loss_scale: str | float | Mapping[str, Any] | None
    dtype: Literal["bfloat16", "float16", "float32", "float64"] | None
    paramwise_cfg: Mapping[str, Any] | None
    constructor: Any


HookCfg: TypeAlias = Hook | Mapping[str, Any] | str | None


class DefaultHooks(TypedDict, total=False):
    """`default_hooks`: changes to these, or None without one."""

    runtime_info: HookCfg
    timer: HookCfg
    sampler_seed: HookCfg
    logger: HookCfg
    param_scheduler: HookCfg
    checkpoint: HookCfg
    progress: HookCfg


class ConfigDict(Protocol):
    """One of `ml_collections`, without its types."""

    def to_dict(self) -> Any:
        """Return a dict."""


class Loop(Protocol):
    """A loop that is built already."""

    def run(self) -> Any:
        """Run to the end."""


class GradientTransformation(Protocol):
    """One of optax, without its types."""

    @property
    def init(self) -> Callable[..., Any]:
        """The state for parameters."""

    @property
    def update(self) -> Callable[..., Any]:
        """The updates for gradients."""


Object: TypeAlias = ConfigDict | Plain | None
Optimizer: TypeAlias = OptimWrapperCfg | AnyWrapper | GradientTransformation
TrainSection: TypeAlias = TrainCfg | Loop | Object
EvalSection: TypeAlias = EvalCfg | Mapping[str, EvaluationCfg] | Loop | Object
OptimizerSection: TypeAlias = Optimizer | Mapping[str, Optimizer] | Object
# also evaluations by name; a union with any mapping completes keys, and does not check them
LoaderSection: TypeAlias = LoaderCfg | Mapping[str, Any] | Iterable[Any] | Callable[..., Any] | None
HooksByName: TypeAlias = DefaultHooks | Mapping[str, HookCfg] | None
Hooks: TypeAlias = Sequence[HookCfg] | HookCfg
