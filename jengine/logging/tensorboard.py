"""Backend for TensorBoard, without TensorFlow or PyTorch."""

import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from jengine.config.registry import VISBACKENDS
from jengine.logging.convert import Histogram, encode_png
from jengine.logging.run_backend import RunVisBackend, to_number

_FLUSH_SECONDS = 10  # a killed run loses at most this much


@VISBACKENDS.register_module()
class TensorboardVisBackend(RunVisBackend):
    """Scalars, images and the config in a TensorBoard event file below `save_dir`.

    Values that are not numbers are skipped, with one warning per name.
    """

    extra = "tensorboard"
    package = "tensorboard.summary.writer.event_file_writer"

    def __init__(self, save_dir: str | os.PathLike[str]) -> None:
        super().__init__(save_dir)
        self._warned: set[str] = set()

    def _open_run(self) -> Any:
        return self._import_package().EventFileWriter(str(self.save_dir), flush_secs=_FLUSH_SECONDS)

    def _write_text(self, name: str, text: str) -> None:
        from tensorboard.plugins.text import metadata
        from tensorboard.util import tensor_util

        # an indent of four spaces marks code
        markdown = "\n".join(f"    {line}" for line in text.splitlines())
        tensor = tensor_util.make_tensor_proto([markdown.encode()])
        plugin = metadata.create_summary_metadata(display_name=name, description="")
        self.experiment.add_event(_make_event(0, tag=name, tensor=tensor, metadata=plugin))

    def _end_run(self) -> None:
        self.experiment.close()

    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Write `image`, uint8[H, W, C], as PNG; errors as in `encode_png`."""
        height, width, channels = np.shape(image) if np.ndim(image) == 3 else (0, 0, 0)
        # For a wrong shape these are zeros, and `encode_png` raises the error.
        encoded = {
            "height": height,
            "width": width,
            "colorspace": channels,
            "encoded_image_string": encode_png(image),
        }
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
            if (number := to_number(value)) is not None:
                self.experiment.add_event(_make_event(step, tag=name, simple_value=number))
            # Once for each name: this is called at each log line.
            elif name not in self._warned:
                self._warned.add(name)
                kind = type(value).__name__
                warnings.warn(
                    f"{name!r} is not written to TensorBoard: it must be a number, got {kind}",
                    stacklevel=2,
                )

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Write a restart event: TensorBoard then drops later steps of earlier event files."""
        writer = self.experiment
        from tensorboard.compat.proto import event_pb2

        restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        writer.add_event(event_pb2.Event(wall_time=time.time(), step=step + 1, session_log=restart))


def _make_event(step: int, **value: Any) -> Any:
    from tensorboard.compat.proto import event_pb2, summary_pb2

    summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(**value)])
    return event_pb2.Event(wall_time=time.time(), step=int(step), summary=summary)
