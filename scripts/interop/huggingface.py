"""The Hugging Face side of the interoperability check; see README.md beside it.

    huggingface.py write DIR     a small random LlamaForCausalLM with grouped-query attention, and its logits
    huggingface.py check DIR     loads DIR/duokv with Transformers and compares logits with those that duokv wrote
"""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LIMIT = 1e-4


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits


def write(directory: Path) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=5000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).float().eval()
    model.save_pretrained(directory / "llama")
    tokens = torch.randint(0, config.vocab_size, (2, 40)).tolist()
    result = {"tokens": tokens, "logits": logits_of(model, tokens).flatten().tolist()}
    (directory / "llama" / "logits.json").write_text(json.dumps(result))


def check(directory: Path) -> bool:
    agreed = True
    for checkpoint in sorted((directory / "duokv").iterdir()):
        expected = json.loads((checkpoint / "logits.json").read_text())
        model, info = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, output_loading_info=True)
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            assert not info[key], (checkpoint, key, info[key])
        found = logits_of(model.eval(), expected["tokens"])
        difference = (found.flatten() - torch.tensor(expected["logits"])).abs().max().item()
        largest = found.abs().max().item()
        print(
            f"{checkpoint.name}: written by duokv, read by Transformers: "
            f"largest difference {difference:.2e} of logits up to {largest:.2f}"
        )
        agreed &= difference <= LIMIT
    return agreed


if __name__ == "__main__":
    command, target = sys.argv[1:]
    if command == "write":
        write(Path(target))
    else:
        sys.exit(0 if check(Path(target)) else 1)
