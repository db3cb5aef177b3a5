"""Test `jengine convert` on a config of iMIX."""

import pathlib
import re

from jengine.cli import main
from jengine.config import load_config, resolve


def test_a_config_of_imix_becomes_a_call_of_from_imix(tmp_path, capsys):
    path = tmp_path / "converted.py"
    assert main(["convert", str(pathlib.Path(__file__).parent / "visual_question_answering.py"), "-o", str(path)]) == 0
    cfg = resolve(load_config(path))
    assert cfg["train_cfg"] == dict(by_epoch=True, max_epochs=4, val_begin=5)
    assert cfg["optim_wrapper"]["optimizer"]["type"] == "BertAdam"
    assert cfg["train_dataloader"]["dataset"] == dict(type="my_data.VQADATASET")
    table = capsys.readouterr().out
    assert {"loss", "dist_params", "workflow"} <= {*re.findall(r"\| dropped +\| (\S+)", table)}
    assert {"optimizer", "lr_config", "log_config"} <= {*re.findall(r"\| taken over +\| (\S+)", table)}
    assert re.search(r"\| train_data\.data\.reader +\| name='VQAReader': no counterpart here", table)
    assert re.search(r"\| to be done +\| load_from +\| weights of \S*lxmert_pretrained.pth", table)
    assert re.search(r"\| model\.params +\| for your module: max_seq_length=20, num_labels=3129", table)
