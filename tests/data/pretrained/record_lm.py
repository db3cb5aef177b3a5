"""Record the weights and logits of small language models of Hugging Face transformers.

Run this script next to its files, with packages that the tests do not need:
`pip install torch==2.13.0 transformers==5.23.0 safetensors`, then `python record_lm.py`.

Each model gives a directory as `save_pretrained` writes it, and in it `logits.npz` with `tokens` and `logits`.
"""

import pathlib

import numpy as np
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)  # fmt: skip

ROOT = pathlib.Path(__file__).parent
LLAMA = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=32)  # fmt: skip
# The wavelengths of the two pairs of channels, 6 and 281 tokens, are between the bounds 4 and 16, and above.
ROPE = dict(rope_type="llama3", rope_theta=2000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=16)  # fmt: skip
MODELS = {
    # The output projection of the attention is a square matrix: a wrong transposition fits.
    "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=12, n_embd=16, n_layer=2, n_head=4)),
    "llama": LlamaForCausalLM(LlamaConfig(**LLAMA, num_key_value_heads=2, rms_norm_eps=1e-5, rope_parameters=ROPE)),
    # With heads that are wider than the tokens, a window, and tied embeddings.
    "mistral": MistralForCausalLM(
        MistralConfig(**LLAMA, num_key_value_heads=1, head_dim=6, sliding_window=5, tie_word_embeddings=True,
                      attn_implementation="eager")
    ),
}  # fmt: skip

for name, model in MODELS.items():
    torch.manual_seed(0)
    for parameter in model.parameters():  # the initial values are too small to show an error: zero biases, unit norms
        scale = 0.3 if parameter.ndim > 1 else 0.1
        parameter.data = scale * torch.randn_like(parameter) + (parameter.data if parameter.ndim == 1 else 0)
    model.eval()
    # Several shards, as of a large model. The mistral is stored in bfloat16, from which its logits are computed.
    if name == "mistral":
        model = model.to(torch.bfloat16)
    model.save_pretrained(ROOT / name, max_shard_size="8KB" if name != "gpt2" else "1GB")
    model = type(model).from_pretrained(ROOT / name, dtype=torch.float32)  # `model.float()` keeps rounded frequencies
    tokens = torch.randint(0, 40, (2, 10))
    with torch.no_grad():
        logits = model(tokens).logits
    np.savez(ROOT / name / "logits.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy())
    (ROOT / name / "generation_config.json").unlink(missing_ok=True)
