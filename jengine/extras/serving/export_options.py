"""The option `--jax-export` of `jengine ckpt export`, next to options of other extras."""

from jengine.cli.parser import Commands, add_checkpoint

_RUN = "jengine.extras.serving.export_command:run"


def add_commands(commands: Commands) -> None:
    """Add the option, and the command if there is none."""
    is_alone = "ckpt export" not in commands
    if not is_alone:
        export = commands["ckpt export"]
        export.set_defaults(run=_RUN, run_other=export.get_default("run"))
    else:
        text = "export the predictions as a jax.export artifact"
        export = commands.add("ckpt export", _RUN, text, commands.traceback, runs_code=False)
        add_checkpoint(export)
        weights = export.add_mutually_exclusive_group()
        averaged = "with the averaged parameters; an error if there are none"
        weights.add_argument("--ema", action="store_true", help=averaged)
        trained = "with the trained parameters, not their average"
        weights.add_argument("--raw", action="store_true", help=trained)
    group = export.add_argument_group("an artifact that predicts without the model's code")
    artifact = "the serialized jax.export artifact to write"
    group.add_argument("--jax-export", metavar="FILE", required=is_alone, help=artifact)
    inputs = (
        "an entry of a batch, without the batch axis, such as image=float32[8,8,1] (default: the "
        "entries of the config's data)"
    )
    group.add_argument("--input", action="append", metavar="NAME=DTYPE[SHAPE]", help=inputs)
    group.add_argument(
        "--batch-size", type=int, metavar="N", help="the only batch size (default: any)"
    )
    group.add_argument(
        "--trust",
        action="store_true",
        help="let the checkpoint's config run any code that it names",
    )
    group.add_argument(
        "--platforms", metavar="LIST", help="devices on which it can run (default: cpu,cuda,tpu)"
    )
