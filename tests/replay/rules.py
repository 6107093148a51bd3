"""How each family makes gate weights from its logits, written anew from its paper or source, as a second opinion.

    Rule("sigmoid", normalise=True, scale=2.5)     # deepseek_v3: sigmoid(logits)[ids], divided by their sum, times 2.5

Scales are those of the tiny models' configs. phimoe, nllb_moe, inkling and doge have rules of their own and are held
by finite differences alone; jetmoe does not hand its weights on by token.

Shapes: T tokens, K top-k, E experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from router_replay.families.from_modules import FoundRouter


@dataclasses.dataclass(frozen=True)
class Rule:
    score: str
    normalise: bool = False
    scale: float = 1.0

    def weights(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        scores_TE = {
            "softmax": lambda: logits_TE.softmax(-1),
            "sigmoid": lambda: logits_TE.sigmoid(),
            "sqrtsoftplus": lambda: nn.functional.softplus(logits_TE).sqrt(),
            "already scores": lambda: logits_TE,
        }[self.score]()
        chosen_TK = scores_TE.gather(-1, ids_TK)
        if self.normalise:
            chosen_TK = chosen_TK / chosen_TK.sum(-1, keepdim=True)
        return chosen_TK * self.scale


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_each("deepseek_ocr2 deepseek_v2 flex_olmo jamba olmoe qwen2_moe qwen3_moe unlimited_ocr zaya", Rule("softmax")),
    **_each("switch_transformers", Rule("softmax")),
    **_each("longcat_flash", Rule("softmax", scale=6.0)),
    **_each("aria cohere2_moe dbrx ernie4_5_moe ernie4_5_vl_moe gpt_oss granitemoe", Rule("softmax", True)),
    **_each("granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe mellum minimax", Rule("softmax", True)),
    **_each("mistral4 mistral_large4 mixtral", Rule("softmax", True)),
    **_each("qwen3_5_moe qwen3_next qwen3_omni_moe qwen3_vl_moe qwen4_exp", Rule("softmax", True)),
    **_each(
        "openai_privacy_filter", Rule("softmax", True, 1 / 3)
    ),  # divided by top-k, and multiplied back behind the experts
    **_each("dots1 kolibri1 llama4", Rule("sigmoid")),
    **_each("afmoe glm4_moe glm4v_moe laguna lfm2_moe mimo_v2_flash minimax_m2", Rule("sigmoid", True)),
    **_each("beam flint minimax_m3_vl muse_spark nemotron_h solar_open step3p7", Rule("sigmoid", True)),
    **_each("axk1 axk2 deepseek_v3 deepseek_v32 exaone_moe glm5_next glm_moe_dsa", Rule("sigmoid", True, 2.5)),
    **_each("bailing_hybrid", Rule("sigmoid", True, 2.5)),
    **_each("glm4_moe_lite", Rule("sigmoid", True, 1.8)),
    **_each("hy_v3", Rule("sigmoid", True, 2.826)),
    **_each("hy_v4", Rule("sigmoid", True, 2.827)),
    **_each("kimi_linear", Rule("sigmoid", True, 2.446)),
    **_each("deepseek_v4", Rule("sqrtsoftplus", True, 1.5)),
    **_each("diffusion_gemma gemma4", Rule("already scores", True)),
}
NO_RULE = {"doge", "inkling", "jetmoe", "nllb_moe", "phimoe"}


class Logits:
    """The logits of each router in the passes of a `with` block, from what the router returns."""

    def __init__(self, routers: tuple[FoundRouter, ...]) -> None:
        self.routers = routers
        self.logits: list[Any] = [None] * len(routers)
        self.handles: list[Any] = []

    def __enter__(self) -> Logits:
        for column, router in enumerate(self.routers):
            module: Any = router.module if router.method == "forward" else router.module.router
            self.handles.append(module.register_forward_hook(self._keep(column, router.num_experts)))
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def _keep(self, column: int, experts: int) -> Any:
        def keep(module: nn.Module, args: Any, out: Any) -> None:
            outs = out if isinstance(out, tuple) else (out,)
            # llama4 and switch give the logits last, behind scores or a mask; all others first
            outs = outs[::-1] if type(module).__name__ in ("Llama4Router", "SwitchTransformersTop1Router") else outs
            self.logits[column] = next(
                value.detach().reshape(-1, experts)
                for value in outs
                if isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1] == experts
            )

        return keep


def weights_seen(trace: Any, ids_TK: Tensor) -> Tensor:
    """[T, K] weights, from [T, K] as they are, or from [T, E] at the chosen experts, or from [T, 1]."""
    flat = trace.detach().reshape(len(ids_TK), -1)
    return flat if flat.shape == ids_TK.shape else torch.as_tensor(flat.gather(-1, ids_TK))
