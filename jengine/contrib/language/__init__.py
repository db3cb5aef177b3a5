"""Support language models: generation, tokenizers and packed text."""

from jengine.contrib.language.datasets import StandardLibrary as StandardLibrary
from jengine.contrib.language.generate import generate as generate
from jengine.contrib.language.generate import sample as sample
from jengine.contrib.language.packing import encode_all as encode_all
from jengine.contrib.language.packing import pack as pack
from jengine.contrib.language.tokenizers import ByteTokenizer as ByteTokenizer
from jengine.contrib.language.tokenizers import FileTokenizer as FileTokenizer
from jengine.contrib.language.tokenizers import Tokenizer as Tokenizer
