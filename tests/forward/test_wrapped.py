"""A wrapped model keeps packed sequences apart like the model inside, and its log-probs are the same to the bit."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from transformers import InternVLConfig, InternVLForConditionalGeneration, PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM, GptOssModel

from router_replay import Sample, logprobs, pack
from router_replay.errors import ReplayError
from router_replay.forward import Ulysses, use_packed_attention
from router_replay.forward.inner import decoder_of, inner_model
from router_replay.forward.packing import packed_arguments, why_not_packed
from router_replay.replay import RouterReplay
from tests.makers import random_routes
from tests.replay import tiny

FAMILIES = ("qwen3_moe", "gpt_oss", "afmoe")  # a plain one, and the two that build their masks without positions
LENGTHS = (19, 30, 10)  # longer than the sliding window of the tiny models


class Holder(nn.Module):
    """Somebody's own wrapper."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, **inputs: Any) -> Any:
        return self.policy(**inputs)


def lora(model: nn.Module, **options: Any) -> Any:
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in made.named_parameters():
        if "lora_" in name:  # B is zero at first: an adapter that does nothing would hide one that is left out
            parameter.data.normal_(std=0.2, generator=generator)
    return made


def offloaded(model: nn.Module) -> nn.Module:
    """Every module's weights are brought by a hook, and are on no device outside of its forward."""
    return accelerate.cpu_offload(model, execution_device="cpu")


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2, which changes the classes of modules."""
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model.model)
    return fully_shard(model)


def flat(model: nn.Module) -> nn.Module:
    """FSDP1 with flat parameters, and a unit around the output matrix."""
    model.requires_grad_(True)  # the bias of afmoe is frozen, and one flat parameter takes no frozen part
    policy = CustomPolicy(lambda module: module in (model.lm_head, *model.model.layers))
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "compile": lambda model: torch.compile(model, backend="eager", fullgraph=True),
    "module": Holder,
    "module in module": lambda model: Holder(Holder(model)),
    "peft": lora,
    "peft for causal language models": lambda model: lora(model, task_type="CAUSAL_LM"),
    "peft that trains the output matrix": lambda model: lora(model, modules_to_save=["lm_head"]),
    "peft in compile": lambda model: torch.compile(lora(model), backend="eager"),
    "accelerate": lambda model: accelerate.Accelerator(cpu=True).prepare(model),
    "accelerate in bfloat16": lambda model: accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model),
    "accelerate offloading": offloaded,
    "ddp": nn.parallel.DistributedDataParallel,
    "ddp over peft": lambda model: nn.parallel.DistributedDataParallel(lora(model)),
    "fsdp2": sharded,
    "fsdp1": flat,
}
# Other numbers, or hooks that take weights away; tests/replay/test_parallel.py has the gradients of FSDP1.
NO_GRADIENTS = ("accelerate in bfloat16", "accelerate offloading", "fsdp1")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def samples(spec: Any = None) -> list[Sample]:
    rng = np.random.default_rng(3)
    made = []
    for seed, length in enumerate(LENGTHS):
        routes = None if spec is None else random_routes(length, spec, seed)
        made.append(Sample(rng.integers(3, tiny.VOCAB, length), np.zeros(length), np.ones(length, bool), routes))
    return made


def assert_packed_equals_alone(model: Any) -> None:
    batch, single = pack(samples(), 64), getattr(model, "_orig_mod", model)  # compiling for each length takes long
    with torch.no_grad():
        packed = batch.per_sample(logprobs(model, batch).numpy())
        alone = [logprobs(single, pack([sample], 64)).numpy() for sample in samples()]
    for mine, theirs in zip(packed, alone, strict=True):
        assert np.allclose(mine, theirs, atol=1e-4)


@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "peft in compile"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_do_not_see_each_other_through_a_wrapper(family: str, wrapper: str) -> None:
    assert_packed_equals_alone(WRAPPERS[wrapper](tiny.make(family).model.eval()).eval())


@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "compile"])
def test_packed_sequences_attend_by_lengths_through_a_wrapper(wrapper: str) -> None:
    """On a CPU this attention breaks the graph, so that no model compiles whole with it."""
    wrapped = WRAPPERS[wrapper](tiny.make("gpt_oss").model.eval()).eval()
    assert use_packed_attention(wrapped) == "segments"
    assert_packed_equals_alone(wrapped)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_logprobs_through_a_wrapper_are_those_of_its_own_logits(wrapper: str) -> None:
    wrapped = WRAPPERS[wrapper](tiny.make("gpt_oss").model.eval()).eval()
    sample = samples()[0]
    tokens = torch.from_numpy(sample.token_ids)
    with torch.no_grad():
        found = logprobs(wrapped, pack([sample], 64), temperature=0.7)
        logits = wrapped(input_ids=tokens[None], use_cache=False).logits[0] / 0.7
    expected = logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    assert torch.allclose(found[:-1], expected, atol=1e-5)


@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name not in NO_GRADIENTS])
def test_routes_replay_through_a_wrapper_with_the_gradients_of_the_model_inside(wrapper: str) -> None:
    plain, inside = tiny.make("gpt_oss").model, tiny.make("gpt_oss").model
    wrapped = WRAPPERS[wrapper](inside)
    if "peft" in wrapper:  # the same adapter, with nothing around it
        plain = lora(plain, modules_to_save=["lm_head"] if "output" in wrapper else None)
        for model in (plain, wrapped):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("original_module" not in name)
    gradients = []
    for model in (plain, wrapped):
        replayer = RouterReplay(model)
        batch = pack(samples(replayer.spec), 64)
        with replayer.replay(batch):
            (logprobs(model, batch) ** 2).sum().backward()
        assert set(replayer.stats.rows_replayed) == {sum(LENGTHS)}
        named = inner_model(model).named_parameters()
        gradients.append({name: parameter.grad for name, parameter in named if parameter.grad is not None})
    mine, theirs = gradients
    assert mine.keys() == theirs.keys()
    assert any("router" in name for name in mine)
    assert any("lm_head" in name for name in mine)
    for name, gradient in mine.items():
        got = theirs[name].full_tensor() if hasattr(theirs[name], "full_tensor") else theirs[name]
        assert torch.allclose(gradient, got, atol=1e-5), name


def test_ddp_that_looks_for_unused_parameters_finds_those_of_the_logprobs() -> None:
    model = nn.parallel.DistributedDataParallel(tiny.make("qwen3_moe").model, find_unused_parameters=True)
    logprobs(model, pack(samples(), 64)).sum().backward()
    assert model.module.lm_head.weight.grad.abs().max() > 0


def test_new_labels_temperature_and_routes_reach_a_compiled_model() -> None:
    model = tiny.make("gpt_oss").model.eval()
    compiled = torch.compile(model, backend="eager")
    replayer = RouterReplay(model)
    compiled(input_ids=torch.full((1, 59), 5), use_cache=False)
    for seed, temperature in ((0, 1.0), (1, 0.5), (2, 2.0)):
        given = [Sample((s.token_ids + seed) % 60 + 3, s.logprobs, s.loss_mask, s.routes) for s in samples()]
        batch = pack(given, 64)
        with torch.no_grad(), replayer.replay(random_routes(len(batch), replayer.spec, seed)):
            expected = logprobs(model, batch, temperature=temperature)
            assert torch.allclose(logprobs(compiled, batch, temperature=temperature), expected, atol=1e-5)
    logits = compiled(input_ids=torch.full((1, 59), 5), use_cache=False).logits
    assert logits.shape[-1] == tiny.VOCAB


class OwnModel(GptOssModel):
    """A decoder from elsewhere: nobody knows what it does about sequences."""


class Recoded(GptOssForCausalLM):
    """Remote code."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = OwnModel(config)


