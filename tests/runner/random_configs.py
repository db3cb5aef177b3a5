"""Draw random configs of small runs from a seed, for tests that train each of them in several ways."""

import random

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jengine.data import ArrayDataset
from jengine.model import FunctionalModel, LinenModel
from jengine.model.autocast import autocast

DATA = np.random.RandomState(0)
FEATURES, CLASSES = 8, 4
X = DATA.randn(64, FEATURES).astype(np.float32)
Y = X @ DATA.randn(FEATURES, CLASSES).astype(np.float32)
ENTRIES = dict(x=X, y=Y, label=Y.argmax(-1).astype(np.int32))
NORMS = {"layer": nn.LayerNorm, "group": lambda name: nn.GroupNorm(4, name=name), "rms": nn.RMSNorm}


class Net(nn.Module):
    """A perceptron; biases whose gradient would be only rounding, before a norm and in attention, are left out."""

    depth: int = 1
    width: int = 16
    attention: bool = False
    norm: str | None = None
    dropout: float = 0.0
    activation: str = "tanh"

    @nn.compact
    def __call__(self, x, train=False):
        for i in range(self.depth):
            x = nn.Dense(self.width, use_bias=self.norm is None, name=f"dense_{i}")(x)
            if self.norm == "batch":
                x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name=f"norm_{i}")(x)
            elif self.norm is not None:
                x = NORMS[self.norm](name=f"norm_{i}")(x)
            x = getattr(nn, self.activation)(x)
            if self.attention:
                attention = nn.MultiHeadDotProductAttention(2, use_bias=False, name=f"attention_{i}")
                x = x + attention(x.reshape(len(x), 4, -1)).reshape(x.shape)
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(CLASSES, name="head")(x)


def squared_error(outputs, batch):
    return jnp.square(outputs - batch["y"]).mean(axis=-1)


def weighted_error(outputs, batch):
    weights = 1.0 + jnp.abs(batch["x"][:, 0])
    if "mask" in batch:
        weights = weights * batch["mask"]
    return {"loss": ((squared_error(outputs, batch) * weights).sum(), weights.sum())}


def two_errors(outputs, batch):
    return {"loss_square": squared_error(outputs, batch), "loss_abs": jnp.abs(outputs - batch["y"]), "size": outputs**2}


CROSS_ENTROPY = dict(type="CrossEntropy", label_smoothing=0.1)


def noisy_model():
    """Return a linear model with noise from the key of the step and with state."""

    def predict(params, model_state, batch):
        return autocast(lambda params, x: x @ params["head"]["kernel"] + params["head"]["bias"])(params, batch["x"])

    def loss(params, model_state, batch, rng):
        noise = 0.1 * jax.random.normal(rng, batch["y"].shape)
        error = predict(params, model_state, batch) - batch["y"] + noise - model_state["mean"]
        return {"loss": jnp.square(error)}, {"mean": 0.9 * model_state["mean"] + 0.1 * error.mean()}

    def init():
        kernel = 0.1 * jnp.asarray(np.random.RandomState(1).randn(FEATURES, CLASSES), jnp.float32)
        return {"head": {"kernel": kernel, "bias": jnp.zeros(CLASSES)}}, {"mean": jnp.zeros(())}

    return FunctionalModel(init=init, loss=loss, predict=predict)


def draw_model(rng):
    if rng.random() < 0.1:
        return "noisy linear", noisy_model, dict(norm=None, dropout=True)
    loss = rng.choice([squared_error, weighted_error, two_errors, CROSS_ENTROPY])
    net = dict(
        depth=rng.choice([1, 1, 2]),
        width=rng.choice([16, 24]),
        attention=rng.random() < 0.15,
        norm=rng.choice([None, "batch", "batch", "layer", "group", "rms"]),
        dropout=rng.choice([0.0, 0.0, 0.3]),
        activation=rng.choice(["tanh", "relu", "gelu", "silu"]),
    )
    return (
        f"{net} {getattr(loss, '__name__', 'cross entropy')}",
        lambda: LinenModel(Net(**net), loss, inputs="x"),
        dict(norm=net["norm"], dropout=net["dropout"] > 0),
    )


