"""What travels beside the weights: tokenizer, chat template, generation config, licences, model card."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import laneformer_jax
from laneformer_jax.chat import default_template
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError
from laneformer_jax.tokenizer import CHAT_CONTROL_SYMBOLS, Tokenizer

CARD, CHAT_TEMPLATE, GENERATION = "README.md", "chat_template.jinja", "generation_config.json"
# Copied as they are, both ways. Never code.
CARRIED = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE,
    GENERATION,
    CARD,
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
)
LANE_NOTE = (
    "transformers can load this lane layout only with the original authors' remote code, which is not "
    "included; export a dense model with `--as llama` for plain transformers"
)
LLAMA2_NOTE = (
    "the tokenizer is Llama 2's: its use and redistribution fall under the Llama 2 Community License, "
    "not under Apache-2.0"
)


def carried(folder: Path) -> dict[str, bytes]:
    """The files of a folder that belong with its weights, by name."""
    return {name: (folder / name).read_bytes() for name in CARRIED if (folder / name).is_file()}


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder; None when it has none that we read."""
    try:
        return Tokenizer.load(folder)
    except UserError:
        return None


def is_llama2(tokenizer: Tokenizer) -> bool:
    """Whether this is the vocabulary of Llama 2, whatever file format holds it."""
    if not 32000 <= tokenizer.vocab_size <= 32100:
        return False
    return tokenizer.piece(15043) == "▁Hello" and tokenizer.piece(3186) == "▁world"


def export_files(
    files: Mapping[str, bytes],
    config: LaneformerConfig,
    tokenizer: Tokenizer | None,
    card: str,
) -> dict[str, bytes]:
    """`files` and what an exported folder needs beside them: template, generation config, licence, card."""
    out = dict(files)
    if tokenizer is not None and set(CHAT_CONTROL_SYMBOLS) <= tokenizer.control_ids.keys():
        out.setdefault(CHAT_TEMPLATE, default_template().encode())
    tokens = {
        name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    generation = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in tokens.items()
        if value is not None
    }
    out.setdefault(GENERATION, (json.dumps(generation, indent=2) + "\n").encode())
    out.setdefault(CARD, card.encode())
    return out


def model_card(
    name: str,
    config: LaneformerConfig,
    metadata: Mapping[str, Any],
    dtype: str,
    tokenizer: Tokenizer | None,
    llama: bool,
) -> str:
    """A README.md that states what the model is, what its training run recorded, and its licences."""
    source = metadata.get("source")
    shape = [
        ("Parameters", f"{config.num_parameters():,} ({dtype})"),
        ("Layers × width", f"{config.num_hidden_layers} × {config.hidden_size}"),
        ("Query / kv heads", f"{config.num_attention_heads} / {config.num_key_value_heads}"),
        ("Feed-forward width", f"{config.intermediate_size}"),
        ("Vocabulary", f"{config.vocab_size}"),
        ("Context", f"{config.max_position_embeddings}"),
    ]
    if not llama:
        early = "summed at once" if config.use_early_comm else "independent lanes"
        exchange = ("Broadcast delay", f"{config.broadcast_delay} layers (before that: {early})")
        if config.ladder_residual:
            exchange = ("Exchange", "Ladder Residual: one module late")
        shape += [("Lanes", f"{config.num_lanes}"), exchange, ("Head", config.lm_head_type)]
    lines = [
        "---",
        *(["license: apache-2.0"] if not source else []),
        "library_name: transformers" if llama else "library_name: laneformer-jax",
        "pipeline_tag: text-generation",
        "---",
        "",
        f"# {name}",
        "",
        f"Exported by laneformer-jax {laneformer_jax.__version__}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in shape),
    ]
    facts = run_facts(metadata)
    if facts:
        lines += ["", "## The run", "", "| | |", "|---|---|"]
        lines += [f"| {key} | {value} |" for key, value in facts]
    lines += ["", "## Loading", ""]
    if llama:
        lines += [
            "```python",
            "from transformers import AutoModelForCausalLM",
            f'model = AutoModelForCausalLM.from_pretrained("{name}")',
            "```",
        ]
    else:
        lines += [
            "```python",
            "from laneformer_jax import Laneformer",
            f'model = Laneformer.from_pretrained("{name}")',
            "```",
            "",
            LANE_NOTE[0].upper() + LANE_NOTE[1:] + ".",
        ]
    weights = f"converted from {source['name']}; its licence applies" if source else "Apache-2.0"
    lines += ["", "## Licence", "", f"The weights: {weights}."]
    if tokenizer is not None and is_llama2(tokenizer):
        lines += ["", LLAMA2_NOTE[0].upper() + LLAMA2_NOTE[1:] + "."]
    return "\n".join(lines) + "\n"


def run_facts(metadata: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """What a checkpoint's metadata says about its making, flattened to `a.b` and its value."""
    facts: list[tuple[str, str]] = []
    for key, value in metadata.items():
        if not prefix and key in ("format", "kind", "dtype", "environment", "data_state"):
            continue
        if isinstance(value, Mapping):
            facts += run_facts(value, f"{prefix}{key}.")
        elif isinstance(value, str | int | float | bool) and len(str(value)) <= 200:
            facts.append((f"{prefix}{key}", str(value).replace("|", "\\|").replace("\n", " ")))
    return facts
