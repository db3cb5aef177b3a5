"""Print the versions of Python and of the packages that jengine requires, which head the log of
a test run.
"""

import importlib.metadata
import platform
import re

required = [line for line in importlib.metadata.requires("jengine") or () if "extra ==" not in line]
names = ["jengine", "jaxlib", *(re.match(r"[\w.-]+", line)[0] for line in required)]
print(
    f"Python {platform.python_version()}",
    *(f"{name} {importlib.metadata.version(name)}" for name in names),
    sep=", ",
)
