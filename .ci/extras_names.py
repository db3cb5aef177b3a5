"""Write jengine/extras/names.json: the names of each extra, for the error when it was deleted."""

import json
import pathlib

from jengine.config.plugins import list_extras


def main() -> None:
    """Write the file."""
    names = {
        extra: sorted({n for section, d in provides.items() if section != "requires" for n in d})
        for extra, provides in list_extras().items()
    }
    file = pathlib.Path(__file__).parent.parent / "jengine" / "extras" / "names.json"
    entries = {extra: found for extra, found in names.items() if found}
    file.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
