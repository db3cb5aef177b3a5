"""The code in docs/selfsup.md runs."""

import pathlib
import re


def test_the_first_example_turns_on_its_dense_loss(tmp_path, monkeypatch):
    page = (pathlib.Path(__file__).parents[3] / "docs" / "selfsup.md").read_text()
    block = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(block, "selfsup.md", "exec"), names)
    assert float(names["runner"].hyperparams["loss_lambda"]) == 0.5
    assert names["runner"].programs.update.traces == 1
