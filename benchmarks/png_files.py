"""Write PNG files, read them as a dataset, and load them in batches with the libraries that are
installed.

Every loader yields dicts of `image`: uint8[B, SIZE, SIZE, 3] and `label`: int32[B] without end, in
  a shuffled order.
"""

import importlib.util
import io
import itertools

import numpy as np

SIZE = 96
NUM_CLASSES = 10
BATCH_SIZE = 64
AHEAD = 2


def write_files(directory, count):
    """Write `count` images of a rectangle on noise, whose position is its class, and return
    their paths.
    """
    from PIL import Image

    rng = np.random.default_rng(0)
    noise = rng.normal(110, 25, (SIZE * 4, SIZE * 4, 3)).clip(0, 255).astype(np.uint8)
    paths = []
    for i in range(count):
        top, left = rng.integers(0, 3 * SIZE, 2)
        image = noise[top : top + SIZE, left : left + SIZE].copy()
        corner = (i % NUM_CLASSES) * SIZE // NUM_CLASSES
        image[corner : corner + 24, 10:60] = rng.integers(0, 255, 3)
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "png", compress_level=1)
        paths.append(f"{directory}/{i:06d}.png")
        with open(paths[-1], "wb") as file:
            file.write(buffer.getvalue())
    return paths


def load_example(path, label):
    """Read and decode one file; all loaders but tf.data use this function."""
    from PIL import Image

    with Image.open(path) as image:
        return {"image": np.array(image), "label": np.int32(label)}


class PngFiles:
    """Provide the files as a map-style dataset."""

    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return load_example(self.paths[index], index % NUM_CLASSES)


def jengine_batches(paths, **settings):
    """Load with jengine; `settings` are `num_threads` or `num_workers`."""
    from jengine.data import DataLoader, DefaultSampler

    loader = DataLoader(
        PngFiles(paths),
        BATCH_SIZE,
        DefaultSampler(len(paths)),
        drop_last=True,
        prefetch_factor=AHEAD,
        **settings,
    )
    try:
        for epoch in itertools.count():
            loader.set_epoch(epoch)
            yield from loader
    finally:
        loader.close()


def grain_batches(paths, threads=0, workers=0):
    """Load with grain alone: threads, or worker processes, that build whole batches."""
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    dataset = (
        grain.MapDataset.source(PngFiles(paths))
        .shuffle(seed=0)
        .repeat()
        .batch(BATCH_SIZE, drop_remainder=True)
    )
    dataset = dataset.to_iter_dataset(grain.ReadOptions(threads, threads * AHEAD))
    if workers:
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(workers, AHEAD))
    iterator = iter(dataset)
    try:
        while True:
            yield next(iterator)  # without a variable, which would keep a batch of a worker
    finally:
        iterator.close()


def torch_batches(paths, workers):
    """Load with PyTorch's DataLoader and worker processes, which start as those of grain do."""
    from torch.utils.data import DataLoader

    loader = DataLoader(
        PngFiles(paths),
        BATCH_SIZE,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        prefetch_factor=AHEAD,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    while True:
        for batch in loader:
            yield {name: tensor.numpy() for name, tensor in batch.items()}


def tensorflow_batches(paths, threads):
    """Load with tf.data, which decodes with its own C++ function and has no Python in its
    threads.
    """
    import tensorflow as tf

    def load(path, label):
        return {"image": tf.io.decode_png(tf.io.read_file(path), channels=3), "label": label}

    labels = (np.arange(len(paths)) % NUM_CLASSES).astype(np.int32)
    dataset = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(paths)).repeat()
    dataset = dataset.map(load, num_parallel_calls=threads).batch(BATCH_SIZE, drop_remainder=True)
    yield from dataset.prefetch(AHEAD * threads).as_numpy_iterator()


def is_installed(package):
    """Return whether `package` can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None
