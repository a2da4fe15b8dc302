"""Text to token ids and back, exactly, for any text.

`Tokenizer.encode` never produces a control token from text: markers such as `<s>` or `<|user|>` in
a document or a chat message are encoded as ordinary characters. Control tokens enter a sequence by
id only (`bos_id`, `eos_id`, `control_ids`).

Two file formats are read: a sentencepiece `tokenizer.model` (ours, Llama-2's) and a Hugging Face
`tokenizer.json`. `train_tokenizer` writes the first.
"""

from laneformer_jax.tokenizer.face import StreamDecoder, Tokenizer
from laneformer_jax.tokenizer.training import CHAT_CONTROL_SYMBOLS, train_tokenizer

__all__ = ["CHAT_CONTROL_SYMBOLS", "StreamDecoder", "Tokenizer", "train_tokenizer"]
