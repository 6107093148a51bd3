"""Define the models of `router-replay make-model`: their recipes, configs and tokenizer.

Each is a Qwen3-MoE with a character tokenizer. `warm_start.py` trains it, and the finished tiny model is in `ready/`:

    model = AutoModelForCausalLM.from_pretrained(router_replay.rl.config.tiny_folder())

The model has ten layers, and its training stops early. Replay has a visible effect on a deep model that is still
uncertain; a shallow or a nearly perfect model hides it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from typing import Any, Literal

from router_replay.errors import ConfigError

Size = Literal["tiny", "gpu"]
STAMP = "recipe.json"
REVISION = 1
"""Part of the stamp. Increase it when a change of the training code changes the model."""
PAD, END = "<|pad|>", "<|end|>"
CHARACTERS = "0123456789+-*=?<>[]!"
# Messages are joined without roles, because the tiny model was not trained with roles.
_CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Hold everything that decides which model is made: its shape, its training data and its training."""

    layers: int = 10
    width: int = 96
    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 32
    """vLLM's attention on the CPU supports 32, but not 24."""
    experts: int = 56
    """With 64 experts of this width the model would exceed the 12 MB that it may take in the repository."""
    top_k: int = 8
    expert_width: int = 32
    """vLLM's experts on the CPU need multiples of 32, here and for `width`."""
    digits: int = 2
    """The number of digits of the operands."""
    steps: int = 400
    """The maximum number of steps; the learning rate falls to 0 over them."""
    target: float = 0.56
    """Stop when a sampled answer to an addition is right with this probability."""
    window: int = 2
    """The number of steps over which this probability is averaged."""
    learning_rate: float = 2e-3
    warmup: int = 10
    additions: int = 208
    """Examples of the arithmetic environment per step."""
    calculations: int = 48
    """Episodes of the calculator environment per step."""
    aux_loss: float = 0.01
    """Weight of the load-balancing loss."""
    max_grad_norm: float = 1.0
    save_every: int = 25
    """Steps between two saved states; an interrupted run continues from the last one."""
    seed: int = 0

    @property
    def digest(self) -> str:
        """Return a digest that identifies the model that this recipe makes."""
        fields = dataclasses.asdict(self)
        del fields["save_every"]  # how often it is saved does not change the model
        text = json.dumps({"revision": REVISION, **fields}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


RECIPES: dict[str, Recipe] = {
    "tiny": Recipe(),
    "gpu": Recipe(
        layers=16, width=1024, heads=16, key_value_heads=4, head_dim=64, experts=64, expert_width=128, digits=3,
        steps=3000, learning_rate=3e-4, warmup=100, additions=832, calculations=192, save_every=500,
    ),
}  # fmt: skip


def recipe_for(size: str, *, steps: int | None = None, digits: int | None = None, seed: int | None = None) -> Recipe:
    """Return the recipe of a size ("tiny" or "gpu"), with the given changes."""
    if size not in RECIPES:
        raise ConfigError(f"size must be one of {sorted(RECIPES)}, got {size!r}")
    changes = {"steps": steps, "digits": digits, "seed": seed}
    for name, value in changes.items():
        if value is not None and value < (name != "seed"):
            raise ConfigError(f"{name} must be at least {int(name != 'seed')}, got {value}")
    return dataclasses.replace(RECIPES[size], **{name: value for name, value in changes.items() if value is not None})


def make_tokenizer() -> Any:
    """Return a tokenizer with one token per character. It refuses other characters instead of changing them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([PAD, END, *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token=PAD, eos_token=END, chat_template=_CHAT_TEMPLATE, model_max_length=512
    )


def make_config(recipe: Recipe) -> Any:
    """Return the Hugging Face config of a recipe's model."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=len(CHARACTERS) + 2, hidden_size=recipe.width, intermediate_size=recipe.width * 2,
        moe_intermediate_size=recipe.expert_width, num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads, num_key_value_heads=recipe.key_value_heads, head_dim=recipe.head_dim,
        num_experts=recipe.experts, num_experts_per_tok=recipe.top_k, norm_topk_prob=True,
        router_aux_loss_coef=recipe.aux_loss, max_position_embeddings=512, tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip


def read_stamp(folder: pathlib.Path) -> dict[str, Any] | None:
    """Return the stamp that `make_model` wrote into the folder; None if the folder is not one of its models."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) and "digest" in stamp else None


def is_made(folder: pathlib.Path, recipe: Recipe) -> bool:
    """Return whether the folder holds the finished model of this recipe."""
    return (read_stamp(folder) or {}).get("digest") == recipe.digest
