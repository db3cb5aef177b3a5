"""Images in files, on a disk or at URLs: a transform that reads one, and a dataset with one
directory per class.
"""

import dataclasses
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jengine.config.annotations import Count
from jengine.config.errors import ConfigError, require_extra
from jengine.config.registry import DATASETS, TRANSFORMS
from jengine.config.storage import apply_backend_args, list_files, read_bytes
from jengine.data.host_entries import Sample
from jengine.extras.augment.base_dataset import BaseDataset, Indices, Record

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
Mode = Literal["RGB", "L"]


def read_image(
    path: str | os.PathLike[str], mode: Mode | None = "RGB", size: tuple[int, int] | None = None
) -> np.ndarray:
    """Read an image file, on a disk or at a URL with any fsspec scheme.

    >>> import fsspec, PIL.Image
    >>> with fsspec.open("memory://images/red.png", "wb") as file:
    ...     PIL.Image.new("RGB", (4, 2), (255, 0, 0)).save(file, "PNG")
    >>> image = read_image("memory://images/red.png")
    >>> image.shape, image[0, 0].tolist()
    ((2, 4, 3), [255, 0, 0])

    Args:
      path: a file that Pillow reads. One at a URL is read each time: nothing is kept on the disk.
      mode: 'RGB', 'L' for gray values, or None for the values in the file, which are the classes in
        a PNG with labels.
      size: (height, width) of the result; bilinear, with `mode=None` the nearest pixel.

    Returns:
      uint8[H, W, 3] for 'RGB', uint8[H, W, 1] for 'L'; without a mode, the dtype and axes in the
      file.

    Raises:
      FileNotFoundError: there is no such file. ValueError: it is not an image. MissingPackageError:
        without Pillow.
    """
    with require_extra("draw", "reading images requires Pillow"):
        from PIL import Image
    content = read_bytes(path)
    try:
        with Image.open(io.BytesIO(content)) as file:
            image = file if mode is None else file.convert(mode)
            if size is not None:
                image = image.resize(
                    size[::-1],
                    Image.Resampling.NEAREST if mode is None else Image.Resampling.BILINEAR,
                )
            pixels = np.array(image)
    except (OSError, ValueError, SyntaxError) as error:  # all of these are Pillow's
        raise ValueError(f"cannot read the image {os.fspath(path)}: {error}") from None
    return pixels[..., None] if mode == "L" else pixels


