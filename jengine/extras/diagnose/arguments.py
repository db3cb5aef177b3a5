"""Arguments that people know from other command lines: the shortcuts of `train`, and what to write
instead of the others.
"""

import argparse
import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.config.errors import ConfigError, did_you_mean

_OVERRIDE = "--config."
# what other programs call a setting, without the dashes, by its path in the config
_NAMES = {
    "optim_wrapper.optimizer.lr": "lr learning-rate base-lr",
    "optim_wrapper.optimizer.type": "optimizer optim opt",
    "optim_wrapper.optimizer.weight_decay": "weight-decay wd",
    "optim_wrapper.optimizer.momentum": "momentum",
    "optim_wrapper.clip_grad.max_norm": "clip-grad grad-clip max-grad-norm gradient-clip-val",
    "optim_wrapper.accumulative_counts": "accumulate grad-accum gradient-accumulation-steps "
    "accumulate-grad-batches",
    "train_cfg.max_epochs": "epochs max-epochs num-epochs num-train-epochs n-epochs",
    "train_cfg.max_iters": "iters max-iters iterations steps max-steps num-steps",
    "train_cfg.val_interval": "val-interval eval-interval eval-every check-val-every-n-epoch",
    "train_cfg.max_time": "max-time",
    "train_dataloader.batch_size": "batch-size bs batch train-batch-size "
    "per-device-train-batch-size",
    "train_dataloader.num_workers": "workers num-workers dataloader-num-workers",
    "val_dataloader.batch_size": "val-batch-size eval-batch-size per-device-eval-batch-size",
    "default_hooks.logger.interval": "log-interval log-every print-freq logging-steps",
    "default_hooks.checkpoint.interval": "save-interval save-every save-steps checkpoint-interval",
    "default_hooks.checkpoint.save_best": "save-best",
    "randomness.seed": "seed random-seed",
    "precision": "amp fp16 bf16 half mixed-precision precision",
    "load_from": "load-from pretrained weights init-from",
    "experiment_name": "name exp-name run-name experiment",
}
_PATHS = {name: path for path, names in _NAMES.items() for name in names.split()}
_DEVICES = ("gpu", "gpus", "num-gpus", "n-gpus", "devices", "num-devices", "n-devices")
_OPTIONS = {
    **dict.fromkeys(("output-dir", "out-dir", "save-dir", "log-dir", "logdir"), "--work-dir"),
    **dict.fromkeys(("resume-from", "resume-from-checkpoint", "ckpt", "ckpt-path"), "--resume"),
}
EXAMPLES = """Any value of the config is set with --config.PATH=VALUE:
  jengine train CONFIG --config.optim_wrapper.optimizer.lr=0.01
  jengine train CONFIG --config.train_cfg.max_epochs=5 --config.randomness.seed=1
  jengine train CONFIG --config.precision=bfloat16 --config.custom_hooks[0].interval=5
  jengine train CONFIG --config.parallel="{'type': 'DataParallel', 'devices': 2}"
`jengine config CONFIG` prints all values.
"""


def explain_arguments(args: argparse.Namespace, rest: Sequence[str]) -> str:
    """Return what to write instead of the first argument that is not one of the command.

    "" if all of them set values of the config.

    Args:
      args: the arguments that the parser knows.
      rest: those that it does not, in order.
    """
    for i, argument in enumerate(rest):
        path, equals, value = argument.partition("=")
        if argument.startswith(_OVERRIDE):
            if equals and not re.match(r"[\[({\s]*(dict|list|tuple|set)\(", value):
                continue
            following = rest[i + 1] if i + 1 < len(rest) else "VALUE"
            text = _as_literal(value) if equals else following
            what = "a literal" if equals else "its value"
            return f"{argument} must have {what} after '=': write {_quote(path, text)}"
        hint = _explain(args, path, value, rest[i + 1 :])
        settings = "--config.PATH=VALUE sets a value of the config; " if "config" in args else ""
        return f"unknown argument {argument}; {hint or f'{settings}--help lists the options'}"
    return ""


def _explain(args: argparse.Namespace, given: str, value: str, following: Sequence[str]) -> str:
    """Return what to write instead of an unknown argument with a value; "" if nothing is known."""
    name = given.lstrip("-").lower().replace("_", "-")
    value = value or next((x for x in following if not x.startswith("-")), "")
    options = re.findall(r"--[\w-]+", args.parser.format_usage())
    if given.startswith("-") and f"--{name}" in options:  # `--batch_size`
        return f"write --{name} {value}".rstrip()
    if "config" in args:
        if given == "--config" and (value or following):  # a space in place of the dot
            path, _, value = (value or following[0]).partition("=")
            value = value or "".join(following[1:2]) or "VALUE"
            return f"write {_quote(_OVERRIDE + path, value)}"
        if re.fullmatch(r"(--)?[a-z_]+(\[\d+\])?\..+", given) and value:  # a path without `config`
            return f"write {_quote(_OVERRIDE + given.lstrip('-'), value)}"
        if name in _PATHS:
            if _PATHS[name] == "precision":
                value = "float16" if name == "fp16" else "bfloat16"
            return f"write {_quote(_OVERRIDE + _PATHS[name], value or 'VALUE')}"
        if name in _DEVICES:
            count = value if value.isdecimal() else "2"
            setting = _quote(
                f"{_OVERRIDE}parallel", f"{{'type': 'DataParallel', 'devices': {count}}}"
            )
            return (
                "all GPUs are used; CUDA_VISIBLE_DEVICES=0,1 in the environment chooses some, and "
                f"{setting} takes the first {count}"
            )
        if name in ("cpu", "device"):
            return "JAX_PLATFORMS=cpu in the environment chooses the CPU, cuda the GPUs"
    if _OPTIONS.get(name) in options:
        return f"write {_OPTIONS[name]} {value or 'PATH'}"
    close = did_you_mean(given, options, cutoff=0.75) if given.startswith("-") else ""
    return close.removeprefix("; ")


