"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "DATASETS": {
        "Additions": "jengine.extras.language.datasets",
        "PackedText": "jengine.extras.language.packed_files",
        "Prompts": "jengine.extras.language.prompts",
        "Sentences": "jengine.extras.language.token_windows",
        "StandardLibrary": "jengine.extras.language.datasets",
        "TokenWindows": "jengine.extras.language.token_windows",
    },
    "HOOKS": {
        "GenerationHook": "jengine.extras.language.generation_hook",
    },
    "METRICS": {
        "TextScore": "jengine.extras.language.text_score",
    },
    "MODELS": {
        "TextGenerator": "jengine.extras.language.text_generator",
    },
    "names": {
        "ByteTokenizer": "jengine.extras.language.tokenizers",
        "ChatTemplate": "jengine.extras.language.chat",
        "FileTokenizer": "jengine.extras.language.tokenizers",
        "TextFormat": "jengine.extras.language.records",
        "Tokenizer": "jengine.extras.language.tokenizers",
        "build_tokenizer": "jengine.extras.language.tokenizers",
        "encode_all": "jengine.extras.language.packing",
        "exact_match": "jengine.extras.language.text_score",
        "generate": "jengine.extras.language.generation",
        "pack": "jengine.extras.language.packing",
        "packed_text": "jengine.extras.language.packed_files",
        "sample": "jengine.extras.language.generation",
    },
    "requires": {
        "networks": "jengine.extras.networks",
    },
}