def test_a_model_from_elsewhere_is_refused_for_packing_and_runs_one_sequence_at_a_time() -> None:
    model = Recoded(tiny.make("gpt_oss").model.config)
    with pytest.raises(ReplayError, match=r"Recoded does not keep packed .*no decoder from transformers.models"):
        logprobs(model, pack(samples(), 64))
    with pytest.raises(ReplayError, match="does not keep packed sequences apart"):
        logprobs(Holder(model), pack(samples(), 64))
    assert logprobs(model, pack(samples()[:1], 64)).isfinite().all()
    assert "no decoder" in why_not_packed(nn.Linear(2, 2))
    with pytest.raises(ReplayError, match="Linear does not keep packed sequences apart"):
        packed_arguments(nn.Linear(2, 2), torch.full((1, 6), 5), torch.tensor([[0, 1, 2, 0, 1, 2]]))


def test_a_family_that_cannot_pack_refuses_through_a_wrapper() -> None:
    for wrap in (Holder, lambda model: torch.compile(model, backend="eager")):
        with pytest.raises(ReplayError, match=r"minimax does not keep packed sequences apart \(carries state"):
            logprobs(wrap(tiny.make("minimax").model), pack(samples(), 64))


def test_a_piece_that_ends_one_sequence_and_starts_another_is_packed() -> None:
    """Zeros among its positions: one, like a whole sequence."""
    positions = torch.tensor([[4, 5, 0, 1, 2, 3]])
    assert "attention_mask" in packed_arguments(tiny.make("gpt_oss").model, torch.full((1, 6), 5), positions)


