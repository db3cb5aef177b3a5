"""The example of docs/optim.md runs."""

import pathlib
import re

from jengine.optim import build_optim_wrapper


def test_examples_of_the_page():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "optim.md").read_text()
    config, program = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names = {}
    exec(config, names)
    exec(program, names)
    # (4 kernel + bias)^2 falls from 16 by three clipped steps
    assert 0 < float(names["loss"]) < 16
    wrapper = build_optim_wrapper(names["params"], names["optim_wrapper"])
    assert wrapper.accumulative_counts == 4
