"""Backend for TensorBoard, without TensorFlow or PyTorch."""

import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from jengine.config.errors import require_extra
from jengine.config.registry import VISBACKENDS
from jengine.logging.backend import BaseVisBackend
from jengine.logging.convert import Histogram, encode_png
from jengine.logging.history import to_float

_FLUSH_SECONDS = 10  # a killed run loses at most this much


@VISBACKENDS.register_module()
class TensorboardVisBackend(BaseVisBackend):
    """Scalars, images and the config in a TensorBoard event file below `save_dir`.

    Values that are not numbers are skipped, with one warning per name.
    """

    extra = "tensorboard"

    def __init__(self, save_dir: str | os.PathLike[str]) -> None:
        super().__init__(save_dir)
        self._writer: Any = None
        self._warned: set[str] = set()

    @property
    def experiment(self) -> Any:
        """The event file's writer, opened by the first use; an error if tensorboard is missing."""
        if self._writer is None:
            with require_extra(self.extra, "TensorboardVisBackend requires tensorboard"):
                from tensorboard.summary.writer.event_file_writer import EventFileWriter
            self._writer = EventFileWriter(str(self.save_dir), flush_secs=_FLUSH_SECONDS)
        return self._writer

    def add_config(self, config: str) -> None:
        """Write the config as text."""
        self._add_text("config", config)

    def add_graph(self, graph: str) -> None:
        """Write the model description as text."""
        self._add_text("graph", graph)

    def _add_text(self, name: str, text: str) -> None:
        writer = self.experiment
        from tensorboard.plugins.text import metadata
        from tensorboard.util import tensor_util

        # an indent of four spaces marks code
        markdown = "\n".join(f"    {line}" for line in text.splitlines())
        tensor = tensor_util.make_tensor_proto([markdown.encode()])
        plugin = metadata.create_summary_metadata(display_name=name, description="")
        writer.add_event(_make_event(0, tag=name, tensor=tensor, metadata=plugin))

    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Write `image`, uint8[H, W, C], as PNG; errors as in `encode_png`."""
        png = encode_png(image)  # which checks the shape
        height, width, channels = np.shape(image)
        encoded = dict(height=height, width=width, colorspace=channels, encoded_image_string=png)
        self.experiment.add_event(_make_event(step, tag=name, image=encoded))

    def add_histogram(self, name: str, histogram: Histogram, step: int = 0) -> None:
        """Write the histogram bins."""
        count = int(histogram.counts.sum())
        edges = histogram.edges
        total = count * histogram.mean if count else 0.0
        # E[x**2] = mean**2 + variance
        squares = count * (histogram.mean**2 + histogram.std**2) if count else 0.0
        bins = dict(bucket_limit=edges[1:].tolist(), bucket=histogram.counts.tolist())
        proto = dict(min=edges[0], max=edges[-1], num=count, sum=total, sum_squares=squares, **bins)
        self.experiment.add_event(_make_event(step, tag=name, histo=proto))

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Write each number under its name; `file_path` is ignored."""
        for name, value in scalar_dict.items():
            if name == "step":
                continue
            try:
                number = to_float(value)
            except (TypeError, ValueError):
                if name not in self._warned:  # this is called at each log line
                    self._warned.add(name)
                    kind = type(value).__name__
                    warnings.warn(
                        f"{name!r} is not written to TensorBoard: it must be a number, got {kind}",
                        stacklevel=2,
                    )
            else:
                self.experiment.add_event(_make_event(step, tag=name, simple_value=number))

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Write a restart event: TensorBoard then drops later steps of earlier event files."""
        writer = self.experiment
        from tensorboard.compat.proto import event_pb2

        restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        writer.add_event(event_pb2.Event(wall_time=time.time(), step=step + 1, session_log=restart))

    def close(self) -> None:
        """Close the event file; the next write opens another."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _make_event(step: int, **value: Any) -> Any:
    from tensorboard.compat.proto import event_pb2, summary_pb2

    summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(**value)])
    return event_pb2.Event(wall_time=time.time(), step=int(step), summary=summary)
