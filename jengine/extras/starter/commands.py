"""The command `jengine new`."""

from jengine.cli.parser import Commands


def add_commands(commands: Commands) -> None:
    """Add `new`."""
    new = commands.add(
        "new",
        "jengine.extras.starter.new:run",
        "write an experiment that trains at once, or a package",
        commands.traceback,
        runs_code=False,
    )
    new.add_argument("name", metavar="NAME", help="the name, an identifier of Python")
    new.add_argument(
        "--package",
        action="store_true",
        help="a package with a hook, a metric, a command and a reader instead of an experiment",
    )
