"""Support language models: generation, tokenizers and packed text."""

from jengine.contrib.language.generate import generate as generate
from jengine.contrib.language.generate import sample as sample
