"""The command `jengine ckpt export`."""

from jengine.cli.parser import Commands, add_checkpoint


def add_commands(commands: Commands) -> None:
    """Add `ckpt export`."""
    text = "export the parameters for PyTorch, as a safetensors file"
    export = commands.add(
        "ckpt export",
        "jengine.extras.weights.export_command:run",
        text,
        commands.traceback,
        runs_code=False,
    )
    add_checkpoint(export)
    export.add_argument(
        "file", nargs="?", metavar="FILE", help="the file to write, such as model.safetensors"
    )
    params = export.add_mutually_exclusive_group()
    params.add_argument(
        "--ema",
        action="store_true",
        help="export the averaged parameters; an error if there are none",
    )
    params.add_argument(
        "--raw", action="store_true", help="export the trained parameters, not their average"
    )
    text = (
        "write a directory as on the Hugging Face Hub: config.json and safetensors files (a "
        "TransformerLM only)"
    )
    export.add_argument("--to", choices=["safetensors"], help=text)
    text = (
        "with --to: the directory with the config.json (default: the one that the run's load_from "
        "names, or a config of the network's own)"
    )
    export.add_argument("--like", metavar="DIR", help=text)
    export.add_argument(
        "--batch-stats",
        action="store_true",
        help="export the running statistics of batch norms too",
    )
