"""Chats as token ids: a model's own template for the markup, and messages that cannot become markup.

A chat model's file comes with a template that writes control tokens between messages. Rendering to one string
and encoding that, the usual way, lets a message that contains "<|im_start|>system" open a turn. Here the
template is rendered with placeholders for the messages (`jaxlib_icml.lm.chat_template`), control tokens are
looked for in what the template wrote only, and messages are encoded by an encoder that has none. For messages
without control tokens the ids are those of ``transformers``' ``apply_chat_template``.

Templates whose turns are marked by ordinary text, such as "[INST]" of Llama 2, leave nothing to protect: any
message can write that text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int32

from jaxlib_icml.lm.hub_tokenizer import HubTokenizer, Piece

__all__ = ["CHATML", "Message", "render_chat"]

_ROLES = ("system", "user", "assistant", "tool")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Message:
    """One turn of a chat.

    Attributes:
      role: "system", "user", "assistant" or "tool".
      content: the text, of any origin.
      name: who speaks or which tool answers, for templates that write it; of any origin too.
    """

    role: str
    content: str
    name: str | None = None

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise ValueError(f"role must be one of {', '.join(_ROLES)}, got {str(self.role)[:40]!r}")
        for field, value in (("content", self.content), ("name", self.name)):
            if not (isinstance(value, str) or (field == "name" and value is None)):
                raise ValueError(f"{field} must be a string, got {type(value).__name__}")


def render_chat(
    tokenizer: HubTokenizer,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
) -> Int32[np.ndarray, " tokens"]:
    """The token ids of a chat, control tokens included.

    Only the template writes control tokens. Messages of the model itself ("assistant") may hold added tokens that
    the tokenizer does not call special, such as "<think>"; in all other messages these are plain text too.

    Args:
      tokenizer: the model's.
      messages: the turns in order.
      template: a Jinja template; by default the tokenizer's own, or ChatML where it has none.
      add_generation_prompt: end with the markup that opens the model's next turn.

    Returns:
      The ids, ready to be given to the model: nothing is to be added in front.

    Raises:
      ValueError: no messages; the template fails, refuses the messages, leaves out a message that is not blank,
        or does what templates may not do; there is no template and the tokenizer lacks ChatML's tokens.
      ImportError: without the extra ``jaxlib-icml[lm]``.

    Example:
      >>> tokens = [*map(chr, range(33, 127)), *map(chr, range(161, 173)), *map(chr, range(174, 324))]
      >>> tokenizer = HubTokenizer.from_gguf({
      ...     "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.eos_token_id": 257, "tokenizer.ggml.merges": [],
      ...     "tokenizer.ggml.tokens": [*tokens, "<|im_start|>", "<|im_end|>"],
      ...     "tokenizer.ggml.token_type": [1] * 256 + [3, 3]})
      >>> ids = render_chat(tokenizer, [Message("user", "<|im_end|>")], add_generation_prompt=False)
      >>> tokenizer.decode(ids), (ids == 257).sum()
      ('user\\n<|im_end|>\\n', np.int64(1))
    """
    from jaxlib_icml.lm.chat_template import run_template  # needs jinja2

    if not messages:
        raise ValueError("messages must not be empty")
    if template is None:
        template = tokenizer.chat_template
    if template is None:
        missing = [token for token in ("<|im_start|>", "<|im_end|>") if token not in tokenizer.special_tokens]
        if missing:
            raise ValueError(
                f"template: the tokenizer has none, and ChatML, the default, needs the control tokens "
                f"{' and '.join(missing)}"
            )
        template = CHATML
    fields = [
        {"role": message.role, "content": message.content} | ({} if message.name is None else {"name": message.name})
        for message in messages
    ]
    variables: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
    segments = run_template(template, fields, variables | tokenizer.named_tokens)

    written = {segment.message for segment in segments}
    for index, message in enumerate(messages):
        if message.content.strip() and index not in written:
            raise ValueError(
                f"messages[{index}]: the chat template leaves out this message (role {message.role!r}), "
                "so the model would not see it"
            )
    pieces = [
        Piece(text, "markup" if index is None else "text" if messages[index].role == "assistant" else "quoted")
        for text, index in segments
    ]
    return tokenizer.encode_pieces(pieces)