@TRANSFORMS.register_module()
@dataclasses.dataclass(frozen=True, eq=False)
class LoadImage:
    """Image file that is read and replaces its path in the sample; see `read_image`.

    >>> LoadImage(
    ...     path="seg_map_path", image="label", mode=None
    ... )  # class of each pixel, next to `LoadImage()`
    LoadImage(path='seg_map_path', image='label', mode=None, size=None, backend_args=None)

    Args:
      path: name for the entry with the path or URL, which is removed.
      image: name for the image entry.
      mode: 'RGB', 'L' for gray values, or None for the values in the file, such as segmentation
        classes.
      size: (height, width) of the result.
      backend_args: as in MMEngine, see `jengine.config.storage.apply_backend_args`.
    """

    path: str = "img_path"
    image: str = "image"
    mode: Mode | None = "RGB"
    size: tuple[Count, Count] | None = None
    backend_args: Mapping[str, Any] | None = None
    extra = "draw"

    def __post_init__(self) -> None:
        apply_backend_args("backend_args", None, self.backend_args)

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with the image."""
        if not isinstance(sample, Mapping) or self.path not in sample:
            found = sorted(sample) if isinstance(sample, Mapping) else f"the sample {sample!r:.80}"
            raise ConfigError(
                f"`LoadImage.path` must be an entry of the samples, got {self.path!r} for {found}; "
                f"a sample is a dict, such as {{{self.path!r}: 'new/a.png'}}"
            )
        rest = {name: value for name, value in sample.items() if name != self.path}
        path = apply_backend_args("LoadImage.path", sample[self.path], self.backend_args)
        return {**rest, self.image: read_image(path or "", self.mode, self.size)}


@DATASETS.register_module()
class ImageFolder(BaseDataset):
    """Images in directories named by their class: `root/cat/1.jpg`, `root/dog/a/2.png`.

    Samples are `image`: uint8[H, W, 3], `label`: int32[], the class index in alphabetical order,
    and `sample_idx`. The files are listed once. `metainfo["classes"]` has the class names, and
    `get_data_info(i)["img_path"]` is the image path.

    >>> import fsspec, PIL.Image
    >>> for name in ("dog/1.png", "cat/2.png", "cat/a/3.png"):
    ...     with fsspec.open(f"memory://animals/{name}", "wb") as file:
    ...         PIL.Image.new("RGB", (4, 4)).save(file, "PNG")
    >>> dataset = ImageFolder("memory://animals", size=(2, 2))
    >>> (
    ...     dataset.metainfo["classes"],
    ...     [int(dataset[i]["label"]) for i in range(len(dataset))],
    ...     dataset[0]["image"].shape,
    ... )
    (['cat', 'dog'], [0, 0, 1], (2, 2, 3))

    Args:
      root: directory, or URL with any fsspec scheme.
      size: (height, width) for all images; None for the sizes in the files.
      extensions: image extensions, in any case; other files are ignored.
      pipeline: further transforms, see `Pipeline`.
      indices, seed, metainfo, lazy_init: see `BaseDataset`.

    Raises:
      FileNotFoundError: there is nothing at `root`. ConfigError: there are no directories, or no
        images in one.
    """

    extra = "draw"

    def __init__(
        self,
        root: str | os.PathLike[str],
        size: tuple[Count, Count] | None = None,
        extensions: Sequence[str] = EXTENSIONS,
        pipeline: Sequence[Any] = (),
        indices: Indices = None,
        seed: int = 0,
        metainfo: Mapping[str, Any] | None = None,
        lazy_init: bool = False,
    ) -> None:
        self.root = os.fspath(root).rstrip("/")
        self.extensions = (extensions,) if isinstance(extensions, str) else tuple(extensions)
        # Files are read by the pipeline, in the workers, and not when the list is made.
        steps = [LoadImage(size=size), *pipeline]
        super().__init__(
            indices=indices, seed=seed, metainfo=metainfo, lazy_init=lazy_init, pipeline=steps
        )

    def load_data_list(self) -> list[Record]:
        """Return a record for each image, ordered by class and name."""
        names = list_files(self.root)
        if not names:
            raise FileNotFoundError(
                f"ImageFolder: `root` must be a directory with files, got {self.root}"
            )
        found: dict[str, list[str]] = {}
        # Sorted, as file systems and stores list in orders of their own: labels and indices must
        # not depend on them.
        for name in sorted(names):
            directory, _, rest = name.replace(os.sep, "/").partition("/")
            if rest:
                found.setdefault(directory, [])
                if rest.lower().endswith(tuple(end.lower() for end in self.extensions)):
                    found[directory].append(name)
        if not found:
            raise ConfigError(
                "ImageFolder: `root` must have a directory for each class, got only files in "
                f"{self.root}, such as {min(names)}"
            )
        if empty := [directory for directory, images in found.items() if not images]:
            raise ConfigError(
                "ImageFolder: each directory in `root` must have images, got none in "
                f"{self.root}/{empty[0]}: files "
                f"with other extensions than {', '.join(self.extensions)} are ignored"
            )
        classes = sorted(found)
        # Names that the user gives stay; the labels follow the sorted directories in any case.
        if "classes" not in self._metainfo:
            self._metainfo["classes"] = classes
        return [
            dict(img_path=f"{self.root}/{name}", label=np.int32(label))
            for label, directory in enumerate(classes)
            for name in found[directory]
        ]

    def get_cat_ids(self, idx: int) -> list[int]:
        """Return an image's class, for `ClassBalancedDataset`."""
        return [int(self.get_data_info(idx)["label"])]
