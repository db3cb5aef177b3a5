"""The command `jengine convert`."""

from jengine.cli.parser import Commands


def add_commands(commands: Commands) -> None:
    """Add `convert`."""
    convert = commands.add(
        "convert",
        "jengine.extras.mmengine.convert:run",
        "convert a config of MMEngine or iMIX",
        commands.traceback,
    )
    convert.add_argument(
        "mmengine_config", metavar="MMENGINE_CONFIG", help="a flat Python file, with its base files"
    )
    convert.add_argument(
        "-o", "--out", metavar="FILE", help="the file to write (default: standard output)"
    )
