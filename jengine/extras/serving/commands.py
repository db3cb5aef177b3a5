"""The command `jengine predict`."""

from jengine.cli.parser import Commands, add_checkpoint


def add_commands(commands: Commands) -> None:
    """Add `predict`."""
    predict = commands.add(
        "predict",
        "jengine.extras.serving.predict_command:run",
        "write predictions of a checkpoint to a file",
        commands.run,
    )
    add_checkpoint(predict)
    predict.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help="the .npz file to write, or .jsonl for generated text",
    )
    data = (
        "test, val or train for the data of the config, in order (of several: val.NAME), an .npz "
        "file of arrays, or a "
        ".jsonl or .txt file of prompts (default: test, or val without test data)"
    )
    predict.add_argument("--data", metavar="DATA", help=data)
    predict.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="examples per batch (default: that of the config)",
    )
