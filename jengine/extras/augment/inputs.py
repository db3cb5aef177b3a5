"""Image files, and rows of CSV and JSON lines, as samples."""

import csv
import dataclasses
import glob
import io
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jengine.config.annotations import is_mapping, parameters_of
from jengine.config.errors import ConfigError, config_path
from jengine.config.json_codec import decode_object
from jengine.config.registry import DATASETS
from jengine.config.storage import file_name, is_url, list_files, read_text, storage_path
from jengine.data.host_entries import Sample
from jengine.data.pipeline import Pipeline, TransformedDataset
from jengine.evaluation.sections import list_dataloaders, loader_path
from jengine.extras.augment.base_dataset import BaseDataset
from jengine.extras.augment.image_files import EXTENSIONS, LoadImage

Row = Mapping[str, Any]
ROWS = (".csv", ".jsonl")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Examples to predict.

    Attributes:
      dataset: the samples, for `Runner.predict`.
      rows: what names each example: its file, or the row that it was read from.
      note: how images are read if no pipeline says it; else empty.
    """

    dataset: Any
    rows: Sequence[Row]
    note: str = ""


def is_inputs(data: str) -> bool:
    """Return whether `data` names image files, or a file with rows; it need not exist.

    >>> [is_inputs(name) for name in ("new/", "a.png", "new/*.png", "rows.csv", "val", "data.npz")]
    [True, True, True, True, False, False]
    """
    ends = (*EXTENSIONS, *ROWS)
    return (
        file_name(data).lower().endswith(ends)
        or data.endswith("/")
        or os.path.isdir(data)
        or (not is_url(data) and glob.has_magic(data))
    )


def open_inputs(data: str, cfg: Mapping[str, Any]) -> Inputs:
    """Return the examples in files, as samples of the validation's pipeline.

    Args:
      data: a directory of images, one image, a pattern such as `new/*.png`, or a .csv or .jsonl
        file, whose columns are the entries of a sample.
      cfg: the run's config.

    Raises:
      ConfigError: there are no examples, or the validation data do not say how to read them.
    """
    path, dataset = _find_dataset(cfg)
    base, transforms = _split(dataset)
    loads = [step for step in transforms if isinstance(step, LoadImage)]
    note = ""
    if data.lower().endswith(ROWS):
        rows: Sequence[Row] = read_rows(data)
        records = [_complete_paths(row, data, [step.path for step in loads]) for row in rows]
        if not transforms:
            transforms = [_RowToSample(_first(base, path), path, tuple(rows[0]))]
    else:
        files = _list_images(data)
        rows = [{"file": name} for name in files]
        name = loads[0].path if loads else _find_path(base)
        if not name:
            name, steps, note = _fit_image(_first(base, path), path)
            transforms = [*steps, *transforms]
        records = [{name: file} for file in files]
    return Inputs(_Samples(records, transforms, f"{path}.pipeline", data), rows, note)


def read_rows(path: str) -> list[dict[str, Any]]:
    """Return the rows in a .csv file with a heading, or the objects in a .jsonl file.

    A column of a .csv file has numbers if all of its values are numbers.
    """
    try:
        text = read_text(path).removeprefix("\ufeff")
    except (OSError, ValueError) as error:
        raise ConfigError(f"`--data` must be a file of rows that can be read: {error}") from None
    if path.lower().endswith(".csv"):
        table = list(csv.reader(io.StringIO(text)))
        names = table[0] if table else []
        cells = [row for row in table[1:] if row]
        for number, row in enumerate(cells, start=1):
            if len(row) != len(names):
                raise ConfigError(
                    f"`--data` must have {len(names)} values in each row, got {len(row)} in row "
                    f"{number} of {path}"
                )
        columns = [_as_numbers(column) for column in zip(*cells, strict=True)]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    else:
        rows = []
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                rows += [decode_object(line)] if line.strip() else []
            except ValueError as error:
                raise ConfigError(
                    f"`--data` must have one JSON object in each line, got line {number} of "
                    f"{path}: {error}"
                ) from None
    if not rows:
        raise ConfigError(f"`--data` must have at least one row, got none in {path}")
    return rows


def find_metainfo(cfg: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the facts about the validation data, such as the class names; {} without any."""
    try:
        dataset = _find_dataset(cfg)[1]
        if isinstance(dataset, BaseDataset):
            dataset.full_init()  # which reads the classes
        metainfo = getattr(dataset, "metainfo", None)
    except Exception:  # the data need not be here
        return {}
    return metainfo if isinstance(metainfo, Mapping) else {}


