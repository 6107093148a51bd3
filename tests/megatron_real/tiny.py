"""Tiny models in both libraries: a Hugging Face model, and the megatron-core model of the same weights on this rank.

The mapping of the weights (`router_replay.rl.policy.megatron.weights`) also maps gradients: a gradient of megatron must
equal the part of the Hugging Face gradient that has its place.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from tests.megatron_real import cpu  # noqa: F401  (first: it lets megatron run on a CPU)

# isort: split
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from router_replay import RouterSpec as RouterSpec
from router_replay import Routes
from router_replay.rl.policy.megatron import weights

VOCABULARY = 64
LENGTH = 8
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "two layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def start(rank: int = 0, world: int = 1, store: str = "", backend: str = "gloo", **sizes: Any) -> None:
    """Join the process group, and divide it by `sizes`: arguments of initialize_model_parallel."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group(
            backend, init_method=f"file://{store or tempfile.mktemp()}", rank=rank, world_size=world
        )
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)


def hf_model(**changes: Any) -> Any:
    """A Qwen3-MoE model of four layers, the first of them dense."""
    settings: dict[str, Any] = dict(  # noqa: C408
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2,
        mlp_only_layers=[0], max_position_embeddings=64, initializer_range=0.2, norm_topk_prob=True,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(settings | changes)))
    shake(model)
    return model


def glm_model(bias: float = 0.2, **changes: Any) -> Any:
    """A GLM-4.5 model of three layers, which routes as DeepSeek-V3 does: sigmoid, bias, groups, scaling, shared expert.

    DeepSeek-V3 itself needs Transformer Engine in megatron-core, for its attention.
    """
    settings: dict[str, Any] = dict(  # noqa: C408
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, n_routed_experts=16, num_experts_per_tok=4,
        n_group=4, topk_group=2, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True,
        first_k_dense_replace=1, use_qk_norm=True, max_position_embeddings=64, initializer_range=0.2,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**(settings | changes)))
    shake(model)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += bias * torch.randn_like(buffer)
    return model


def shake(model: nn.Module) -> None:
    """Change the weights of layer norms: ones everywhere would hide a layer norm that got the place of another."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)


def config_of(hf: Any, **changes: Any) -> TransformerConfig:
    c = hf.config
    if c.model_type == "qwen3_moe":
        dense, experts = set(c.mlp_only_layers), c.num_experts
        own: dict[str, Any] = {"moe_router_pre_softmax": not c.norm_topk_prob}
    else:
        dense, experts = set(range(c.first_k_dense_replace)), c.n_routed_experts
        own = {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": c.n_group,
            "moe_router_group_topk": c.topk_group,
            "moe_router_topk_scaling_factor": c.routed_scaling_factor,
            "moe_shared_expert_intermediate_size": c.moe_intermediate_size * c.n_shared_experts,
        }
    settings: dict[str, Any] = dict(  # noqa: C408
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_attention_heads,
        num_query_groups=c.num_key_value_heads,
        kv_channels=c.head_dim,
        ffn_hidden_size=c.intermediate_size,
        moe_ffn_hidden_size=c.moe_intermediate_size,
        num_moe_experts=experts,
        moe_router_topk=c.num_experts_per_tok,
        moe_layer_freq=[int(layer not in dense) for layer in range(c.num_hidden_layers)],
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=c.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=parallel_state.get_tensor_model_parallel_world_size() > 1,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
    )
    if settings["pipeline_model_parallel_size"] > 1:
        settings |= {"batch_p2p_comm": False}
    return TransformerConfig(**(settings | own | changes))


def megatron_model(hf: Any, mtp: bool = False, **changes: Any) -> list[Any]:
    """This rank's chunks of the megatron-core model with the weights of `hf`; `changes` are settings of its config."""
    config = config_of(hf, **({"mtp_num_layers": 1} if mtp else {}), **changes)
    chunks = []
    virtual = config.virtual_pipeline_model_parallel_size
    for stage in range(virtual or 1):
        place = {"vp_stage": stage if virtual else None}
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **place)
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, **place)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, **place)
        chunk = GPTModel(
            config,
            spec,
            vocab_size=hf.config.vocab_size,
            max_sequence_length=hf.config.max_position_embeddings,
            pre_process=first,
            post_process=last,
            position_embedding_type="rope",
            rotary_percent=hf.config.rope_parameters.get("partial_rotary_factor", 1.0),
            rotary_base=hf.config.rope_parameters["rope_theta"],
            share_embeddings_and_output_weights=False,
            mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if mtp else None,
            **place,
        )
        load(chunk, hf.state_dict())
        chunks.append(chunk)
    return chunks


