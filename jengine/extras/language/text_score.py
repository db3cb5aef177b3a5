"""Metric for generated text from a function that compares it with a reference."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jengine.config.registry import METRICS
from jengine.data.host_entries import Batch
from jengine.evaluation.metric import HostMetric, Predictions
from jengine.extras.language.tokenizers import TokenizerLike, build_tokenizer, decode_text
from jengine.model.selection import Selector, select_array


def exact_match(text: str, reference: str) -> float:
    """Return 1.0 if two texts are equal apart from spaces around them, else 0.0.

    >>> exact_match(" 42", "42")
    1.0
    """
    return float(text.strip() == reference.strip())


@METRICS.register_module()
class TextScore(HostMetric):
    """Mean score over generated texts, from a function that compares each with its reference.

    >>> metric = TextScore()
    >>> metric.process({"response": np.array(["4", "42"])}, np.array([[52, 256], [52, 256]]))
    >>> metric.collect(None)
    {'exact_match': 0.5}

    Args:
      tokenizer: 'bytes', the path to a tokenizer file or Hub directory, or a tokenizer.
      score: function that takes the generated text and the reference and returns a number, or its
        import path. Its name is the result's name.
      reference: the batch entry with the reference texts.
      prefix: prefix for the result name, none by default.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike = "bytes",
        score: Callable[[str, str], float] = exact_match,
        reference: Selector = "response",
        prefix: str | None = None,
    ) -> None:
        super().__init__(prefix)
        self.tokenizer = build_tokenizer(tokenizer)
        self.score = score
        self.reference = reference

    @property
    def names(self) -> tuple[str, ...]:
        """The function's name."""
        return (getattr(self.score, "__name__", type(self.score).__name__),)

    def process(self, data_batch: Batch, data_samples: Predictions) -> None:
        """Keep a batch's scores."""
        references = select_array(data_batch, self.reference, "TextScore.reference", "batch")
        for tokens, reference in zip(np.asarray(data_samples), references, strict=True):
            self.results.append(
                float(self.score(decode_text(self.tokenizer, tokens), str(reference)))
            )

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Return the mean."""
        return {self.names[0]: float(np.mean(results))}