def as_record(pipeline: Pipeline, value: Any) -> Any:
    """Return the record for an image's path if the pipeline begins with `LoadImage`.

    Any other value is returned unchanged.
    """
    first = next(iter(pipeline.transforms), None)
    if isinstance(value, str | os.PathLike) and isinstance(first, LoadImage):
        return {first.path: os.fspath(value)}
    return value


class _Samples:
    """Samples that a pipeline makes of records; errors name the pipeline."""

    def __init__(self, records: Sequence[Row], pipeline: Any, path: str, data: str) -> None:
        numbered = [{**record, "sample_idx": index} for index, record in enumerate(records)]
        self._dataset = TransformedDataset(numbered, pipeline)
        self._path = path
        self._data = data

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        record = self._dataset.dataset[index]
        names = ", ".join(name for name in record if name != "sample_idx")
        given = f"got one of {self._data} with {names}"
        try:
            sample = self._dataset[index]
        except KeyError as error:
            if error.args and error.args[0] in record:
                raise
            raise ConfigError(
                f"`{self._path}` must make a sample of an example without {error}, {given}"
            ) from error
        if sample is None:
            raise ConfigError(f"`{self._path}` must make a sample of each example, {given}")
        return sample


class _RowToSample:
    """Transform of a row into a sample with the entries, dtypes and shapes of another one."""

    def __init__(self, like: Any, path: str, columns: Sequence[str]) -> None:
        self._entries: dict[str, tuple[np.ndarray, Sequence[str]]] = {}
        named = {name: np.asarray(value) for name, value in like.items()} if _is_dict(like) else {}
        for name, value in named.items():
            parts = [name]
            if name not in columns and value.ndim == 1:
                parts = [_find_part(name, i, columns) for i in range(value.size)]
            if set(parts) <= set(columns):
                self._entries[name] = value, parts
        if not self._entries:
            known = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in named.items())
            raise ConfigError(
                f"`--data` must have columns named like the entries of a sample of `{path}`, "
                f"{known or 'which have no names'}, got {', '.join(columns)}"
            )

    def __call__(self, row: Row) -> Sample:
        """Return the sample."""
        sample = {}
        for name, (like, parts) in self._entries.items():
            value = [row[part] for part in parts] if parts != [name] else row[name]
            try:
                array = np.asarray(value, like.dtype)
            except (TypeError, ValueError):
                array = np.asarray(value)
            if array.dtype != like.dtype or array.shape != like.shape:
                raise ConfigError(
                    f"`--data` must have {like.dtype}{list(like.shape)} in the column {name!r}, "
                    f"got {value!r}"
                )
            sample[name] = array
        return sample


def _find_part(name: str, index: int, columns: Sequence[str]) -> str:
    """Return the column with one number of a vector: `x0`, `x_0`, `x.0` or `x[0]`."""
    names = [f"{name}{index}", f"{name}_{index}", f"{name}.{index}", f"{name}[{index}]"]
    return next((column for column in names if column in columns), "")