def draw_optimizer(rng):
    def settings(name, **choices):
        return dict(type=name, **{key: rng.choice(values) for key, values in choices.items()})

    flags, decays = [False, True], [0.0, 0.1]
    adam = dict(lr=[0.01, 0.003], weight_decay=decays, betas=[(0.9, 0.999), (0.8, 0.95)])
    momentum = dict(lr=[0.05, 0.01], momentum=[0.0, 0.9], weight_decay=decays)
    table = [
        lambda: settings("SGD", lr=[0.05], weight_decay=decays),
        lambda: settings("SGD", lr=[0.05], momentum=[0.9], nesterov=flags, weight_decay=decays),
        lambda: settings("Adam", amsgrad=flags, **adam),
        lambda: settings("Adam", amsgrad=[True], **adam),
        lambda: settings("AdamW", amsgrad=flags, **adam),
        lambda: settings("Adamax", **adam),
        lambda: settings("NAdam", decoupled_weight_decay=flags, **adam),
        lambda: settings("RAdam", decoupled_weight_decay=flags, **adam),
        lambda: settings("RMSprop", centered=flags, **momentum),
        lambda: settings("Adagrad", lr=[0.05], lr_decay=[0.0, 0.1], weight_decay=decays),
        lambda: settings("Adadelta", lr=[1.0, 0.3], weight_decay=decays),
        lambda: settings("ASGD", lr=[0.05], t0=[0.0, 1e6], weight_decay=decays),
        lambda: settings("TorchAdafactor", lr=[0.03], weight_decay=decays),
        lambda: settings("ProximalAdan", lr=[0.01], weight_decay=decays, max_grad_norm=[0.0, 1.0], no_prox=flags),
        lambda: settings("Lion", lr=[0.003], weight_decay=decays),
        lambda: settings("Lamb", lr=[0.01], weight_decay=decays, trust_clip=flags, always_adapt=flags),
        lambda: settings("LARS", lr=[0.5], momentum=[0.0, 0.9], weight_decay=decays, nesterov=[False], eta=[0.01]),
        lambda: settings("muon", learning_rate=[0.01], nesterov=flags),
        lambda: settings("Rprop", lr=[0.01]),
        lambda: settings("amsgrad", learning_rate=[0.01]),
        lambda: settings("adabelief", learning_rate=[0.01]),
        lambda: settings("novograd", learning_rate=[0.01], weight_decay=decays),
        lambda: settings("yogi", learning_rate=[0.01]),
        lambda: settings("schedule_free_adamw", learning_rate=[0.01], weight_decay=decays),
        lambda: settings("ademamix", learning_rate=[0.01], weight_decay=decays),
    ]
    return rng.choice(table)()


def draw_paramwise(rng, optimizer):
    if optimizer["type"] == "Rprop" or optimizer["type"].islower():
        return {}
    rules = [
        {},
        {},
        {},
        dict(bias_lr_mult=2.0),
        dict(custom_keys={"head": dict(lr_mult=0.5)}),
        dict(custom_keys={"head.kernel": dict(requires_grad=False)}),
    ]
    rule = rng.choice(rules)
    return dict(paramwise_cfg=rule) if rule else {}


