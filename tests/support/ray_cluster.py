"""A Ray cluster of this machine, and functions for its workers."""

import os
import shutil
import signal
import socket
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

CPUS = 8
_STORE_BYTES = 96 << 20
# Token authentication as on a cluster of several machines; nothing is read from or left in the user's home folder.
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    "RAY_USAGE_STATS_ENABLED": "0",
    # A node of a busy machine takes its time.
    "RAY_agent_register_timeout_ms": "200000",
    "RAY_raylet_start_wait_time_s": "200",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@contextmanager
def ray_cluster():
    """Starts a cluster and connects this process to it; gives what adds machines to it."""
    tests = str(Path(__file__).parents[1])  # where workers find the functions of this package
    os.environ.update(_ENVIRONMENT, PYTHONPATH=os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]))
    os.environ["RAY_TMPDIR"] = folder = tempfile.mkdtemp(prefix="ray-")  # pytest's are too long for sockets
    # The environment is read when ray is imported.
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(shutdown_at_exit=True)
    try:
        cluster.add_node(**node_settings(CPUS), include_dashboard=False, no_monitor=True)
        os.environ["RAY_ADDRESS"] = cluster.address
        ray.init(address=cluster.address, namespace="tests", logging_level="ERROR", log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.pop("RAY_ADDRESS", None)
        shutil.rmtree(folder, ignore_errors=True)


def add_machine(cluster, cpus, **settings):
    """Add a machine to the cluster: a node of its own on this one. Waits until it is there."""
    node = cluster.add_node(wait=False, **node_settings(cpus), **settings)  # which would wait for 30 seconds only
    cluster.wait_for_nodes(timeout=200)
    return node


def node_settings(cpus):
    """Settings of a machine of the cluster."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            ports.append(server.getsockname()[1])
    # With ports given, a node does not wait until its agents, which are slow to start, have written theirs down.
    agents = {"metrics_agent_port": ports[0], "runtime_env_agent_port": ports[1]}
    return {"num_cpus": cpus, "object_store_memory": _STORE_BYTES, "include_log_monitor": False, **agents}


def names_of(pool):
    """The actors of a pool that are alive."""
    import ray

    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    return sorted(name for name in names if name.startswith(f"{pool}-"))


def actors_of(pool):
    """By name, the process of each actor of a pool, none of which may end meanwhile."""
    return {name: _process_of(name) for name in names_of(pool)}


def _process_of(name):
    import ray

    actor = ray.get_actor(name, namespace="zephon")
    return ray.get(actor.__ray_call__.options(max_task_retries=-1).remote(lambda _: os.getpid()))


class Once:
    """Does something at row 5, in a worker; unless a file says that another did so before.

    Args:
        trace: the file, which gets a line each time.
        act: "die", "sleep" or "exit".
        times: how often.
    """

    version = "1"

    def __init__(self, trace, act, times=1):
        self.trace, self.act, self.times, self.home = str(trace), act, times, os.getpid()

    def __call__(self, row):
        if row["number"] == 5 and os.getpid() != self.home:
            path = Path(self.trace)
            done = len(path.read_text().split()) if path.exists() else 0
            if done < self.times:
                with path.open("a") as file:
                    file.write(f"{os.getpid()}\n")
                if self.act == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(600)
        return row


class Counts:
    """Writes down every call of it in a worker."""

    version = "1"

    def __init__(self, folder):
        self.folder, self.home = str(folder), os.getpid()

    def __call__(self, row):
        if os.getpid() != self.home:
            with open(Path(self.folder) / str(os.getpid()), "a") as file:
                file.write("x")
        return row

    def count(self):
        return sum(path.stat().st_size for path in Path(self.folder).iterdir())


class Nodes:
    """Writes down on which nodes it works."""

    version = "1"

    def __init__(self, folder):
        self.folder, self.home = folder, os.getpid()

    def __call__(self, row):
        if os.getpid() != self.home:
            import ray

            (self.folder / ray.get_runtime_context().get_node_id()).touch()
        return row


def rank_pipeline(tokenizer, group, groups, **options):
    """The pipeline of a rank of a job of four lanes."""
    from zephon import Pipeline
    from zephon.io import Dataset
    from zephon.work import StaticMixtureWorkSource

    data = Dataset.from_dict("a", {"text": [f"text {n} " * 9 for n in range(900)]})
    source = StaticMixtureWorkSource(datasets=[data], token_estimation=False, chunk_size=50, seed=3)
    pipeline = Pipeline(source).options(
        canonical_replicas=4, global_batch=4, dp_degree=groups, dp_group_id=group, prefetch_batches=1, **options
    )
    return pipeline.tokenize(tokenizer, parallelism=2).pack_flat(63).shuffle(16).batch(1)