def add_shortcuts(train: argparse.ArgumentParser) -> None:
    """Add the shortcuts of `train`, and the examples of its help."""
    group = train.add_argument_group("shortcuts for the usual values of the config")
    group.add_argument("--lr", type=float, help=f"{_OVERRIDE}optim_wrapper.optimizer.lr")
    group.add_argument("--epochs", type=int, metavar="N", help=f"{_OVERRIDE}train_cfg.max_epochs")
    group.add_argument(
        "--batch-size", type=int, metavar="N", help=f"{_OVERRIDE}train_dataloader.batch_size"
    )
    train.epilog = EXAMPLES
    train.formatter_class = argparse.RawDescriptionHelpFormatter


def expand_shortcuts(
    args: argparse.Namespace, overrides: Sequence[str], cfg: Mapping[str, Any]
) -> list[str]:
    """Return the overrides of a config that the shortcuts of `train` stand for.

    Raises:
      ConfigError: the config has no such value, or several, or an override sets it too.
    """
    given = {name: vars(args).get(name) for name in ("lr", "epochs", "batch_size")}
    if args.command != "train" or not any(value is not None for value in given.values()):
        return []
    found = []
    for name, find in (("lr", _find_lr), ("epochs", _find_epochs), ("batch_size", _find_size)):
        if given[name] is None:
            continue
        path = find(cfg)
        if any(each.startswith(f"{_OVERRIDE}{path}=") for each in overrides):
            option = name.replace("_", "-")
            raise ConfigError(f"`{path}` must be set once, got --{option} and {_OVERRIDE}{path}")
        found.append(f"{_OVERRIDE}{path}={given[name]}")
    return found


def _find_lr(cfg: Mapping[str, Any]) -> str:
    wrapper: Any = cfg.get("optim_wrapper")
    optimizer: Any = _get(wrapper, "optimizer")
    if hasattr(optimizer, "items"):
        names = ("lr", "learning_rate")
        return f"optim_wrapper.optimizer.{next((n for n in names if n in optimizer), 'lr')}"
    several = wrapper.items() if hasattr(wrapper, "items") else ()
    paths = [
        f"{_OVERRIDE}optim_wrapper.{n}.optimizer.lr=" for n, x in several if _get(x, "optimizer")
    ]
    raise ConfigError(
        "`--lr` must be for a config with one optimizer, `optim_wrapper.optimizer`, got "
        f"{'several: ' + ', '.join(paths) if paths else type(wrapper).__name__}"
    )


def _find_epochs(cfg: Mapping[str, Any]) -> str:
    from jengine.runner.config_checks import is_epoch_based

    train_cfg = cfg.get("train_cfg")
    if not hasattr(train_cfg, "items") or not is_epoch_based(train_cfg):
        raise ConfigError(
            "`--epochs` must be for a config that trains by epochs, got one by iterations: "
            f"{_OVERRIDE}train_cfg.max_iters={_get(train_cfg, 'max_iters') or 'N'} sets its length"
        )
    return "train_cfg.max_epochs"


def _find_size(cfg: Mapping[str, Any]) -> str:
    loader: Any = cfg.get("train_dataloader")
    if not hasattr(loader, "items") or "dataset" not in loader:
        raise ConfigError(
            "`--batch-size` must be for a config with `train_dataloader.dataset`, got "
            f"{type(loader).__name__}, which makes its own batches"
        )
    name = "global_batch_size" if "global_batch_size" in loader else "batch_size"
    return f"train_dataloader.{name}"


def _get(node: Any, name: str) -> Any:
    return node.get(name) if hasattr(node, "items") else None


def _quote(path: str, value: str) -> str:
    """Return an override as one writes it in a shell."""
    return f'{path}="{value}"' if re.search(r"[^\w.,:/+-]", value) else f"{path}={value}"


def _as_literal(text: str) -> str:
    """Return the literal for a call of `dict` and its like; 'VALUE' for anything else."""
    try:
        return repr(_evaluate(ast.parse(text, mode="eval").body))
    except (ValueError, SyntaxError):
        return "VALUE"


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        kinds = {"dict": dict, "list": list, "tuple": tuple, "set": set}
        kind = kinds.get(node.func.id)
        if kind is not None:
            arguments = [_evaluate(each) for each in node.args]
            return kind(*arguments, **{str(x.arg): _evaluate(x.value) for x in node.keywords})
    if isinstance(node, ast.List | ast.Tuple):
        items = [_evaluate(each) for each in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict):
        keys = [_evaluate(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_evaluate, node.values), strict=True))
    return ast.literal_eval(node)
