import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np

from jengine.data import ArrayDataset, DataLoader, MaskedTuple, stack_batches
from jengine.data.masking import get_mask, without_mask
from jengine.train.losses import total_loss


def test_padded_tuples_and_lists_unpack_like_unpadded_ones_and_have_a_mask():
    arrays = np.arange(3.0), np.arange(3)
    samples = [[np.float64(i), np.int64(i)] for i in range(3)]
    for dataset in (ArrayDataset(arrays), ArrayDataset(list(arrays)), samples):
        full, padded = DataLoader(dataset, 2)
        x, y = padded
        assert [x.tolist(), y.tolist()] == [[2, 0], [2, 0]]
        assert [get_mask(full).tolist(), get_mask(padded).tolist()] == [[True, True], [True, False]]
        assert len(without_mask(padded)) == 2
        assert get_mask(without_mask(padded)) is None


def test_without_padding_no_mask_is_added():
    (batch,) = DataLoader(ArrayDataset((np.arange(3), np.arange(3))), 2, drop_last=True)
    assert type(batch) is tuple
    assert get_mask(batch) is None


def test_a_masked_tuple_is_a_pytree_of_its_items_and_the_mask():
    batch = MaskedTuple((np.ones(2), {"y": np.zeros(2)}), np.array([True, False]))
    doubled = jax.jit(lambda batch: jax.tree.map(lambda x: x * 2, batch))(batch)
    assert type(doubled) is MaskedTuple
    assert [doubled[0].tolist(), doubled.mask.tolist()] == [[2, 2], [2, 0]]
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(batch)[0]]
    assert names == ["[0]", "[1]['y']", ".mask"]
    stacked = stack_batches([batch, batch])
    assert [stacked[0].shape, stacked.mask.shape] == [(2, 2), (2, 2)]


def test_a_masked_tuple_can_be_copied_and_sent_to_a_process():
    batch = MaskedTuple((1, 2), 3)
    for other in (pickle.loads(pickle.dumps(batch)), copy.copy(batch), copy.deepcopy(batch)):
        assert (type(other), tuple(other), other.mask) == (MaskedTuple, (1, 2), 3)


def test_padding_of_a_tuple_does_not_count_in_the_loss():
    mask = np.array([True, True, False])
    losses = {"loss": jnp.array([1.0, 3.0, jnp.nan])}  # a padded example may have any loss
    total, _ = total_loss(losses, MaskedTuple((np.zeros(3),), mask))
    assert total == 2.0
    assert total_loss(losses, {"mask": mask})[0] == 2.0
