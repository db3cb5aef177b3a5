"""Keys in MMEngine's configs: those with a meaning here, and those without."""

from typing import Any

# The arguments of the Runner, and `vars`; a test compares them with its signature.
SECTIONS = (
    "model", "work_dir", "train_dataloader", "val_dataloader", "test_dataloader", "train_cfg", "val_cfg", "test_cfg",
    "optim_wrapper", "param_scheduler", "val_evaluator", "test_evaluator", "default_hooks", "custom_hooks",
    "load_from", "resume", "parallel", "precision", "log_processor", "visualizer", "randomness", "auto_scale_lr",
    "experiment_name", "log_level", "resume_policy", "vars",
)  # fmt: skip

# Keys that change nothing here, by dotted path, with the reason; `*` stands for train, val and test.
WITHOUT_EFFECT = {
    "default_scope": "a name is found in every package",
    "env_cfg": "there are no CUDA or fork settings",
    "cudnn_benchmark": "XLA tunes its kernels itself",
    "dist_params": "`jengine train --launcher` connects processes",
    "launcher": "`jengine train --launcher` connects processes",
    "find_unused_parameters": "gradients of unused parameters are zero",
    "model_wrapper_cfg": "`parallel` selects the strategy",
    "sync_bn": "`parallel` decides over which examples BatchNorm computes its statistics",
    "compile": "the step is always compiled",
    "runner_type": "there is one Runner",
    "vis_backends": "`visualizer` has its own",
    "randomness.deterministic": "a program gives the same numbers at each run on the same devices",
    "randomness.diff_rank_seed": "each process draws its own random numbers",
    "*_dataloader.persistent_workers": "workers stay alive between epochs",
    "*_dataloader.pin_memory": "batches are sent to the device before they are needed",
    "*_dataloader.collate_fn": "samples are always stacked",
}
_COLLATE = ({"type": "default_collate"}, {"type": "pseudo_collate"})  # any other `collate_fn` has an effect


def drop_without_effect(cfg: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a resolved config without MMEngine's keys that change nothing here, and a line with the reasons.

    >>> drop_without_effect({"work_dir": "runs", "launcher": "none"})[0]
    {'work_dir': 'runs'}
    """
    result, dropped = dict(cfg), []
    for pattern, reason in WITHOUT_EFFECT.items():
        for mode in ("train", "val", "test") if "*" in pattern else ("",):
            path = pattern.replace("*", mode)
            section, _, key = path.partition(".")
            if not key and section in result:
                del result[section]
            elif (
                key
                and isinstance(result.get(section), dict)
                and key in result[section]
                and (key != "collate_fn" or result[section][key] in _COLLATE)
            ):
                result[section] = {name: value for name, value in result[section].items() if name != key}
            else:
                continue
            dropped.append(f"{path} ({reason})")
    if not dropped:
        return result, ""
    return result, f"Keys of MMEngine that have no effect here: {'; '.join(dropped)}."