def draw_wrapper(rng):
    optimizer = draw_optimizer(rng)
    wrapper = dict(
        optimizer=optimizer,
        accumulative_counts=rng.choice([1, 1, 2, 3]),
        clip_grad=rng.choice(
            [
                None,
                None,
                dict(max_norm=0.5),
                dict(max_norm=1.0, norm_type=3),
                dict(max_norm=0.2, norm_type="inf"),
                dict(clip_value=0.05),
            ]
        ),
        **draw_paramwise(rng, optimizer),
    )
    amp = rng.choice([None, None, None, "float16", "float16", "bfloat16"])
    if amp is not None:
        wrapper |= dict(type="AmpOptimWrapper", dtype=amp)
    if amp == "float16":
        scales = [
            "dynamic",
            1024.0,
            dict(init_scale=2.0**24, growth_interval=2),
            dict(init_scale=8.0, growth_interval=3),
        ]
        wrapper["loss_scale"] = rng.choice(scales)
    return wrapper


def draw_schedules(rng, wrapper, by_epoch):
    if wrapper["optimizer"]["type"] in ("schedule_free_adamw", "ademamix"):
        return []
    steps = dict(by_epoch=False)
    epochs = dict(by_epoch=True) if by_epoch else steps
    choices = [
        [],
        [dict(type="LinearLR", start_factor=0.1, end=5, **steps), dict(type="CosineAnnealingLR", begin=5, **steps)],
        [dict(type="MultiStepLR", milestones=[1, 2], gamma=0.5, **epochs)],
        [dict(type="ExponentialLR", gamma=0.9, **steps)],
        [dict(type="PolyLR", eta_min=1e-4, power=0.9, **steps)],
        [dict(type="OneCycleLR", eta_max=0.02, **steps)],
        [dict(type="CosineRestartLR", periods=[4, 8, 16], restart_weights=[1, 0.5, 0.25], eta_min=0.0, **steps)],
    ]
    if (
        "weight_decay" in wrapper["optimizer"]
        and wrapper["optimizer"]["weight_decay"]
        and wrapper["optimizer"]["type"][0].isupper()
    ):
        choices.append([dict(type="CosineAnnealingWeightDecay", eta_min=0.01, **steps)])
    if wrapper["optimizer"].get("momentum") or "betas" in wrapper["optimizer"]:
        choices.append([dict(type="LinearMomentum", start_factor=0.9, end=6, **steps)])
    return rng.choice(choices)


def draw_hooks(rng):
    hooks = []
    kinds = [
        None,
        dict(momentum=0.1),
        dict(ema_type="StochasticWeightAverage"),
        dict(ema_type="MomentumAnnealingEMA", gamma=4),
        dict(ema_type="ExpMomentumEMA", momentum=0.1, gamma=3),
        dict(ema_type="CosineEMA", momentum=0.3),
    ]
    if (ema := rng.choice(kinds)) is not None:
        begin = rng.choice([{}, {}, dict(begin_iter=4)])
        by = rng.choice([{}, dict(count_by="update")])
        interval = rng.choice([{}, {}, dict(interval=2)])
        hooks.append(dict(type="EMAHook", update_buffers=rng.random() < 0.5, **ema, **begin, **by, **interval))
    if rng.random() < 0.3:
        guard = dict(type="NumericsGuardHook", interval=rng.choice([5, 7]), max_in_row=None)
        hooks.append(guard | rng.choice([{}, dict(spike_factor=1.5, window=3)]))
    return hooks


def draw_data(rng, drop_last, has_nan):
    """Return a function that makes the data, the number of batches, and a description.

    Args:
      rng: the source of randomness.
      drop_last: of the loader; None for a list of batches.
      has_nan: an example is not finite.
    """
    count = rng.choice([40, 44, 60])
    entries = {key: value[:count] for key, value in ENTRIES.items()}
    if has_nan:
        entries["x"] = entries["x"].copy()
        entries["x"][rng.randrange(count)] = np.nan
    if drop_last is None:
        batches = [{key: value[i : i + 8] for key, value in entries.items()} for i in range(0, count - 7, 8)]
        return lambda: list(batches), len(batches), f"{len(batches)} batches"
    sampler = dict(type="DefaultSampler", shuffle=rng.random() < 0.5)
    loader = dict(batch_size=8, drop_last=drop_last, sampler=sampler)
    length = count // 8 if drop_last else -(-count // 8)
    return lambda: dict(loader, dataset=ArrayDataset(entries)), length, f"{count} examples in {loader}"


