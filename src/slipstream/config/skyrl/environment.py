"""SkyRL's environment variables: none is read here, and what stands in for each.

Owns: the list.  Refuses: reading the process environment; the caller passes it in.

>>> [note.key for note in environment_notes({"SKYRL_DISABLE_SPEC": "1", "HOME": "/"})]
['SKYRL_DISABLE_SPEC']
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.config.skyrl.rules import Note

_RAY = "there is no Ray cluster in this release"

VARIABLES: Mapping[str, str] = {
    "SKYRL_RAY_PG_TIMEOUT_IN_S": _RAY,
    "SKYRL_WORKER_NCCL_TIMEOUT_IN_S": "there is one worker; schedule.step_deadline_seconds bounds a step",
    "SKYRL_VLLM_DP_PORT_OFFSET": "every engine that is started takes a free port",
    "SKYRL_WAIT_UNTIL_INFERENCE_SERVER_HEALTHY_TIMEOUT_S": "inference.launch.ready_seconds bounds an engine's start",
    "SKYRL_HTTP_CONNECTION_LIMIT": "rollout.concurrency bounds the trajectories in flight",
    "SKYRL_GENERATE_CONCURRENCY_PER_ENGINE": "rollout.concurrency and inference.max_batch_size bound it",
    "SKYRL_LD_LIBRARY_PATH_EXPORT": _RAY,
    "SKYRL_PYTHONPATH_EXPORT": _RAY,
    "SKYRL_DUMP_INFRA_LOG_TO_STDOUT": "the logs of engines that are started lie in run_dir/engines",
    "SKYRL_DISABLE_SPEC": "speculative decoding is not in this release",
}


def environment_notes(environ: Mapping[str, str]) -> list[Note]:
    """A note for each of SkyRL's variables that is set, so that none is ignored in silence."""
    return [
        Note(name, "no effect", VARIABLES.get(name, "not documented by SkyRL, and not read here"))
        for name in environ
        if name.startswith("SKYRL_")
    ]
