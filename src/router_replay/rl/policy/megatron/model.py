"""Build the Megatron-core model of a Hugging Face folder on this rank, and refuse what it cannot express.

The layers are Megatron's own ("local") ones: they need neither Transformer Engine nor Apex.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig, AutoModelForCausalLM

from router_replay.errors import ConfigError
from router_replay.rl.config import MegatronConfig, ModelConfig, TrainConfig
from router_replay.rl.policy.master_weights import MasterWeights, Weights
from router_replay.rl.policy.megatron import weights
from router_replay.rl.policy.models import WEIGHTS, LoadError, open_checkpoint, read_model
from router_replay.rl.processes.ranks import Ranks

RECOMPUTE: dict[str, dict[str, Any]] = {
    "off": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


class Norm(torch.nn.RMSNorm):
    """Normalizes by the root mean square. Its weight is marked: with sequence parallelism its gradient is a part.

    Megatron's own layer without Transformer Engine refuses sequence parallelism. `config` is the TransformerConfig,
    `hidden_size` the width and `eps` the smallest square; Megatron passes more arguments, which mean nothing here.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """This rank's part of a model: `chunk` computes, and `outline` is the Hugging Face model without weights.

    The outline knows the names and shapes of all weights, and writes them as a folder. `precision` lets the chunk,
    whose parameters are float32, compute in the run's dtype.
    """

    chunk: Any
    outline: Any
    precision: Weights

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the whole model's weights by their Hugging Face names."""
        return {name: tensor.shape for name, tensor in self.outline.state_dict().items()}


def start_groups(config: MegatronConfig, seed: int) -> None:
    """Divide the ranks into Megatron's groups. The process group must exist, also for a single process."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=12 * 60,  # the watch ends a run that hangs long before this
    )
    model_parallel_cuda_manual_seed(seed + 1)  # nothing is drawn from it: models run without dropout


def load_model(folder: pathlib.Path, config: TrainConfig, ranks: Ranks) -> Loaded:
    """Load this rank's part of the model in `folder` onto its device.

    Every rank reads its own parts. Raise ConfigError if the model cannot run on Megatron as `config` divides it, and
    LoadError if the folder is damaged.
    """
    try:
        hf_config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many types
        raise LoadError(f"{folder} has no config that transformers can load: {error}", "config.json") from error
    if refused := refusals(hf_config, config.megatron):
        raise ConfigError(
            f'{folder} cannot be trained with trainer.backend = "megatron": {"; ".join(refused)}. '
            'Set trainer.backend = "transformers"'
        )
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(hf_config)
    chunk = build(hf_config, **settings_of(config))
    try:
        opened = open_checkpoint(folder, config.model)
        tensors: Any = opened[1] if opened is not None else read_model(folder, config.model).state_dict()
        weights.load(chunk, tensors)
    except weights.WeightsError as error:
        raise LoadError(f"{folder}: {error}", WEIGHTS) from error
    chunk.to(ranks.device)
    return Loaded(chunk, outline, _precision(chunk, config.model))


def refusals(config: Any, division: MegatronConfig) -> list[str]:
    """Return why a model with this Hugging Face `config` cannot run under this `division`; nothing if it can."""
    if config.model_type != "qwen3_moe":
        return [f'its model_type is "{config.model_type}", and only "qwen3_moe" has a mapping of its weights']
    found = []
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":
        found.append(f'its rope_type is "{rope["rope_type"]}", and only "default" is supported')
    if config.attention_bias:
        found.append("its attention has biases, which are not supported")
    if getattr(config, "use_sliding_window", False) and config.sliding_window:
        found.append("its attention has a sliding window, which is not supported")
    if config.hidden_act != "silu":
        found.append(f'its activation is "{config.hidden_act}", and only "silu" is supported')
    if config.tie_word_embeddings:
        found.append("its embeddings and its output matrix are tied, which is not supported")
    divided = (
        ("num_attention_heads", config.num_attention_heads, "tensor_parallel"),
        ("num_key_value_heads", config.num_key_value_heads, "tensor_parallel"),
        ("vocab_size", config.vocab_size, "tensor_parallel"),
        ("intermediate_size", config.intermediate_size, "tensor_parallel"),
        ("num_experts", config.num_experts, "expert_parallel"),
        ("num_hidden_layers", config.num_hidden_layers, "pipeline_parallel"),
    )
    for name, value, setting in divided:
        size = getattr(division, setting)
        if value % size:
            found.append(f"{name} = {value} is not a multiple of megatron.{setting} = {size}")
    return found


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """Return the settings of the TransformerConfig that come from the run's `config`."""
    own: dict[str, Any] = {"pipeline_dtype": getattr(torch, config.model.dtype)}
    if config.model.router_dtype == "float32":
        own["moe_router_dtype"] = "fp32"
    return {**own, **RECOMPUTE[config.megatron.recompute]}


def _precision(chunk: Any, config: ModelConfig) -> Weights:
    """Return what lets `chunk` compute in `config.dtype`: nothing in float32, otherwise copies of its weights."""
    if config.dtype == "float32":
        return Weights()
    kept = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    return MasterWeights(chunk, getattr(torch, config.dtype), tuple(kept) if config.router_dtype == "float32" else ())


def build(hf_config: Any, **settings: Any) -> Any:
    """Return this rank's GPTModel of the Hugging Face `hf_config`, with weights that are not set yet.

    Megatron's groups must exist. `settings` replace those of `transformer_config`.
    """
    config = transformer_config(hf_config, **settings)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    spec.layer_norm = Norm
    for layer in spec.layer_specs:
        inside = layer.submodules
        inside.input_layernorm = inside.pre_mlp_layernorm = Norm
        attention = inside.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = Norm
    return GPTModel(
        config,
        spec,
        vocab_size=hf_config.vocab_size,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=hf_config.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=False,
    )


def transformer_config(hf_config: Any, **settings: Any) -> TransformerConfig:
    """Return Megatron's config of a Qwen3-MoE model as this rank's groups divide it, with `settings` on top."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    own = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": hf_config.head_dim,
        "ffn_hidden_size": hf_config.intermediate_size,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "num_moe_experts": hf_config.num_experts,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        "moe_layer_freq": [int(_is_routed(hf_config, layer)) for layer in range(hf_config.num_hidden_layers)],
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "perform_initialization": False,  # all weights are loaded
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "calculate_per_token_loss": True,  # the loss is a share of the mini-batch's: Megatron must not divide it
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": tensor > 1,  # Megatron's MoE layers need it
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": 1,
        "pipeline_model_parallel_size": stages,
        "batch_p2p_comm": False,
    }
    return TransformerConfig(**(own | settings))


def _is_routed(config: Any, layer: int) -> bool:
    return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0


def end_groups() -> None:
    """Forget Megatron's groups. A group that is held would end its threads late, while the interpreter shuts down."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
