"""What the ranks of a training job agree on: errors, data, tokenizer and metrics.

The ranks are those of PyTorch's default process group; without one there is a single rank. Except `data_parallel`,
`check_tokenizer` and `evaluation_recipe`, these functions are collective: every rank must call them.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from zephon.batch import SampleBatch
from zephon.config.recipe import DataRecipe
from zephon.errors import PipelineError, TokenizerError, TopologyError, ZephonError
from zephon.run.fingerprint import check_ranks_agree
from zephon.run.report import Mixture
from zephon.tokenizer.tokenizer import Tokenizer, load_tokenizer

_T = TypeVar("_T")
_SAME_DATA = {"tp", "cp", "sp", "pp", "ep", "etp", "tensor", "context", "sequence", "pipeline", "expert"}
_OTHER_DATA = ("dp", "ddp", "fsdp", "efsdp", "hsdp", "data", "batch", "replicate", "shard")
"""Names of dimensions of a mesh, along which ranks take the same data or, by how they begin, other data."""


def data_parallel(ranks: Any = None) -> tuple[int, int]:
    """The data-parallel rank of this process, and how many there are. Processes of one rank take the same data.

    Args:
        ranks: both numbers, or the `DeviceMesh` of the job, whose dimensions are told apart by their names ("dp_shard",
            "tp"); a mesh of one dimension may have none. By default every process is a rank of its own: those of
            torch.distributed where it is initialised, else of RANK and WORLD_SIZE, else this one alone.

    Raises:
        TopologyError: the numbers are none of a rank, or a dimension of the mesh has no such name.
    """
    if hasattr(ranks, "get_coordinate"):
        names = ranks.mesh_dim_names or (("data",) if ranks.ndim == 1 else ("",) * ranks.ndim)
        for name in names:
            if not name.startswith(_OTHER_DATA) and name.partition("_")[0] not in _SAME_DATA:
                raise TopologyError(
                    f"the mesh has the dimensions {names}; expected names of data parallelism "
                    f"({', '.join(_OTHER_DATA)}) or of parallelism within a model. Pass rank and number of "
                    "data-parallel ranks instead."
                )
        along = [i for i, name in enumerate(names) if name.startswith(_OTHER_DATA)]
        sizes, place = [ranks.size(i) for i in along], ranks.get_coordinate()
        rank = 0
        for i, size in zip(along, sizes, strict=True):
            rank = rank * size + place[i]
        return rank, math.prod(sizes)
    dist = sys.modules.get("torch.distributed")  # not imported, it is not initialised
    if ranks is None and dist is not None and dist.is_available() and dist.is_initialized():
        ranks = dist.get_rank(), dist.get_world_size()
    elif ranks is None:
        ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    try:
        rank, size = map(int, ranks)
    except (TypeError, ValueError):
        rank, size = 0, 0
    if not 0 <= rank < size:
        raise TopologyError(
            f"the data-parallel rank and the number of such ranks are {ranks!r}; expected two integers, the first from "
            "0 to below the second. Correct them, or RANK and WORLD_SIZE."
        )
    return rank, size


def evaluation_recipe(recipe: DataRecipe, *, repeat: bool) -> DataRecipe:
    """The recipe of an evaluation, whatever it says about repetition and lanes.

    All lanes take their records from one feed, so records do not depend on the batch, and every group reads all data.

    Args:
        repeat: pass after pass, for an evaluation of a given number of records; else every document is used once.
    """
    settings: dict[str, Any] = {"exhausted_policy": None, "stop_after_passes": None, "max_repeats": None}
    settings |= {"repeat": repeat, "feeds": 1, "canonical_replicas": "auto"}
    sources = [
        {key: None if key in settings else value for key, value in source.items()}
        for source in recipe.to_dict()["sources"]
    ]
    return recipe.replace(sources=sources, continue_from=None, **settings)


def check_tokenizer(
    path: Any, *, model_vocab_size: int | None, special: Mapping[str, int | None], remedy: str
) -> Tokenizer:
    """Load a tokenizer and check it against the model and the framework's own tokenizer.

    Args:
        path: its folder, or a tokenizer object.
        model_vocab_size: rows of the model's embedding; None if unknown.
        special: bos_id and eos_id of the framework's tokenizer; None where it has none.
        remedy: advice for a model vocabulary that is too small.

    Raises:
        TokenizerError: the vocabulary of the model is too small, or special tokens differ.
    """
    tokenizer = load_tokenizer(path)
    where = f"in {os.fspath(path)!r}" if isinstance(path, str | os.PathLike) else f"({type(path).__name__})"
    if model_vocab_size is not None and tokenizer.vocab_size > model_vocab_size:
        raise TokenizerError(
            f"the tokenizer {where} has {tokenizer.vocab_size} tokens; expected at most {model_vocab_size}, the "
            f"vocabulary size of the model. {remedy}"
        )
    for name, expected in special.items():
        actual = getattr(tokenizer, name)
        if expected is not None and actual is not None and expected != actual:
            raise TokenizerError(
                f"{name} is {actual} in the tokenizer of the data {where}; expected {expected}, as in the trainer's "
                "tokenizer. Use one tokenizer for both, or correct its tokenizer_config.json or tokenizer.json."
            )
    return tokenizer


def check_writable(option: str, folder: str) -> None:
    """Check that a folder can be written to, before the first save; raises a `PipelineError`."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise PipelineError(
            f"{option} is {folder!r}; expected a folder that can be written to ({error.strerror or error}). Name "
            "another folder, or free space."
        ) from None


