# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.language.chat import ChatTemplate as ChatTemplate
from jengine.extras.language.datasets import Additions as Additions
from jengine.extras.language.datasets import StandardLibrary as StandardLibrary
from jengine.extras.language.generation import generate as generate
from jengine.extras.language.generation import sample as sample
from jengine.extras.language.generation_hook import GenerationHook as GenerationHook
from jengine.extras.language.packed_files import PackedText as PackedText
from jengine.extras.language.packed_files import packed_text as packed_text
from jengine.extras.language.packing import encode_all as encode_all
from jengine.extras.language.packing import pack as pack
from jengine.extras.language.prompts import Prompts as Prompts
from jengine.extras.language.records import TextFormat as TextFormat
from jengine.extras.language.text_generator import TextGenerator as TextGenerator
from jengine.extras.language.text_score import TextScore as TextScore
from jengine.extras.language.text_score import exact_match as exact_match
from jengine.extras.language.token_windows import Sentences as Sentences
from jengine.extras.language.token_windows import TokenWindows as TokenWindows
from jengine.extras.language.tokenizers import ByteTokenizer as ByteTokenizer
from jengine.extras.language.tokenizers import FileTokenizer as FileTokenizer
from jengine.extras.language.tokenizers import Tokenizer as Tokenizer
from jengine.extras.language.tokenizers import build_tokenizer as build_tokenizer
