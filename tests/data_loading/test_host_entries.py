import datetime

import jax.numpy as jnp
import numpy as np

from jengine.data import (
    DataLoader,
    build_dataloader,
    list_host_entries,
    put_arrays,
    select_arrays,
)
from jengine.data.masking import MaskedTuple

DAY = datetime.date(2024, 5, 1)


def make_batch():
    return {
        "x": np.zeros((2, 3), np.float32),
        "name": np.array(["a.png", "b.png"]),
        "time": np.array(["2024-05-01", "2024-05-02"], "datetime64[D]"),
        "boxes": np.array([None, [1, 2]], object),
        "meta": {"id": np.array([7, 8]), "source": np.array([b"s", b"t"])},
    }


def test_only_arrays_of_numbers_are_selected():
    batch = make_batch()
    selected = select_arrays(batch)
    assert selected.keys() == {"x", "meta"}
    assert selected["x"] is batch["x"]
    assert selected["meta"].keys() == {"id"}


def test_a_batch_of_arrays_is_returned_as_it_is():
    for batch in ({"x": np.zeros(2), "y": jnp.zeros(2)}, (np.zeros(2), {"y": np.ones(2, bool)})):
        assert select_arrays(batch) is batch


def test_entries_of_tuples_keep_their_positions():
    x, name, y = np.zeros(2), np.array(["a", "b"]), np.ones(2)
    assert [entry is None for entry in select_arrays((x, name, y))] == [False, True, False]
    masked = MaskedTuple((x, name), np.array([True, False]))
    assert select_arrays(masked)[1] is None
    assert select_arrays(masked).mask.tolist() == [True, False]


def test_host_entries_stay_where_they_are_when_the_arrays_are_sent_to_the_device():
    calls = []

    def put(arrays):
        calls.append(arrays)
        return {"x": jnp.asarray(arrays["x"]) + 1, "meta": arrays["meta"]}

    batch = make_batch()
    sent = put_arrays(batch, put)
    assert len(calls) == 1
    assert list(sent) == list(batch)
    assert sent["x"].tolist() == [[1, 1, 1], [1, 1, 1]]
    for key in ("name", "time", "boxes"):
        assert sent[key] is batch[key]
    assert sent["meta"]["source"] is batch["meta"]["source"]
    x, name = put_arrays((batch["x"], batch["name"]), lambda arrays: (arrays[0] + 2, None))
    assert x[0, 0] == 2
    assert name is batch["name"]


def test_host_entries_are_listed_with_their_kinds():
    kinds = list_host_entries(make_batch())
    assert kinds == {"name": "<U5", "time": "datetime64[D]", "boxes": "object", "meta.source": "|S1"}


def test_samples_with_strings_dates_and_objects_are_stacked():
    samples = [{"x": np.float32(k), "name": f"{k}.png", "day": DAY, "tokens": [k, 2]} for k in range(3)]
    (batch,) = DataLoader(samples, 3)
    assert batch["name"].tolist() == ["0.png", "1.png", "2.png"]
    assert batch["day"].tolist() == [DAY] * 3
    assert batch["tokens"].tolist() == [[0, 2], [1, 2], [2, 2]]
    assert batch["mask"].all()


def test_lists_in_batches_of_other_loaders_become_arrays():
    batch = {
        "x": [0.5, 1.0],
        "tokens": [[1, 2], [3, 4]],
        "name": ("a", "b"),
        "day": [DAY, DAY],
        "pair": [np.zeros(2)] * 2,
    }
    batch = next(iter(build_dataloader([batch], train=True)))
    assert batch["x"].tolist() == [0.5, 1.0]
    assert batch["tokens"].shape == (2, 2)
    assert list_host_entries(batch) == {"name": "<U1", "day": "object"}
    assert batch["day"].tolist() == [DAY, DAY]
    assert [entry.shape for entry in batch["pair"]] == [(2,), (2,)]  # a list of arrays remains one
    x, y = next(iter(build_dataloader([([1, 2], [3, 4])], train=True)))
    assert [x.tolist(), y.tolist()] == [[1, 2], [3, 4]]