def draw_mesh(rng, is_exact_on_replicas):
    pjit = dict(type="Pjit", fsdp_min_size=8)
    meshes = [dict(**pjit, mesh=dict(data=2, fsdp=2), devices=4), dict(**pjit, mesh=dict(fsdp=4), devices=4)]
    meshes.append(dict(**pjit, devices=2))
    if is_exact_on_replicas:
        meshes += [dict(type="DataParallel", devices=2), dict(type="DataParallel", devices=4)]
    return rng.choice(meshes)


class Config:
    """A run of about a dozen iterations, drawn from a seed.

    Attributes:
      description: of the run, for the message of a failure.
      parallel: a mesh on which the results are those of one device up to rounding; None in low precision.
      steps_per_call: of its chunks.
      stops: the iterations at which the run is interrupted.
      saves: settings of its CheckpointHook.
    """

    def __init__(self, seed, program):
        rng = random.Random(program)
        name, self.make_model, traits = draw_model(rng)
        self.wrapper = draw_wrapper(rng)
        self.hooks = draw_hooks(rng)
        self.precision = None
        if "type" not in self.wrapper:
            self.precision = rng.choice([None] * 5 + ["bfloat16", dict(params="bfloat16")])
        self.steps_per_call = rng.choice([2, 3, 4, 5])
        drop_last = rng.choice([False, True, None])
        spikes = any(hook.get("spike_factor") for hook in self.hooks)
        of_batch = traits["norm"] == "batch" or traits["dropout"] or spikes
        self.parallel = None if self.precision or "type" in self.wrapper else draw_mesh(rng, not of_batch)
        rng = random.Random(seed)  # what follows changes no program
        has_guard = any(hook["type"] == "NumericsGuardHook" for hook in self.hooks)
        has_nan = has_guard and rng.random() < 0.5
        self.make_loader, length, data = draw_data(rng, drop_last, has_nan)
        self.by_epoch = rng.random() < 0.5
        self.max_iters = 3 * length if self.by_epoch else rng.randint(11, 16)
        self.length = (
            dict(by_epoch=True, max_epochs=3) if self.by_epoch else dict(by_epoch=False, max_iters=self.max_iters)
        )
        self.schedules = draw_schedules(rng, self.wrapper, self.by_epoch)
        self.stops = sorted(rng.sample(range(2, self.max_iters), 2))
        self.saves = dict(
            type="CheckpointHook", by_epoch=False, interval=self.steps_per_call + rng.choice([0, 0, 1, 2])
        )
        self.log_interval = rng.choice([1, 2, 3])
        self.description = "\n".join(
            [
                f"seed {seed}, program {program}: {name}",
                str(self.wrapper),
                f"{self.length} {data} nan={has_nan} precision={self.precision}",
                f"schedules: {self.schedules}",
                f"hooks: {self.hooks}",
                f"steps_per_call={self.steps_per_call} stops={self.stops} {self.saves} {self.parallel}",
            ]
        )

    def arguments(self, **changes):
        """Return arguments of a Runner, without `work_dir`."""
        train_cfg = dict(**self.length, steps_per_call=changes.pop("steps_per_call", 1))
        hooks = [dict(hook) for hook in self.hooks] + changes.pop("hooks", [])
        return dict(
            model=self.make_model(),
            train_dataloader=self.make_loader(),
            train_cfg=train_cfg,
            optim_wrapper=self.wrapper,
            param_scheduler=self.schedules,
            custom_hooks=hooks,
            default_hooks=dict(logger=dict(type="LoggerHook", interval=self.log_interval), checkpoint=self.saves),
            precision=self.precision,
            log_level="ERROR",
            **changes,
        )
