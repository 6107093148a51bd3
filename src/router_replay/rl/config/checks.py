"""Refuse settings that are valid one by one but cannot work together; give the reason and what to do instead.

    for warning in check_config(load_config(path), world_size=4):
        log.warning(warning)

Whether the engine captures routes is checked later, by `engine_start.py`, when the engine runs.
"""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Iterator

from router_replay.engines.stale import stale_reasons
from router_replay.rl.config.blocks import (
    TINY,
    AsynchronousConfig,
    ClusterConfig,
    EngineConfig,
    EvaluationConfig,
    TrainConfig,
)
from router_replay.rl.config.load import config_error


def check_config(config: TrainConfig, world_size: int) -> list[str]:
    """Return warnings for the user; raise a ConfigError with one line per reason if the run cannot work.

    `world_size` is the number of processes of the run.
    """
    refusals = [
        *_refused_with_replay(config),
        *_refused_engine_arguments(config),
        *_refused_losses(config),
        *_refused_asynchronous(config),
        *_refused_evaluation(config),
        *_refused_recording(config),
        *_refused_sizes(config, world_size),
        *_refused_with_megatron(config, world_size),
        *_refused_absences(config),
        *_refused_engines(config),
        *_refused_cluster(config),
    ]
    if refusals:
        raise config_error("these settings cannot work", refusals)
    return [*_reference_warnings(config), *_other_warnings(config)]


def _refused_with_replay(config: TrainConfig) -> Iterator[str]:
    if config.replay == "off":
        return
    replay = f'replay = "{config.replay}"'
    if config.model.use_kernels:
        yield (
            f"model.use_kernels = true with {replay}: a kernel that fuses the router never calls the router module, "
            "so replay would do nothing; set it to false"
        )


def _refused_engine_arguments(config: TrainConfig) -> Iterator[str]:
    if config.replay != "r3":
        return
    for place, engine in _engines(config):
        for reason in stale_reasons(engine.arguments):
            yield (
                f'{place}.arguments.{reason}; replay = "r3" needs the right row for each token: remove the argument, '
                'or set replay = "r2"'
            )
        if not engine.arguments.get("enable_return_routed_experts", True):
            yield (
                f'{place}.arguments.enable_return_routed_experts = false with replay = "r3": there are no routes to '
                'replay; remove it, or set replay = "r2"'
            )


def _engines(config: TrainConfig) -> list[tuple[str, EngineConfig]]:
    """Return the settings of the engines, each with its place in the config."""
    if not config.engines:
        return [("engine", config.engine)]
    return [(f"engines.{number}", engine) for number, engine in enumerate(config.engines)]


def _refused_losses(config: TrainConfig) -> Iterator[str]:
    loss = config.loss
    if loss.clip_low >= 1:
        yield (
            f"loss.clip_low = {loss.clip_low}: ratios are positive and are clipped at 1 - clip_low, which must be "
            "above 0; set it below 1"
        )
    if 0 < loss.truncated_importance < 1:
        yield (
            f"loss.truncated_importance = {loss.truncated_importance}: a cap below 1 shrinks every token's loss, also "
            "where engine and trainer agree; set 1 or more, or 0 for no weight"
        )
    if loss.old == "rollout" and loss.truncated_importance:
        yield (
            f'loss.truncated_importance = {loss.truncated_importance} with loss.old = "rollout": the weight old / '
            'rollout would be 1 everywhere; set it to 0, or loss.old = "policy"'
        )
    if loss.old == "rollout" and config.replay == "r2":
        yield (
            'loss.old = "rollout" with replay = "r2": R2 records the experts in the pass that this setting skips; set '
            'loss.old = "policy", or replay = "r3"'
        )
    if loss.kind != "grpo" and "normalize" in loss.model_fields_set:
        yield (
            f'loss.normalize = "{loss.normalize}" with loss.kind = "{loss.kind}", which has a mean of its own; '
            'leave normalize out, or set kind = "grpo"'
        )
    if config.rollout.group < 2:
        yield (
            f"rollout.group = {config.rollout.group}: an advantage compares an episode with the others of its problem, "
            "so the advantage of a single episode is always 0; set 2 or more"
        )