def test_the_family_is_that_of_the_text_decoder_inside_a_model_of_another_family() -> None:
    """InternVL 3.5 decodes with gpt-oss."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = tiny.make("gpt_oss").model.config
    torch.manual_seed(0)
    config = InternVLConfig(vision_config={**vision, "image_size": 28}, text_config=text, image_token_id=1)
    model = InternVLForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    assert isinstance(decoder_of(model), GptOssModel)
    assert_packed_equals_alone(model)


def test_it_is_said_which_model_is_meant_where_a_wrapper_holds_two() -> None:
    pair = nn.Module()
    pair.policy, pair.reference = tiny.make("qwen3_moe").model, tiny.make("qwen3_moe").model
    with pytest.raises(ReplayError, match=r"2 transformers models \(policy, reference\)"):
        logprobs(pair, pack(samples(), 64))
    pair.draft_model = pair.reference
    del pair.reference
    assert inner_model(pair) is pair.policy


class Forgetful(Holder):
    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return self.policy(input_ids=input_ids, use_cache=False)


def test_a_wrapper_that_drops_the_positions_or_masks_is_found_out() -> None:
    for family in FAMILIES:
        model = Forgetful(tiny.make(family).model)
        with pytest.raises(ReplayError, match=r"did not pass its (position_ids|attention_mask) unchanged"):
            logprobs(model, pack(samples(), 64))
        assert logprobs(model, pack(samples()[:1], 64)).isfinite().all()
    prefix = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ReplayError, match=r"did not pass its (position_ids|attention_mask) unchanged"):
        logprobs(peft.get_peft_model(tiny.make("qwen3_moe").model, prefix), pack(samples(), 64))


def test_a_lora_adapter_on_the_output_matrix_is_refused_until_it_is_merged() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(tiny.make("qwen3_moe").model, config).eval()
    batch = pack(samples()[:1], 64)
    with pytest.raises(ReplayError, match="LoRA adapter on it"):
        logprobs(model, batch)
    tokens = torch.from_numpy(batch.token_ids)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]  # and the head is as before
    expected = logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    merged = model.merge_and_unload()
    assert torch.allclose(logprobs(merged, batch)[:-1], expected, atol=1e-4)


def test_a_wrapper_that_returns_no_logits_is_named() -> None:
    class Values(Holder):
        def forward(self, **inputs: Any) -> Any:
            return (self.policy(**inputs).logits,)

    with pytest.raises(ReplayError, match=r"Values must return .* logits, got a tuple.*Qwen3MoeForCausalLM"):
        logprobs(Values(tiny.make("qwen3_moe").model), pack(samples(), 64))


def test_ulysses_asks_the_model_inside() -> None:
    model = tiny.make("gpt_oss").model
    Ulysses(Holder(model))
    assert model.config._attn_implementation == "router_replay_ulysses"
    with pytest.raises(ReplayError, match="carries state"):
        Ulysses(Holder(tiny.make("jamba").model))


def test_threads_on_one_model_each_get_their_own_logprobs() -> None:
    """The first is stopped in the middle of its pass while the others come, and ends before them."""
    model = tiny.make("qwen3_moe").model.eval()
    batches = [pack([sample], 64) for sample in samples()]
    with torch.no_grad():
        expected = [logprobs(model, batch) for batch in batches]
    inside = [threading.Event() for _ in batches]
    go_on = [threading.Event() for _ in batches]
    results: dict[int, torch.Tensor] = {}

    def hold(*_: Any) -> None:
        name = threading.current_thread().name
        if name.isdigit():
            inside[int(name)].set()
            go_on[int(name)].wait(60)

    def work(number: int) -> None:
        with torch.no_grad():
            results[number] = logprobs(model, batches[number])

    model.model.register_forward_hook(hold)
    threads = [threading.Thread(target=work, args=(number,), name=str(number)) for number in range(3)]
    for thread, event, patience in zip(threads, inside, (60, 0.2, 0.2), strict=True):
        thread.start()
        event.wait(patience)  # the later ones wait for the first; if they did not, they would be here now
    with torch.no_grad():  # and who asks for logits gets logits
        logits = model(input_ids=torch.full((1, LENGTHS[0]), 5), use_cache=False).logits
    assert logits.shape[-1] == tiny.VOCAB
    for number, thread in enumerate(threads):
        go_on[number].set()
        thread.join(60 if number == 0 else 0.2)
    for thread in threads:
        thread.join(60)
    for number, values in enumerate(expected):
        assert torch.equal(results[number], values)
    assert "forward" not in vars(model.get_output_embeddings())


def test_a_call_inside_a_call_is_refused_and_leaves_the_head_as_it_was() -> None:
    model = tiny.make("qwen3_moe").model
    batch = pack(samples(), 64)
    hook = model.model.register_forward_hook(lambda *_: logprobs(model, batch))
    with pytest.raises(ReplayError, match="inside another logprobs"):
        logprobs(model, batch)
    hook.remove()
    assert "forward" not in vars(model.lm_head)
    assert isinstance(model, PreTrainedModel)
    assert logprobs(model, batch).isfinite().all()


def wrap_parts(model: nn.Module, names: tuple[str, ...], wrap: Callable[[nn.Module], nn.Module]) -> Any:
    for name, module in list(model.named_modules()):
        if name.rsplit(".", 1)[-1] in names and not hasattr(module, "text_moe"):  # ernie looks at that one's class
            model.set_submodule(name, wrap(module))
    return model


BLOCKS, ROUTERS = ("mlp", "ffn", "feed_forward", "text_moe"), ("gate", "router")
PARTS: dict[str, Callable[[Any], Any]] = {
    "blocks compiled": lambda model: wrap_parts(model, BLOCKS, lambda part: torch.compile(part, backend="eager")),
    "blocks checkpointed": lambda model: wrap_parts(model, BLOCKS, checkpoint_wrapper),
    "routers checkpointed": lambda model: wrap_parts(model, ROUTERS, checkpoint_wrapper),
    "lora on all matrices": lambda model: peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    ),
    "lora on router weights": lambda model: peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["gate.weight"])
    ),
}


NOT_POSSIBLE = {  # dbrx loops over experts in Python, its attention has no q_proj, its router no weight of its own
    ("dbrx", "blocks compiled"),
    ("dbrx", "lora on router weights"),
}
FAMILIES_BY_NAMING = ("dbrx", "ernie4_5_vl_moe", "jamba", "minimax", "qwen3_moe")


@pytest.mark.parametrize(("family", "part"), sorted(set(itertools.product(FAMILIES_BY_NAMING, PARTS)) - NOT_POSSIBLE))
def test_routers_are_found_inside_wrapped_parts_of_a_model(family: str, part: str) -> None:
    """Each of these families names its router in another way."""
    model = tiny.make(family)
    spec = RouterReplay(tiny.make(family).model).spec
    model.model = PARTS[part](model.model)
    replayer = RouterReplay(model.model)
    assert replayer.spec == spec
    routes = random_routes(model.tokens, spec)
    with replayer.replay(routes), replayer.record() as recorded:
        model.forward().sum().backward()
    assert recorded.routes.same_sets(routes)
    assert set(replayer.stats.rows_replayed) == {model.tokens}