# -- weights ------------------------------------------------------------------------------------------------


def load(chunk: Any, tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            if not name.startswith("mtp."):
                parameter.copy_(from_hf(chunk, name, tensors))
        for layer in chunk.decoder.layers:
            bias = tensors.get(f"model.layers.{layer.layer_number - 1}.mlp.gate.e_score_correction_bias")
            if bias is not None and layer.mlp.router.expert_bias is not None:
                layer.mlp.router.expert_bias.copy_(bias)


def from_hf(chunk: Any, name: str, tensors: dict[str, Tensor]) -> Tensor:
    """The part of the Hugging Face `tensors` (weights or gradients) that has the place of parameter `name` here."""
    found = torch.empty_like(chunk.get_parameter(name)).detach()
    weights.fill(found, weights.parts_of(chunk, name), tensors)
    return found


# -- running ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Step:
    losses: list[Tensor]  # per micro-batch [b, s], on the last stage
    gradients: list[dict[str, Tensor]]  # per chunk


def tokens(micro_batches: int = 1, sequences: int = 2, length: int = LENGTH, seed: int = 0) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (sequences, length + 1), generator=made) for _ in range(micro_batches)]


def train_step(
    chunks: Sequence[Any],
    batches: Sequence[Tensor],
    forward_only: bool = False,
    during: Callable[[int], None] = lambda number: None,
    run: Callable[[Any, Tensor], Tensor] | None = None,
) -> Step:
    """Run the schedule that megatron has for this pipeline.

    `during` is called before each forward step with its number; `run` replaces `forward`, the pass of a micro-batch.
    """
    losses: list[Tensor] = []
    steps = iter(range(10**9))

    def forward_step(data: Any, model: Any) -> Any:
        during(next(steps))
        out = (run or forward)(model, next(data))

        def loss(found: Tensor) -> Any:
            losses.append(found.detach())
            return found.sum(), {}

        return out, loss

    for chunk in chunks:
        chunk.zero_grad()
    data: Any = [iter(batches) for _ in chunks]
    sequences, length = batches[0].shape
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=length - 1,
        micro_batch_size=sequences,
        forward_only=forward_only,
    )
    return Step(losses, [gradients(chunk) for chunk in chunks])


def forward(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss of every token [b, s] on the last stage; hidden states on others."""
    length = batch.shape[1] - 1
    positions = torch.arange(length).expand(len(batch), length)
    mask = torch.triu(torch.ones(length, length), 1).bool()[None, None]
    return model(batch[:, :-1], positions, mask, labels=batch[:, 1:])


def gradients(chunk: Any) -> dict[str, Tensor]:
    """The gradients of a chunk, summed over the ranks that have other tokens."""
    found = {}
    for name, parameter in chunk.named_parameters():
        if parameter.grad is None:
            continue
        grad = parameter.grad.clone()
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
        if getattr(parameter, "allreduce", True):
            dist.all_reduce(grad, group=parallel_state.get_data_parallel_group())
        else:  # an expert, which got the tokens of all ranks of its expert parallel group
            dist.all_reduce(grad, group=parallel_state.get_expert_data_parallel_group())
        found[name] = grad
    return found


def hf_losses(model: Any, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none").view(len(batch), -1)


def with_missing(routes: Routes, missing: list[int]) -> Routes:
    """The same routes, without the rows at these positions."""
    captured = np.ones(len(routes), bool)
    captured[missing] = False
    return Routes(routes.ids, routes.spec, captured=captured)