def _refused_asynchronous(config: TrainConfig) -> Iterator[str]:
    settings, rollout = config.asynchronous, config.rollout
    if config.loop == "sync":
        changed = [name for name, value in settings if value != getattr(AsynchronousConfig(), name)]
        if changed:
            names = ", ".join(f"asynchronous.{name}" for name in changed)
            yield f'{names} with loop = "sync", which does not read them; set loop = "async", or leave them out'
        return
    if 0 < settings.max_in_flight < rollout.group:
        yield (
            f"asynchronous.max_in_flight = {settings.max_in_flight}: a group of rollout.group = {rollout.group} "
            "episodes starts together; set at least this many, or 0 for no limit"
        )
    if 0 < settings.max_ready < rollout.prompts:
        yield (
            f"asynchronous.max_ready = {settings.max_ready}: a step needs rollout.prompts = {rollout.prompts} groups, "
            "so the trainer would wait forever; set at least this many, or 0 for no limit"
        )
    kinds = [engine.kind for engine in config.all_engines.values()]
    if settings.schedule and (kinds != ["embedded"] or config.cluster.kind != "processes"):
        yield (
            f'asynchronous.schedule = "{settings.schedule}": only one engine of kind "embedded" in the process of the '
            f"trainer can repeat its passes, and this run has {', '.join(kinds)} with cluster.kind = "
            f'"{config.cluster.kind}"; leave the setting out, or set these two'
        )


def _refused_evaluation(config: TrainConfig) -> Iterator[str]:
    evaluation, kind = config.evaluation, config.environment.kind
    if not evaluation.every:
        changed = [name for name, value in evaluation if value != getattr(EvaluationConfig(), name)]
        if changed:
            names = ", ".join(f"evaluation.{name}" for name in changed)
            yield f"{names} with evaluation.every = 0: nothing is evaluated; set every, or leave them out"
        return
    if kind == "jsonl" and not evaluation.file:
        yield (
            'evaluation.file is missing: environment.kind = "jsonl" trains on all problems of environment.file; give a '
            "file with other problems"
        )
    if kind != "jsonl" and evaluation.file:
        yield (
            f'evaluation.file with environment.kind = "{kind}", which reads no file: it takes problems of another '
            "seed; leave it out"
        )


def _refused_recording(config: TrainConfig) -> Iterator[str]:
    source = config.rollout.replay_from
    if not source:
        return
    place = f'rollout.replay_from = "{source}"'
    if not pathlib.Path(source).is_file():
        yield f"{place}: there is no such file; give the file that a run with `record` wrote"
    if config.record:
        yield f"{place} with record: the trajectories are in that file already; leave record out"
    if config.evaluation.every:
        yield f"{place} with evaluation.every: there is no engine that could play evaluations; leave one of them out"
    if config.loop == "async":
        yield (
            f'{place} with loop = "async": recorded episodes have no engine that plays beside the trainer; set '
            'loop = "sync", which trains on the recorded steps in their order'
        )
    if config.cluster.kind == "ray":
        yield (
            f'{place} with cluster.kind = "ray", which reserves a place for engines that would never start; set '
            '"processes", and start several with torchrun'
        )


def _refused_sizes(config: TrainConfig, world_size: int) -> Iterator[str]:
    ulysses = config.trainer.ulysses
    if world_size % ulysses:
        yield (
            f"trainer.ulysses = {ulysses}: {ulysses} ranks share each sequence, but the run has {world_size} "
            f"processes, which is not a multiple of {ulysses}; start {ulysses} processes or a multiple, or set ulysses "
            f"to a divisor of {world_size}"
        )
    if ulysses > 1 and config.model.attention == "masked":
        yield (
            'model.attention = "masked": processes that share sequences (trainer.ulysses) attend by sequence lengths '
            'and have no mask; set "auto", or trainer.ulysses = 1'
        )
    episodes = config.rollout.prompts * config.rollout.group
    if config.optimizer.mini_batches > episodes:
        yield (
            f"optimizer.mini_batches = {config.optimizer.mini_batches}: each needs at least one episode, "
            f"and a step has {episodes} (rollout.prompts * rollout.group); set at most {episodes}"
        )


