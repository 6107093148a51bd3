"""Rollouts of a real vLLM on the CPU, in the environment of .venv: python -m tests.verl_real.vllm_rows MODEL FILE.

Each is a dict of prompt_ids, response_ids, response_logprobs and routed_experts, as verl's rollout server has them.
"""

from __future__ import annotations

import os
import pickle
import sys

SETTINGS = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def main(model: str, file: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", max_model_len=128, enable_return_routed_experts=True, enforce_eager=True)
    problems = [f"{first}+{second}=" for first in range(11, 99, 9) for second in range(12, 99, 11)]
    sampling = SamplingParams(temperature=1.0, max_tokens=8, logprobs=0, seed=None)
    made = []
    for output in llm.generate(problems, sampling, use_tqdm=False):
        answer = output.outputs[0]
        made.append(
            {
                "prompt_ids": list(output.prompt_token_ids),
                "response_ids": list(answer.token_ids),
                "response_logprobs": [
                    line[token].logprob for token, line in zip(answer.token_ids, answer.logprobs, strict=True)
                ],
                "routed_experts": answer.routed_experts,
            }
        )
    with open(file, "wb") as out:
        pickle.dump(made, out)


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    main(*sys.argv[1:])
