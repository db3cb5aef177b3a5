"""The command `jengine predict`."""

from jengine.cli.parser import Commands, add_checkpoint


def add_commands(commands: Commands) -> None:
    """Add `predict`."""
    predict = commands.add(
        "predict",
        "jengine.extras.serving.predict_command:run",
        "print predictions of a checkpoint, and write them to a file",
        commands.run,
    )
    add_checkpoint(predict)
    predict.add_argument(
        "--out",
        metavar="FILE",
        help="the .csv, .jsonl or .npz file to write",
    )
    data = (
        "test, val or train for the data of the config, in order (of several: val.NAME); or your "
        "own: a directory of images, an image, a pattern such as 'new/*.png', a .csv or .jsonl "
        "file whose columns are the entries of a sample, an .npz file of arrays, or a .jsonl, .csv "
        "or .txt file of prompts (default: test, or val without test data)"
    )
    predict.add_argument("--data", metavar="DATA", help=data)
    predict.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="examples per batch (default: that of the config)",
    )