def _refused_with_megatron(config: TrainConfig, world_size: int) -> Iterator[str]:
    trainer, model, megatron = config.trainer, config.model, config.megatron
    if trainer.backend != "megatron":
        if megatron != type(megatron)():
            yield (
                f'[megatron] with trainer.backend = "{trainer.backend}", which does not divide the model in this way; '
                'leave the block out, or set trainer.backend = "megatron"'
            )
        return
    backend = 'trainer.backend = "megatron"'
    if not _is_installed("megatron.core"):
        yield f"{backend} needs megatron-core: {_how_to_install_megatron()}"
    unsupported = (
        (
            trainer.ulysses > 1,
            f"trainer.ulysses = {trainer.ulysses}",
            "use megatron.tensor_parallel, and set ulysses = 1",
        ),
        (trainer.compile, "trainer.compile = true", "Megatron's layers are not compiled here; set it to false"),
        (model.use_kernels, "model.use_kernels = true", "the kernels are those of transformers; set it to false"),
        (
            model.attention != "auto",
            f'model.attention = "{model.attention}"',
            'Megatron runs its own attention on rows of one sequence each; set "auto"',
        ),
        (
            model.gradient_checkpointing != "off",
            f'model.gradient_checkpointing = "{model.gradient_checkpointing}"',
            'set "off", and megatron.recompute = "full"',
        ),
    )
    for found, setting, remedy in unsupported:
        if found:
            yield f"{setting} with {backend}: {remedy}"
    replica = megatron.tensor_parallel * megatron.pipeline_parallel
    if world_size % replica:
        yield (
            f"megatron.tensor_parallel = {megatron.tensor_parallel} and megatron.pipeline_parallel = "
            f"{megatron.pipeline_parallel}: one copy of the model takes {replica} processes, but the run has "
            f"{world_size}; start {replica} processes (torchrun --nproc-per-node) or a multiple"
        )
    elif (world_size // megatron.pipeline_parallel) % megatron.expert_parallel:
        yield (
            f"megatron.expert_parallel = {megatron.expert_parallel}: a pipeline stage has "
            f"{world_size // megatron.pipeline_parallel} of the run's {world_size} processes, which is not a multiple; "
            "the experts of a stage are shared by its processes, so set a divisor of their number"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that the module would be in is missing
        return False


def _how_to_install_megatron() -> str:
    from router_replay.replay.megatron.routers import TESTED  # imports torch, which printing a config does not need

    return f'pip install "megatron-core=={TESTED}" (the version that was tested)'


def _refused_absences(config: TrainConfig) -> Iterator[str]:
    folders = {"model.path": config.model.path}
    if config.reference.kl and config.reference.path:
        folders["reference.path"] = config.reference.path
    for name, folder in folders.items():
        if folder != TINY and not pathlib.Path(folder).is_dir():
            yield (
                f'{name} = "{folder}": there is no such folder; give a Hugging Face folder, or "{TINY}" for the small '
                "model of this package"
            )
    if config.environment.kind in config.environment.built_in and config.environment.arguments:
        yield (
            f'environment.arguments with environment.kind = "{config.environment.kind}", which does not take them; '
            "they are for a class of your own, as module:Class"
        )
    environment = config.environment
    if environment.kind == "agent" and not environment.command:
        yield 'environment.command is missing: environment.kind = "agent" runs this program, as ["python", "agent.py"]'
    if environment.kind != "agent" and (environment.command or environment.on_failure != "raise"):
        yield (
            f'environment.command and environment.on_failure are for environment.kind = "agent", not '
            f'"{environment.kind}"; leave them out'
        )
    if config.environment.kind == "jsonl":
        if not config.environment.file:
            yield 'environment.file is missing: environment.kind = "jsonl" reads its problems from there'
        if not config.environment.reward:
            yield 'environment.reward is missing: environment.kind = "jsonl" needs a function, as module:function'


def _refused_engines(config: TrainConfig) -> Iterator[str]:
    if config.engines and "engine" in config.model_fields_set:
        yield "engine and engines are both given: [engine] is short for one table [[engines]]; leave one of them out"
    for place, engine in _engines(config):
        yield from _refused_engine(place, engine)
        yield from _refused_transfer(place, engine, config)
    inside = [name for name, engine in config.all_engines.items() if engine.kind == "vllm"]
    if len(inside) > 1 and config.cluster.kind == "processes":
        yield (
            f'{len(inside)} engines of kind "vllm": vLLM can run once in a process; set cluster.kind = "ray", which '
            'gives each engine a process of its own, or start servers and set kind = "vllm_http"'
        )


def _refused_engine(place: str, engine: EngineConfig) -> Iterator[str]:
    behind_url = engine.kind in engine.behind_url
    if behind_url and not engine.url:
        yield f'{place}.url is missing: {place}.kind = "{engine.kind}" needs the URL of its server, as http://HOST:PORT'
    if behind_url and engine.count > 1:
        yield (
            f'{place}.count = {engine.count} with {place}.kind = "{engine.kind}": one URL is one engine; write a table '
            "[[engines]] for each URL"
        )
    if engine.kind == "dynamo" and not engine.workers:
        yield (
            f'{place}.workers is missing: {place}.kind = "dynamo" loads new weights into the workers; give the URLs of '
            "their system servers (DYN_SYSTEM_PORT)"
        )
    if engine.kind != "dynamo" and (engine.workers or engine.model):
        yield f'{place}.workers and {place}.model are for {place}.kind = "dynamo", not "{engine.kind}"; leave them out'
    if engine.api_key_env and not behind_url:
        yield (
            f'{place}.api_key_env with {place}.kind = "{engine.kind}", which has no server to send a key to; '
            'leave it out, or set kind = "vllm_http", "sglang" or "dynamo"'
        )


def _refused_transfer(place: str, engine: EngineConfig, config: TrainConfig) -> Iterator[str]:
    """Refuse a way for new weights that the engine can never take. The rest is seen when the engine runs."""
    if engine.transfer in ("auto", "folder"):
        return
    setting = f'{place}.transfer = "{engine.transfer}"'
    kinds = ("vllm", "vllm_http") if engine.transfer == "cuda_ipc" else ("vllm",)
    if engine.kind not in kinds:
        named = " or ".join(f'"{kind}"' for kind in kinds)
        yield f'{setting} with {place}.kind = "{engine.kind}": it is for {named}; set "auto"'
    elif config.cluster.kind == "ray" and engine.kind not in engine.behind_url:
        yield (
            f'{setting} with cluster.kind = "ray": an engine in another process of the cluster takes a folder; set '
            '"auto", or cluster.kind = "processes"'
        )
    if engine.transfer == "cuda_ipc" and config.model.device == "cpu":
        yield f'{setting} with model.device = "cpu": it needs trainer and engine on one GPU; set "auto"'


def _refused_cluster(config: TrainConfig) -> Iterator[str]:
    cluster = config.cluster
    if cluster.kind == "processes":
        changed = [name for name, value in cluster if value != getattr(ClusterConfig(), name)]
        if changed:
            names = ", ".join(f"cluster.{name}" for name in changed)
            yield f'{names} with cluster.kind = "processes", which does not read them; leave them out, or set "ray"'
    if cluster.object_store_bytes and cluster.address:
        yield (
            "cluster.object_store_bytes with cluster.address: the store of a cluster that runs has its size already; "
            "leave one of them out"
        )
    if cluster.environments and config.environment.kind == "agent":
        yield (
            'cluster.environments with environment.kind = "agent", which runs its programs in processes of their own; '
            "leave cluster.environments out"
        )


def _reference_warnings(config: TrainConfig) -> Iterator[str]:
    reference, replays = config.reference, config.replay != "off"
    if reference.kl and replays and not reference.replay:
        yield (
            f'reference.kl = {reference.kl} with replay = "{config.replay}" and a reference model that routes live: '
            "the KL then also measures the difference between their experts, and this part changes the policy too; "
            "set reference.replay = true to give both the same experts"
        )
    if reference.replay and not reference.kl:
        yield "reference.replay = true does nothing: with reference.kl = 0 there is no reference model"
    if reference.replay and not replays:
        yield 'reference.replay = true does nothing with replay = "off": there are no routes to replay'


def _other_warnings(config: TrainConfig) -> Iterator[str]:
    if config.replay == "r2" and config.optimizer.mini_batches == 1:
        yield (
            'replay = "r2" with optimizer.mini_batches = 1: the old pass and the only update have the same weights and '
            "choose the same experts, up to rounding; R2 needs 2 mini-batches or more to have an effect"
        )
    for place, engine in _engines(config):
        if config.model.router_dtype == "float32" and engine.kind in engine.behind_url:
            yield (
                f'model.router_dtype = "float32" with {place}.kind = "{engine.kind}": the server gets its routers\' '
                "weights in float32, and computes in a dtype of its own; a vLLM that is started with "
                "ROUTER_REPLAY_VLLM_ROUTER_DTYPE=float32 computes in float32"
            )
    loss = config.loss
    if config.loop == "async" and loss.old == "policy" and not loss.truncated_importance:
        yield (
            'loop = "async" with loss.old = "policy" and loss.truncated_importance = 0: tokens of older versions are '
            "trained as if the version being updated had sampled them; set loss.truncated_importance = 2, or "
            'loss.old = "rollout"'
        )
    longest, slots = config.max_length, config.trainer.max_tokens
    if longest > slots:
        yield (
            f"engine.max_length = {longest} is above trainer.max_tokens = {slots}: an episode that does not fit into "
            "one pass ends the run; raise trainer.max_tokens, or lower engine.max_length"
        )
