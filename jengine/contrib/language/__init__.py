"""Support language models: generation, tokenizers and packed text."""

from jengine.contrib.language.chat import ChatTemplate as ChatTemplate
from jengine.contrib.language.datasets import Additions as Additions
from jengine.contrib.language.datasets import StandardLibrary as StandardLibrary
from jengine.contrib.language.generate import generate as generate
from jengine.contrib.language.generate import sample as sample
from jengine.contrib.language.generation_hook import GenerationHook as GenerationHook
from jengine.contrib.language.packed_text import packed_text as packed_text
from jengine.contrib.language.packing import encode_all as encode_all
from jengine.contrib.language.packing import pack as pack
from jengine.contrib.language.prompts import Prompts as Prompts
from jengine.contrib.language.records import TextFormat as TextFormat
from jengine.contrib.language.text_generator import TextGenerator as TextGenerator
from jengine.contrib.language.text_score import TextScore as TextScore
from jengine.contrib.language.text_score import exact_match as exact_match
from jengine.contrib.language.tokenizers import ByteTokenizer as ByteTokenizer
from jengine.contrib.language.tokenizers import FileTokenizer as FileTokenizer
from jengine.contrib.language.tokenizers import Tokenizer as Tokenizer
from jengine.contrib.language.tokenizers import build_tokenizer as build_tokenizer
