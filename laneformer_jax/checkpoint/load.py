"""Whatever a path holds: a Hugging Face folder or repository, a native checkpoint, or a run's folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from laneformer_jax.chat import ChatTemplate, Message
from laneformer_jax.checkpoint import hf, native
from laneformer_jax.errors import UserError
from laneformer_jax.model import Laneformer
from laneformer_jax.tokenizer import Tokenizer

CHAT_TEMPLATE = "chat_template.jinja"


class Loaded(NamedTuple):
    """A model and what belongs to its text."""

    model: Laneformer
    tokenizer: Tokenizer
    chat_template: ChatTemplate

    def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of a text to continue, or of chat messages to answer.

        Raises:
            UserError: an empty prompt, text that UTF-8 cannot hold, or malformed messages.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise UserError("prompt: is empty; there is nothing to continue")
            return self.tokenizer.encode(prompt, bos=True)
        encoded = self.chat_template.encode(prompt, self.tokenizer, add_generation_prompt=True)
        return [int(i) for i in encoded.ids]


def load_checkpoint(path: str | Path, dtype: Any = None, mesh: Mesh | None = None) -> Loaded:
    """Model, tokenizer and chat template of `path`; of a run the newest complete checkpoint.

    dtype: of the parameters; None keeps the files'. A folder without a template gets Laneformer's own.

    Raises:
        UserError: no such checkpoint, a damaged one, or one without a tokenizer.
    """
    if native.is_native(path):
        folder = native.find(path)
        model = native.load_model(folder, dtype=dtype, mesh=mesh)
    else:
        folder = hf.find_folder(path)
        model = hf.load(folder, dtype=dtype, mesh=mesh)
    template = folder / CHAT_TEMPLATE
    chat = ChatTemplate.load(template) if template.exists() else ChatTemplate()
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, more than the model's"
            f" vocab_size {model.config.vocab_size}: it belongs to another model"
        )
    return Loaded(model, tokenizer, chat)
