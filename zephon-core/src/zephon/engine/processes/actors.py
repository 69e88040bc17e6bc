"""Workers that are actors of a Ray cluster, on any of its machines.

An actor loads the functions of a pipeline once. It is used only if the probes give there what they give here: the
libraries of two machines may differ. Ray starts an actor again where its process or its machine is lost; what it was
working on, the pool repeats, since Ray would repeat without end what kills every process.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from zephon.columns.arrow import choose_allocator
from zephon.columns.faults import reason_of
from zephon.config.options import RaySettings
from zephon.engine.processes.channel import Closed
from zephon.engine.processes.child import keep_logs
from zephon.engine.processes.pool import SEATS, Answer, OnChange, Refused, answer
from zephon.engine.runners import end_all
from zephon.errors import PipelineError, WorkerError
from zephon.tokenizer.backends import version_of

NAMESPACE = "zephon"
_VERSION = version_of("zephon-core")
"""Of the code that this process runs: a package may be replaced under an actor that lives long."""
_IDLE_SECONDS = 3600.0  # after which an actor of a pool that outlives its trainer ends
_TASKS_KEPT = 4  # pipelines that an actor has loaded
_LOOK_SECONDS = 1.0  # between looks whether the pool was closed
_ANSWER_SECONDS = 2.0  # for a machine that is asked whether it is there


@dataclass(frozen=True)
class Probe:
    """What the data depend on besides the recipe.

    Attributes:
        name: in messages.
        function: gives it, as this process sees it.
    """

    name: str
    function: Callable[[], str]


def own_version() -> str:
    """The version of Zephon that runs in this process."""
    return _VERSION


@dataclass(frozen=True)
class _Task:
    """What an actor needs: the functions, and what the probes have given in the training process."""

    functions: Sequence[Callable[..., Any]]
    probes: Sequence[tuple[Probe, str]]

    def differences(self) -> list[str]:
        """The names of probes that give something else in this process."""
        return [probe.name for probe, expected in self.probes if probe.function() != expected]


@dataclass(frozen=True)
class _Place:
    """Where an actor runs."""

    machine: str
    node: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine}, Ray node {self.node[:12]}"


class _Actor:
    """Runs in a process of Ray.

    Args:
        level: of what is logged.
        idle_seconds: after which it ends; None for never.
    """

    def __init__(self, level: int, idle_seconds: float | None) -> None:
        import ray

        context = ray.get_runtime_context()
        self._place = _Place(socket.gethostname(), context.get_node_id(), os.getpid())
        self._tasks: OrderedDict[str, _Task] = OrderedDict()
        self._loading = threading.Lock()
        self._used = time.monotonic()
        keep_logs(level)
        choose_allocator()
        if idle_seconds is not None:
            args = (context.current_actor, idle_seconds)
            threading.Thread(target=self._end_when_idle, args=args, name="zephon-idle", daemon=True).start()

    def load(self, key: str, task: Sequence[Any]) -> tuple[_Place, str]:
        """Get ready; gives the reason where this actor is not to be used, else ""."""
        try:
            self._task(key, task)
        except Refused as refusal:
            return self._place, str(refusal)
        return self._place, ""

    def call(self, key: str, task: Sequence[Any], number: int, args: tuple[Any, ...]) -> Answer | str:
        """The answer, or the reason where this actor is not to be used."""
        try:
            functions = self._task(key, task).functions
        except Refused as refusal:  # started again on another machine
            return str(refusal)
        try:
            return answer(functions, number, args)
        finally:
            self._used = time.monotonic()

    def _task(self, key: str, task: Sequence[Any]) -> _Task:
        import ray

        with self._loading:
            self._used = time.monotonic()
            if key not in self._tasks:
                try:
                    loaded: _Task = ray.cloudpickle.loads(ray.get(task[0]))
                    differences = loaded.differences()
                except Exception as error:
                    reason = reason_of(error)
                    raise Refused(f"the Ray worker in {self._place} cannot load the pipeline: {reason}.") from None
                if differences:
                    raise Refused(
                        f"the Ray worker in {self._place} gives other data than the training process, whose "
                        f"{' and '.join(differences)} differ. Install the same packages on all machines."
                    )
                self._tasks[key] = loaded
                if len(self._tasks) > _TASKS_KEPT:
                    self._tasks.popitem(last=False)
            self._tasks.move_to_end(key)
            return self._tasks[key]

    def _end_when_idle(self, itself: Any, seconds: float) -> None:
        import ray

        while (left := self._used + seconds - time.monotonic()) > 0:
            time.sleep(left)
        ray.kill(itself, no_restart=True)


class ActorWorker:
    """An actor; see `Worker`."""

    is_ready = False

    def __init__(self, handle: Any, key: str, task: Any, settings: RaySettings) -> None:
        self.free = list(range(SEATS))
        self._handle, self._key, self._task, self._settings = handle, key, [task], settings
        self._place: _Place | None = None
        self._death = ""
        self._closed = False

    def begin(self, on_change: OnChange) -> None:
        # Waits until the actor has started, or has started again.
        loaded = self._handle.load.options(max_task_retries=-1).remote(self._key, self._task)
        loaded.future().add_done_callback(partial(self._hand_over, on_change))

    def ask(self, seat: int, number: int, args: tuple[Any, ...]) -> Answer:
        import ray
        from ray.exceptions import ObjectLostError, RayActorError, RayError

        pending = self._handle.call.remote(self._key, self._task, number, args)
        deadline = time.monotonic() + self._settings.timeout
        try:
            while not ray.wait([pending], timeout=_LOOK_SECONDS)[0]:
                if self._closed or not ray.is_initialized():
                    raise Closed
                if time.monotonic() > deadline:
                    self._death = f"has not answered for {self._settings.timeout:g} seconds, and is ended"
                    ray.kill(self._handle, no_restart=False)
                    raise Closed
            made: Answer | str = ray.get(pending)
        except (RayActorError, ObjectLostError) as error:
            self._death = self._death or f"has died ({_last_words(error)})"
            raise Closed from None
        except RayError as error:
            raise WorkerError(f"{self._name} cannot answer ({_last_words(error)}).") from error
        if isinstance(made, str):
            raise Refused(made)
        return made

    def death(self) -> tuple[WorkerError, bool]:
        is_lost = not _is_there(self._place.node if self._place else "")
        why = "is lost with its machine" if is_lost else self._death
        return WorkerError(f"{self._name} {why}."), not is_lost

    def close(self) -> None:
        import ray

        self._closed = True
        if not self._settings.pool and ray.is_initialized():  # else `kill` would start a cluster
            with suppress(Exception):
                ray.kill(self._handle, no_restart=True)

    @property
    def _name(self) -> str:
        return f"the Ray worker in {self._place}"

    def _hand_over(self, on_change: OnChange, loaded: Any) -> None:
        # In a thread of Ray, which must not wait: neither for another call of Ray nor for a thread that makes one.
        with suppress(RuntimeError):  # the interpreter is ending
            threading.Thread(target=self._loaded, args=(on_change, loaded), name="zephon-ray", daemon=True).start()

    def _loaded(self, on_change: OnChange, loaded: Any) -> None:
        try:
            self._place, reason = loaded.result()
        except Exception as error:
            reason = f"a Ray worker cannot start: {_last_words(error)}."
        self.is_ready = not reason
        if not self._closed:
            on_change(self, Refused(reason) if reason else None)


class RayWorkers:
    """Starts actors; see `Workers`.

    Args:
        settings: which cluster, and which pool of it.
        probes: what must be the same in the actors as here.
    """

    kind = "Ray worker"

    def __init__(self, settings: RaySettings, probes: Sequence[Probe]) -> None:
        self._settings, self._probes = settings, probes
        self._key = ""
        self._task: Any = None

    def prepare(self, functions: Sequence[Callable[..., Any]]) -> None:
        _connect(self._settings.address)
        import ray

        try:
            probes = [(probe, probe.function()) for probe in self._probes]
            task = ray.cloudpickle.dumps(_Task(functions, probes))
        except Exception as error:
            raise PipelineError(
                f"the pipeline cannot be sent to Ray ({reason_of(error)}). Keep what belongs to this process, such as "
                'open files, out of functions, or use runner="threads".'
            ) from error
        self._key, self._task = hashlib.sha256(task).hexdigest(), ray.put(task)

    def worker(self, number: int) -> ActorWorker:
        import ray

        pool = self._settings.pool
        options: dict[str, Any] = {"num_cpus": 1, "max_restarts": -1, "max_concurrency": SEATS}
        # Of all machines; not beside the trainer in its placement group.
        options["scheduling_strategy"] = "SPREAD"
        # Ray reports every call otherwise, at the trainer's cost.
        options["enable_task_events"] = False
        if pool:
            options |= {
                "name": f"{pool}-{number}",
                "namespace": NAMESPACE,
                "lifetime": "detached",
                "get_if_exists": True,
            }
        level = logging.getLogger("zephon").getEffectiveLevel()
        handle = ray.remote(_Actor).options(**options).remote(level, _IDLE_SECONDS if pool else None)
        return ActorWorker(handle, self._key, self._task, self._settings)

    def waiting(self) -> str:
        import ray

        total, free = (each.get("CPU", 0) for each in (ray.cluster_resources(), ray.available_resources()))
        return f"each needs a CPU; {free:g} of the {total:g} CPUs of the Ray cluster are free."


def _connect(address: str | None) -> None:
    """Connect to a cluster: to the one this process is connected to, to that of `address`, to the one that Ray finds on
    this machine, or to a new one."""
    try:
        import ray
    except ImportError:
        raise PipelineError('runner is "ray"; expected the package ray. Install zephon-core[ray].') from None
    # Before Ray's own end, which would leave calls under way without a connection.
    atexit.unregister(end_all)
    atexit.register(end_all)
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.WARNING, include_dashboard=False)
    except Exception as error:
        raise WorkerError(
            f"ray_address is {address!r}; expected the address of a Ray cluster that answers ({reason_of(error)}). "
            "Start one with ray start --head."
        ) from error


def _is_there(node: str) -> bool:
    """Whether a machine of the cluster answers: it may take Ray a while to find out that it does not."""
    import ray

    for each in ray.nodes():
        if each["NodeID"] == node and each["Alive"]:
            with (
                suppress(OSError),
                socket.create_connection((each["NodeManagerAddress"], each["NodeManagerPort"]), _ANSWER_SECONDS),
            ):
                return True
    return False


def _last_words(error: BaseException) -> str:
    """The reason that an error of Ray gives, on one line and without its table of ids."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300].rstrip(".")