def _find_dataset(cfg: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the path of the validation data in a config, else the test data, and the dataset."""
    for mode in ("val", "test"):
        for name, loader in list_dataloaders(cfg, (mode,)).items():
            path = f"{loader_path(mode, name.partition('.')[2])}.dataset"
            if not is_mapping(loader):
                return path, getattr(loader, "dataset", None)
            if "dataset" in loader:
                with config_path(path):
                    return path, _build(loader["dataset"])
    raise ConfigError("`val_dataloader` must have a dataset, whose pipeline reads the examples")


def _build(dataset: Any) -> Any:
    """Return the dataset of a config, without its annotations if its pipeline is enough."""
    if not is_mapping(dataset):
        return dataset
    kind = DATASETS.get(dataset["type"]) if isinstance(dataset.get("type"), str) else None
    is_lazy = isinstance(kind, type) and issubclass(kind, BaseDataset)
    is_lazy = is_lazy and "lazy_init" in parameters_of(kind)
    return DATASETS.build({**dataset, "lazy_init": True} if is_lazy else dataset)


def _split(dataset: Any) -> tuple[Any, list[Callable[..., Any]]]:
    """Return the innermost dataset, and all transforms around it in order."""
    inner = getattr(dataset, "dataset", None)
    if inner is None and getattr(dataset, "datasets", None):
        inner = dataset.datasets[0]
    base, transforms = (dataset, []) if inner is None else _split(inner)
    pipeline = getattr(dataset, "pipeline", None)
    return base, [*transforms, *(pipeline.transforms if isinstance(pipeline, Pipeline) else [])]


def _first(base: Any, path: str) -> Any:
    """Return the first sample of a dataset, before its pipeline."""
    if isinstance(base, BaseDataset):
        return base.get_data_info(0)
    try:
        return base[0]
    except (TypeError, KeyError, IndexError):
        raise ConfigError(
            f"`{path}` must have samples by index or a pipeline, which say how to read other data, "
            f"got {type(base).__name__}"
        ) from None


def _find_path(base: Any) -> str:
    """Return the entry with an image's path in the records of a dataset; "" without one."""
    if not isinstance(base, BaseDataset):
        return ""
    record = base.get_data_info(0)
    found = (name for name, x in record.items() if isinstance(x, str) and _is_image(x))
    return next(found, "")


def _fit_image(sample: Any, path: str) -> tuple[str, list[Callable[..., Any]], str]:
    """Return transforms that read image files like the image in a sample, and a line about that.

    The first result is the entry with the path.
    """
    named = sample.items() if _is_dict(sample) else ()
    arrays = {name: np.asarray(x) for name, x in named if np.ndim(x) == 3}
    images = {name: x for name, x in arrays.items() if x.shape[-1] in (1, 3)}
    if len(images) != 1:
        raise ConfigError(
            f"`{path}` must have a pipeline with LoadImage, or samples with one image [H, W, 1 or "
            f"3], so that it says how to read image files, got {', '.join(arrays) or 'no image'}"
        )
    name, image = next(iter(images.items()))
    is_scaled = image.dtype.kind == "f" and image.min() >= 0 and 0 < image.max() <= 1
    if image.dtype != np.uint8 and not is_scaled:
        raise ConfigError(
            f"`{path}` must have a pipeline with LoadImage for images of {image.dtype} from "
            f"{image.min():g} to {image.max():g}: only bytes, and floats from 0 to 1, are read "
            "without one"
        )
    height, width, channels = image.shape
    load = LoadImage(image=name, mode="L" if channels == 1 else "RGB", size=(height, width))

    def scale(sample: Sample) -> Sample:
        return {**sample, name: (sample[name] / 255).astype(image.dtype)}

    values = f"{image.dtype} from 0 to 1" if is_scaled else "bytes"
    kind = "gray" if channels == 1 else "RGB"
    note = f"images are read like those of {path}: {height} x {width} pixels, {kind}, {values}"
    return load.path, [load, scale] if is_scaled else [load], note


def _list_images(data: str) -> list[str]:
    """Return the paths of the image files in a directory, a pattern, or of one image."""
    if _is_image(data):
        if not is_url(data) and not os.path.isfile(data) and not glob.has_magic(data):
            raise ConfigError(f"`--data` must exist, got {data}, which does not")
        files = [data] if is_url(data) or os.path.isfile(data) else glob.glob(data, recursive=True)
    elif not is_url(data) and glob.has_magic(data) and not os.path.isdir(data):
        files = glob.glob(data, recursive=True)
    else:
        root = storage_path("--data", data)
        files = [f"{data.rstrip('/')}/{name}" for name in list_files(root)]
    images = sorted(file for file in files if _is_image(file))
    if not images:
        found = f"{len(files)} other files" if files else "nothing"
        raise ConfigError(
            f"`--data` must have image files ({', '.join(EXTENSIONS)}), got {found} at {data}"
        )
    return images


def _complete_paths(row: Row, data: str, names: Sequence[str]) -> dict[str, Any]:
    """Return a row with the paths that are relative to its file."""
    record = dict(row)
    for name in names:
        path = record.get(name)
        if isinstance(path, str) and not is_url(path) and not os.path.isabs(path):
            beside = os.path.join(os.path.dirname(data), path)
            record[name] = beside if is_url(data) or os.path.exists(beside) else path
    return record


def _as_numbers(column: Sequence[str]) -> Sequence[Any]:
    for kind in (int, float):
        try:
            return [kind(text) for text in column]
        except ValueError:
            continue
    return column


def _is_image(path: str) -> bool:
    return path.lower().endswith(EXTENSIONS)


def _is_dict(sample: Any) -> bool:
    return isinstance(sample, Mapping)