def is_distributed() -> bool:
    """Whether the job has more than one rank."""
    dist = sys.modules.get("torch.distributed")
    return bool(dist and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def gather(value: _T) -> list[_T]:
    """The values of all ranks, by rank; pickled, since ranks of one job trust each other."""
    if not is_distributed():
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_all_ranks(action: Callable[[], _T], collect: Callable[[Any], Sequence[Any]] | None = None) -> _T:
    """The result of `action` on this rank. If it fails on any rank, all ranks raise; others the error of the first.

    Otherwise the remaining ranks would wait for the failed one at the next collective call. `collect` is a call in
    place of `gather`.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    failures = (collect or gather)(_portable(failure))
    if failure is not None:
        raise failure
    for rank, other in enumerate(failures):
        if other is not None:
            other.args = (f"rank {rank}: {other.args[0] if other.args else ''}", *other.args[1:])
            raise other
    return result


def on_first_rank(action: Callable[[], _T]) -> _T:
    """Run `action` on global rank 0; every rank returns its result or raises its error."""
    if not is_distributed():
        return action()
    import torch.distributed as dist

    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = _portable(error)
    dist.broadcast_object_list(outcome, src=0)
    result, failure = outcome
    if failure is not None:
        raise failure
    return result


def _portable(error: Exception | None) -> ZephonError | None:
    """The error in a form that other ranks can unpickle."""
    if error is None or isinstance(error, ZephonError):
        return error
    return ZephonError(f"{type(error).__name__}: {error}")


def check_same_data(
    fingerprints: Sequence[Mapping[str, Any]], collect: Callable[[Any], Sequence[Any]] | None = None
) -> None:
    """Check that all ranks read the same data.

    Args:
        fingerprints: of this rank's pipelines, in the same order on all ranks; empty on a rank without data.
        collect: a call in place of `gather`.

    Raises:
        PipelineError: which ranks differ from the first, and in what.
    """
    known = {rank: each for rank, each in enumerate((collect or gather)(list(fingerprints))) if each}
    for nth in range(max(map(len, known.values()), default=0)):
        check_ranks_agree({rank: each[nth] for rank, each in known.items()})


def any_rank(flag: bool, *, device: Any = "cpu", group: Any = None) -> bool:
    """Whether any rank (of `group`) calls this with True."""
    import torch
    import torch.distributed as dist

    value = torch.tensor(int(flag), device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return bool(value.item())


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counters of a loader since it was built.

    Attributes:
        batches: microbatches handed out.
        wait: seconds that the trainer waited for microbatches, making of tensors included.
        places: token places in these microbatches.
        padding: places without a real token.
        tokens: int64[n_datasets], the real tokens by dataset; 0 before the first batch.
    """

    batches: int = 0
    wait: float = 0.0
    places: int = 0
    padding: int = 0
    tokens: np.ndarray | int = 0

    def add(self, batch: SampleBatch, wait: float) -> None:
        """Count a microbatch for which the trainer waited `wait` seconds."""
        places, tokens = batch.tokens.size, batch.tokens_by_dataset()
        self.batches += 1
        self.wait += wait
        self.places += places
        self.padding += places - int(tokens.sum())
        self.tokens = self.tokens + tokens


def job_metrics(
    now: Progress | None,
    since: Progress,
    *,
    cursor: int = 0,
    mixture: Mapping[str, Mixture],
    names: Sequence[str],
    share: float = 1.0,
    batches_per_step: float = 1.0,
    device: Any = "cpu",
) -> dict[str, float]:
    """Metrics of the whole job since `since`, by two small reductions; docs of the integrations list them.

    Args:
        now, cursor, mixture: of this rank's loader; `now` is None on a rank without one, which adds nothing.
        since: the progress when metrics were last taken.
        names: of all sources, the same on every rank.
        share: weight of this rank's counts: 1/n where n peers of a data-parallel rank count the same records.
        batches_per_step: microbatches per step, 1 for a wait per microbatch.
        device: of the tensors that are reduced.
    """
    n = len(names)
    counts, maxima = np.zeros(2 + 3 * n), np.zeros(2 + n)  # reduced over ranks by sum and by maximum
    if now is not None:
        parts = [mixture[name] for name in names]
        steps = max(1, round((now.batches - since.batches) / batches_per_step))
        maxima[:] = [(now.wait - since.wait) / steps, cursor, *(part.target for part in parts)]
        counts[:2] = now.places - since.places, now.padding - since.padding
        counts[2:] = [
            *np.broadcast_to(now.tokens, n),
            *(part.skipped for part in parts),
            *(part.failed for part in parts),
        ]
        counts *= share
    counts, maxima = _reduced(counts, maxima, device)
    metrics = {
        "zephon/data_wait(s)": float(maxima[0]),
        "zephon/padding(%)": float(100 * counts[1] / max(1.0, counts[0])),
        "zephon/cursor": float(maxima[1]),
    }
    tokens, skipped, failed = counts[2:].round().reshape(3, n).tolist()
    for i, name in enumerate(names):
        metrics[f"zephon/tokens/{name}"] = tokens[i]
        metrics[f"zephon/mixture/{name}"] = tokens[i] / max(1.0, sum(tokens))
        metrics[f"zephon/mixture_target/{name}"] = float(maxima[2 + i])
        metrics[f"zephon/skipped_rows/{name}"] = skipped[i]
        metrics[f"zephon/failed_rows/{name}"] = failed[i]
    return metrics


def _reduced(summed: np.ndarray, largest: np.ndarray, device: Any) -> tuple[np.ndarray, np.ndarray]:
    """Over all ranks: the sum of one vector and the maximum of the other."""
    if not is_distributed():
        return summed, largest
    import torch
    import torch.distributed as dist

    tensors = [torch.from_numpy(vector).to(device) for vector in (summed, largest)]
    dist.all_reduce(tensors[0])
    dist.all_reduce(tensors[1], op=dist.ReduceOp.MAX)
    return tensors[0].cpu().numpy(), tensors[1].cpu().numpy()
