"""Measure how well an n-gram model predicts the sources of Python's standard library: a baseline
for language models.

    python -m benchmarks.kneser_ney [--order 5] [--vocab-size 1024]

Interpolated Kneser-Ney smoothing (Kneser and Ney 1995; Chen and Goodman 1999), with one discount
for each order, on the tokens and the split of `configs/lm.py:tiny`.
"""

import argparse

import numpy as np

from jengine.extras.language.datasets import StandardLibrary


def bits_per_byte(train, test, num_bytes, order, vocab_size):
    """Return the mean bits for each byte.

    Args:
      train, test: int[N] tokens.
      num_bytes: int[N], the bytes of each test token.
      order: number of tokens in an n-gram.
      vocab_size: number of different tokens; `vocab_size**order` must fit into an int64.
    """
    assert vocab_size**order < 2**63

    def grams(tokens, size):
        """Return the n-gram that ends at each token from `size - 1` on as one integer."""
        result = np.zeros(len(tokens) - size + 1, np.int64)
        for i in range(size):
            result = result * vocab_size + tokens[i : len(tokens) - size + 1 + i]
        return result

    def look_up(keys, values, wanted):
        index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[index] == wanted, values[index], 0)

    probability = np.full(len(test), 1 / vocab_size)
    for size in range(1, order + 1):
        if size == order:
            found, counts = np.unique(grams(train, size), return_counts=True)
        else:  # of how many tokens before it the n-gram has been seen after
            longer = np.unique(grams(train, size + 1))
            found, counts = np.unique(longer % vocab_size**size, return_counts=True)
        discount = (counts == 1).sum() / ((counts == 1).sum() + 2 * (counts == 2).sum())
        histories, starts = np.unique(found // vocab_size, return_index=True)
        totals = np.add.reduceat(counts, starts)
        kinds = np.diff(np.append(starts, len(found)))
        wanted = grams(test, size)
        total = look_up(histories, totals, wanted // vocab_size)
        lower = probability[size - 1 :]
        seen = np.maximum(look_up(found, counts, wanted) - discount, 0)
        weight = discount * look_up(histories, kinds, wanted // vocab_size)
        probability[size - 1 :] = np.where(
            total > 0, (seen + weight * lower) / np.maximum(total, 1), lower
        )
    return -np.log2(probability).sum() / num_bytes.sum()


def main():
    """Print the bits per byte."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--order", type=int, default=5)
    parser.add_argument(
        "--vocab-size", type=int, help="tokens of a byte-pair encoding; bytes without it"
    )
    args = parser.parse_args()
    train, test = (
        StandardLibrary(split=split, vocab_size=args.vocab_size) for split in ("train", "test")
    )
    value = bits_per_byte(
        train.tokens, test.tokens, test.token_bytes[test.tokens], args.order, test.vocab_size
    )
    print(
        f"{args.order}-grams: {value:.3f} bits per byte; {len(train.tokens):,} and "
        f"{len(test.tokens):,} tokens"
    )


if __name__ == "__main__":
    main()
