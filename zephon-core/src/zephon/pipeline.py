"""The pipeline: build it, look at it, iterate over it, save and restore its place in the stream."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from zephon.batch import SampleBatch
from zephon.columns.lane_start import LaneStart
from zephon.config.options import Options
from zephon.config.recipe import DataRecipe
from zephon.config.topology import Topology
from zephon.curriculum.continued import NO_CUT
from zephon.curriculum.source import WorkSource
from zephon.engine.lane import Totals
from zephon.engine.takeover import cuts_of
from zephon.errors import CheckpointError, PipelineError
from zephon.ops.base import PackCounts
from zephon.ops.batch import Batch
from zephon.ops.chat import TokenizeChat
from zephon.ops.mixture import EnsureMixture
from zephon.ops.pack import PackFlat, PackSequences
from zephon.ops.pretokenized import Pretokenized
from zephon.ops.rows import AddOp, DecodeText, Filter, MapBatches, MapTransform, Operator, TextTemplate
from zephon.ops.shuffle import Shuffle
from zephon.ops.stateful import StatefulTransform
from zephon.ops.tokenize import Tokenize
from zephon.run.build import operators_of_recipe, options_of_recipe, source_of
from zephon.run.compile import Compiled, compile_pipeline
from zephon.run.explain import explain
from zephon.run.fingerprint import FINGERPRINT_NAMES, check_allowed, check_fingerprint
from zephon.run.index import FlushIndex
from zephon.run.operators import Operators
from zephon.run.report import LeftOver, Mixture, Packing, mixture_of, packing_of
from zephon.run.state import Earlier, RunState, merge_states, read_states
from zephon.run.stream import BatchStream

if TYPE_CHECKING:
    from zephon.torch_data import PipelineDataset

__all__ = ["LeftOver", "Mixture", "Packing", "Pipeline"]

_log = logging.getLogger("zephon")
_MOST = 1 << 50


class Pipeline:
    """A stream of training batches, described step by step.

    Every method that adds an operator or changes options gives a new pipeline and leaves this one alone. Iterating
    goes on where the last iteration stopped; after the end of a finite stream the next iteration starts over.

    Args:
        source: which datasets, in which shares and order.
    """

    def __init__(self, source: WorkSource) -> None:
        if not isinstance(source, WorkSource):
            raise PipelineError(f"a pipeline needs a work source such as StaticMixtureWorkSource; {source!r} is given.")
        self._source = source
        self._operators: tuple[Any, ...] = ()
        self._options = Options()
        self._compiled: Compiled | None = None
        self._stream: BatchStream | None = None
        self._position: tuple[dict[int, LaneStart], int] | None = None
        self._skipped: tuple[tuple[int, int], ...] = ()
        self._account: tuple[Totals, np.ndarray, int] | None = None  # of the last stream; as for mixture_of
        self._ratios: Mapping[str, float] | None = None  # tokens per row, once measured or restored
        self._ended = False  # closed at the end of the data
        self._left_over: LeftOver | None = None
        self._agreed = -1
        self._earlier: tuple[Earlier, ...] = ()  # of the runs that this one took over from

    @staticmethod
    def from_recipe(
        recipe: DataRecipe | str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str],
        seq_len: int,
        microbatch_size: int,
        dp_degree: int = 1,
        dp_group_id: int = 0,
        global_batch: int | None = None,
        drop_last: bool = True,
        **options: Any,
    ) -> Pipeline:
        """The pipeline of a data recipe, given what the training framework owns.

        Args:
            recipe: a `DataRecipe`, or the path of its TOML file.
            tokenizer: a folder with a tokenizer.json, such a file, or a name on the Hub.
            seq_len: sequence length that the model sees, in tokens.
            microbatch_size: records per batch.
            dp_degree, dp_group_id: data-parallel groups, and which of them this is.
            global_batch: records per optimizer step over all groups.
            drop_last: see `batch`.
            options: see `options`; they take the place of what the recipe says.
        """
        if not isinstance(recipe, DataRecipe):
            recipe = DataRecipe.from_toml(recipe)
        topology = {"dp_degree": dp_degree, "dp_group_id": dp_group_id, "global_batch": global_batch}
        pipeline = Pipeline(source_of(recipe)).options(**{**options_of_recipe(recipe), **topology, **options})
        for operator in operators_of_recipe(recipe, tokenizer, seq_len):
            pipeline = pipeline._with(operator)
        return pipeline.batch(microbatch_size=microbatch_size, drop_last=drop_last)

    # Description

    def options(self, **changes: Any) -> Pipeline:
        """Set options; an unknown one is refused.

        runner
            "threads"; "process" runs everything from rows to tokens in worker processes, for slow functions of your
            own; or "inline", in the calling thread. The data are the same.
        isolate
            Run the whole engine in one child process, which hands finished records over in shared memory, so that the
            interpreter lock of this process is left alone.
        dp_degree, dp_group_id
            Data-parallel groups (ranks that need the same data share one), and which of them this is.
        canonical_replicas
            Lanes of the run, or "auto": from global_batch, see `zephon.config.topology.resolve_lanes`.
        global_batch
            Records per optimizer step over all groups.
        flush_every_k_chunks
            Chunks per window.
        prefetch_batches
            Microbatches that may be ready; by default 8 MiB of records.
        prefetch_buffer_size
            Bytes of text under way or ready, over all lanes of this process; by default 8 MiB per
            worker or 2 MiB per lane, at most 128 MiB.
        fetch_parallelism
            Worker threads for reading, for slow storage; by default whoever tokenizes rows reads them first.
        pack_parallelism
            Worker threads for assembling records.
        io_options
            {"cache": {"enabled": bool, "dir": folder, "limit_bytes": bytes, "memory_bytes": bytes}}.
        combine_flag
            For finite runs on several groups: a function that gives True on every rank where any rank calls it with
            True. It is called once per step, from the thread that iterates, on every rank alike.
        ledger
            A folder in which every rank writes what it consumes; see `zephon.run.ledger`.
        flush_index
            A folder in which every rank writes where windows begin, for `seek`.
        on_error, error_budget, error_budget_rows
            "raise" ends the run at the first row that cannot be used (damaged data, a function that raises, a template
            that fails), "skip" leaves such rows out and counts them, up to that share or that number of the rows of a
            chunk, whichever is more; "quarantine" keeps what they hold in the report besides.
        error_report
            A folder in which every rank reports the rows that it leaves out; see `zephon.columns.faults`.
        check_operators
            Try the user's own functions before the run, see `zephon.ops.checks`.

        Raises:
            PipelineError: an option is unknown or unusable.
        """
        new = self._derive()
        new._options = self._options.changed(changes)
        return new

    # Operators on rows

    def filter(
        self,
        condition: str | Callable[[dict[str, Any]], Any],
        *,
        columns: Sequence[str] | None = None,
        datasets: Sequence[str] | None = None,
        runner: str | None = None,
    ) -> Pipeline:
        """Keep the rows for which an expression, or a function of a row, is true; see `zephon.ops.Filter`."""
        return self._with(Filter(condition, columns, datasets, runner))

    def map_transform(
        self,
        transform: Callable[[dict[str, Any]], Any],
        *,
        columns: Sequence[str] | None = None,
        datasets: Sequence[str] | None = None,
        runner: str | None = None,
        types: Mapping[str, pa.DataType | str] | None = None,
    ) -> Pipeline:
        """Change rows one by one with a function of your own; see `zephon.ops.MapTransform`."""
        return self._with(MapTransform(transform, columns, datasets, runner, types or ()))

    def map_batches(
        self,
        transform: Callable[[pa.Table], pa.Table],
        *,
        columns: Sequence[str] | None = None,
        datasets: Sequence[str] | None = None,
        runner: str | None = None,
    ) -> Pipeline:
        """Change many rows at once with a function from an Arrow table to another; see `zephon.ops.MapBatches`."""
        return self._with(MapBatches(transform, columns, datasets, runner))

    def add_op(
        self,
        operator: Operator | Callable[[pa.Table], pa.Table],
        *,
        columns: Sequence[str] | None = None,
        datasets: Sequence[str] | None = None,
        runner: str | None = None,
    ) -> Pipeline:
        """Add an operator of your own, set up once per worker; see `zephon.ops.Operator`."""
        return self._with(AddOp(operator, columns, datasets, runner))

    def stateful_transform(
        self,
        transform: Any,
        *,
        columns: Sequence[str] | None = None,
        datasets: Sequence[str] | None = None,
        runner: str | None = None,
    ) -> Pipeline:
        """Pass the rows of each lane through an object with a memory; see `zephon.ops.Stateful`."""
        return self._with(StatefulTransform(transform, columns, datasets, runner))

    def decode_text(
        self,
        field: str = "text",
        encoding: str = "utf-8",
        *,
        errors: str = "replace",
        datasets: Sequence[str] | None = None,
    ) -> Pipeline:
        """Turn a column of bytes into text; see `zephon.ops.DecodeText`."""
        return self._with(DecodeText(field, encoding, errors, datasets))

    def text_template(self, template: str, into: str = "text", *, datasets: Sequence[str] | None = None) -> Pipeline:
        """Make the text of documents from several columns; see `zephon.ops.TextTemplate`."""
        return self._with(TextTemplate(template, into, datasets))

    # Rows into tokens

    def tokenize(
        self,
        tokenizer_id: str | os.PathLike[str],
        field: str = "text",
        *,
        special_tokens: str = "auto",
        backend: str = "auto",
        parallelism: int | None = None,
        max_length: int | None = None,
        split_long_samples: bool = False,
        datasets: Sequence[str] | None = None,
    ) -> Pipeline:
        """Turn the text column `field` into tokens; see `zephon.ops.Tokenize`."""
        return self._with(
            Tokenize(
                tokenizer_id, field, special_tokens, backend, parallelism, max_length, split_long_samples, datasets
            )
        )

    def tokenize_chat(self, tokenizer_id: str | os.PathLike[str], field: str = "auto", **options: Any) -> Pipeline:
        """Turn a column of conversations into tokens, trained on where the assistant speaks; see
        `zephon.ops.TokenizeChat` for the options."""
        return self._with(_made(TokenizeChat, "tokenize_chat", tokenizer_id=tokenizer_id, field=field, **options))

    def pretokenized(self, field: str = "input_ids", **options: Any) -> Pipeline:
        """Take token ids from a column; see `zephon.ops.Pretokenized` for the options."""
        return self._with(_made(Pretokenized, "pretokenized", field=field, **options))

    # From documents to batches

    def ensure_mixture(self, buffer_size: int | None = None) -> Pipeline:
        """Hold the shares of tokens over every stretch of the run; see `zephon.ops.EnsureMixture`."""
        return self._with(EnsureMixture(buffer_size))

    def pack_flat(
        self,
        max_length: int,
        algorithm: str = "wrap",
        *,
        parallelism: int | None = None,
        num_bins: int = 64,
        max_documents_per_record: int | None = None,
        homogeneity: str = "none",
        oversized: str = "split",
    ) -> Pipeline:
        """Put documents into records of `max_length + 1` tokens; see `zephon.ops.PackFlat`."""
        return self._with(
            PackFlat(max_length, algorithm, parallelism, num_bins, max_documents_per_record, homogeneity, oversized)
        )

    def pack_sequences(
        self,
        max_length: int,
        algorithm: str = "best_fit",
        *,
        parallelism: int | None = None,
        num_bins: int = 64,
        max_documents_per_record: int | None = None,
        homogeneity: str = "none",
    ) -> Pipeline:
        """Put whole sequences into padded records of `max_length + 1` tokens; see `zephon.ops.PackSequences`."""
        return self._with(
            PackSequences(max_length, algorithm, parallelism, num_bins, max_documents_per_record, homogeneity)
        )

    def shuffle(self, buffer_size: int, seed: int = 0) -> Pipeline:
        """Shuffle records in a buffer; see `zephon.ops.Shuffle`."""
        return self._with(Shuffle(buffer_size, seed))

    def batch(self, microbatch_size: int, *, drop_last: bool = True) -> Pipeline:
        """Give out records in microbatches; see `zephon.ops.Batch`."""
        return self._with(Batch(microbatch_size, drop_last))

    def prefetch(self, batches: int) -> Pipeline:
        """Keep up to so many microbatches ready; the same as `options(prefetch_batches=batches)`."""
        return self.options(prefetch_batches=batches)

    def explain(self) -> str:
        """The compiled plan: data, operators, workers, lanes, window, look-ahead and memory bound.

        Opens the datasets and loads the tokenizer.
        """
        return explain(self._compile())

    @property
    def compiled(self) -> Compiled:
        """What the description becomes: opened datasets, loaded tokenizer, measured ratios and the plan."""
        return self._compile()

    # The stream

    def __iter__(self) -> Iterator[SampleBatch]:
        if self._ended or (self._stream and self._stream.finished):
            self._stream, self._position, self._ended, self._agreed = None, None, False, -1
        self._live_stream()
        return _Batches(self)

    def torch_dataset(self, **to_training: Any) -> PipelineDataset:
        """This pipeline as a dataset for PyTorch's `DataLoader` and torchdata's `StatefulDataLoader`.

        Args:
            to_training: what the batches are made into, as for `SampleBatch.to_training`.

        Raises:
            PipelineError: torch is not installed.
        """
        try:
            from zephon.torch_data import PipelineDataset
        except ImportError as error:
            raise PipelineError(f"torch_dataset needs PyTorch, which cannot be imported ({error}).") from None
        return PipelineDataset(self, **to_training)

    def mixture(self) -> dict[str, Mixture]:
        """Target and achieved token shares by dataset, since the stream was last begun in this process.

        Under a schedule the target is the mean over the planned tokens of the run that lie there.
        """
        compiled = self._compile()
        count = len(compiled.datasets)
        return mixture_of(compiled, *(self._counts() or (Totals(count), np.zeros(count, dtype=np.int64), 0)))

    def packing(self) -> Packing:
        """How full records are, and what became of long documents, since the stream was last begun in this process."""
        compiled = self._compile()
        account = self._counts()
        return packing_of(account[0].packing if account else PackCounts(), compiled.operators.pack.record_length)

    @property
    def left_over(self) -> LeftOver | None:
        """Once the data of a finite run has ended, what of it was not handed out by this group; None before."""
        if self._ended:
            return self._left_over
        if not (self._stream and self._stream.finished):
            return None
        return LeftOver(self._stream.totals.left_out, self._stream.left_records)

    def checkpoint(self) -> dict[str, Any]:
        """The place in the stream after the last batch handed out, as JSON types. Does not disturb the stream."""
        compiled = self._compile()
        starts, cursor = self._place()
        rounds, extra = divmod(cursor, compiled.topology.width)
        return RunState(
            fingerprint=compiled.fingerprint,
            tokens_per_row=compiled.tokens_per_row,
            lanes_total=compiled.topology.lanes,
            lanes=starts,
            rounds=rounds,
            extra=extra,
            dp_degree=compiled.topology.dp_degree,
            dp_group_id=compiled.topology.dp_group_id,
            skipped=self._skipped,
            earlier=compiled.earlier,
        ).to_dict()

    @property
    def cursor(self) -> int:
        """Records that all groups together have used since the start of the run, as this group sees it."""
        self._compile()
        return self._place()[1] * self._options.dp_degree

    def restore(
        self,
        state: Mapping[str, Any] | RunState | Sequence[Mapping[str, Any] | RunState],
        *,
        allow_changes: Collection[str] = (),
        remedy: str = "allow_changes",
    ) -> Self:
        """Go on where `state` was taken; call before iterating.

        Where the source continues another one, the state may be one of the earlier run: then this run takes over. Each
        lane ends the shuffle buffer that it is in, and goes on with the new mixture from there.

        Args:
            state: what `checkpoint` gave, or a list of such from the ranks that took it.
            allow_changes: names of changes to accept although the data will differ.
            remedy: how messages call `allow_changes`, such as the option of a command.

        Raises:
            CheckpointError: the state is damaged, incomplete or of other data, or a name is that of no difference. The
                pipeline stays as it was.
        """
        states = read_states(state)
        group = self._options.dp_degree, self._options.dp_group_id
        mine = [s for s in states if (s.dp_degree, s.dp_group_id) == group]
        if mine and len({(s.dp_degree, s.extra) for s in states}) == 1 and states[0].extra:
            # Inside a round a group goes on from its own state only, but all must be of the same moment.
            merge_states([replace(s, extra=0) for s in states])
            states = mine
        read = merge_states(states)
        allow = _names(allow_changes)
        earlier, known = read.earlier, read.tokens_per_row
        if self._source.continues is not None and len(earlier) < self._source.generations:
            earlier, known = self._take_over(read, allow, remedy)
        compiled = self._compile(known, earlier)
        check_allowed(allow, [read.fingerprint, compiled.fingerprint], remedy)
        accepted = []
        if earlier is read.earlier:
            accepted = check_fingerprint(
                read.fingerprint,
                compiled.fingerprint,
                allow=allow,
                where="the state was taken with other data",
                remedy=remedy,
                explain=compiled.describe_growth,
            )
        starts, used = read.starts(compiled.topology)
        if compiled.plan.mixture:
            starts = _with_skips(starts, read.tokens_per_row, compiled.plan.dataset_names)
        position = starts, used
        for difference in accepted:
            _log.warning("the data differ from those of the state, as allow_changes says: %s", difference)
        self.close()
        self._compiled, self._position, self._ratios = compiled, position, compiled.tokens_per_row
        self._earlier = compiled.earlier
        self._ended, self._agreed = False, -1
        # Ranges asked for before restoring stay; those of the run so far are added.
        self._skipped = _joined([*self._skipped, *read.skipped])
        return self

    def seek(
        self, *, step: int | None = None, sequence_number: int | None = None, global_batch: int | None = None
    ) -> Self:
        """Go to any place of the run without a checkpoint: the next batch starts there.

        With `options(flush_index=...)` of the run, at most a window per lane is replayed; else the stream is recounted
        from its start, which costs the time it takes to make it.

        Args:
            step: number of the step, from 0; needs the global batch here or in the options.
            sequence_number: the record instead, at the start of a round (a multiple of the number of lanes).
            global_batch: records per step, where the options do not have it.

        A run that went on over a change accepted by `allow_changes` cannot be entered this way: what lies before the
        change is made of other data. Restore one of its states.

        Raises:
            PipelineError: the place is not one where all groups can start.
            CheckpointError: the flush index belongs to other data.
        """
        if (step is None) == (sequence_number is None):
            raise PipelineError("seek needs either step or sequence_number.")
        step, sequence_number = _count("seek step", step), _count("seek sequence_number", sequence_number)
        compiled = self._compile()
        lanes = compiled.topology.lanes
        if step is not None:
            batch = self._options.global_batch if global_batch is None else global_batch
            if batch is None:
                raise PipelineError("seek(step=...) needs the number of records per step: pass global_batch.")
            Topology(lanes, global_batch=batch)
            sequence_number = step * batch
        assert sequence_number is not None
        if sequence_number % lanes:
            raise PipelineError(
                f"seek is asked for record {sequence_number}; with {lanes} lanes a round starts at every multiple of "
                f"{lanes}, from 0."
            )
        rounds = sequence_number // lanes
        starts = dict.fromkeys(compiled.topology.owned, compiled.plan.first_start)
        if self._options.flush_index is not None:
            index = FlushIndex(self._options.flush_index, compiled.digest, compiled.plan.first_start)
            starts = {lane: index.start(lane, rounds) for lane in compiled.topology.owned}
        self.close()
        self._position = starts, rounds * compiled.topology.width
        self._ended, self._agreed = False, -1
        return self

    def skip(self, first_step: int, last_step: int) -> Self:
        """Leave out the steps from `first_step` up to, but not including, `last_step`, for example after a loss spike.

        Steps keep their numbers: the step after the last one before the range is `last_step`. The range is kept in
        the state. Needs the option `global_batch`; all ranks must do the same, before they reach the range.

        Raises:
            PipelineError: the range is empty or has been entered.
        """
        first, last = _count("first_step", first_step), _count("last_step", last_step)
        compiled = self._compile()
        per_step = compiled.topology.rounds_per_step
        if per_step is None:
            raise PipelineError(
                "skip counts steps, so it needs the number of records per step: options(global_batch=...)."
            )
        reached = -(-self._place()[1] // (compiled.topology.width * per_step))
        if first is None or last is None or not reached <= first < last:
            raise PipelineError(
                f"skip({first_step}, {last_step}) is not a range of steps to come: the next step is {reached}, and the "
                "second number must be above the first."
            )
        self.close()
        self._skipped = _joined([*self._skipped, (first * per_step, last * per_step)])
        return self

    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides the data, by name, as JSON types; the same on all ranks of a run."""
        compiled = self._compile()
        return {**compiled.fingerprint, "tokens_per_row": compiled.tokens_per_row}

    @property
    def awaits_state(self) -> bool:
        """Whether this run takes over from an earlier one whose state has not been restored yet."""
        return self._source.generations > len(self._earlier)

    @property
    def skipped(self) -> tuple[tuple[int, int], ...]:
        """The ranges [first, last) of sequence numbers that are left out, ascending, passed already or to come."""
        lanes = self._compile().topology.lanes
        return tuple((first * lanes, last * lanes) for first, last in self._skipped)

    def close(self) -> None:
        """End the threads of the stream; iterating again goes on where it stopped, or starts over after the end."""
        if self._stream:
            self._position, self._ended, self._left_over = self._place(), self._stream.finished, self.left_over
            self._account, self._agreed = self._counts(), self._stream.agreed
            self._stream.close()
            self._stream = None

    def __getstate__(self) -> dict[str, Any]:
        """The description and the place in the stream; what runs is made again where it is needed."""
        state = self.__dict__.copy()
        if self._stream:
            state.update(_position=self._place(), _ended=self._stream.finished, _left_over=self.left_over)
        state.update(_compiled=None, _stream=None)
        return state

    # Inside

    def _take_over(
        self, read: RunState, allow: Collection[str], remedy: str
    ) -> tuple[tuple[Earlier, ...], dict[str, float]]:
        """Where lanes are cut for this run to take over from that of a state, and the ratios that stay known."""
        if any(str(each).startswith("stateful_transform ") for each in read.fingerprint.get("row_operators", ())):
            raise CheckpointError(
                "the state is of a run with a stateful_transform, which no other can take over from: its places are "
                "counted in rows that the transform gave; begin a new run, or go on without continue_from."
            )
        before = self._derive()
        before._source = source = self._source.continues  # type: ignore[assignment]
        assert source is not None
        before._options = self._options.changed(
            {"ledger": None, "flush_index": None, "runner": "inline", "isolate": False}
        )
        theirs = {*FINGERPRINT_NAMES, *read.fingerprint, *(f"dataset {name}" for name in source.names)}
        before.restore(read, allow_changes=theirs.intersection(allow), remedy=remedy)
        compiled = before._compile()
        same_unit = source.counts_tokens == self._source.counts_tokens
        if compiled.operators.mixture and len(source.datasets) > 1 and not same_unit:
            raise CheckpointError(
                "token_estimation is not what it was in the run to take over from, but with ensure_mixture the window "
                "that is under way goes by it; leave it as it was."
            )
        earlier = (*compiled.earlier, Earlier(compiled.tokens_per_row, cuts_of(compiled.plan, *before._place())))
        before.close()
        return earlier, compiled.tokens_per_row if same_unit else {}

    def _live_stream(self) -> BatchStream:
        """The stream that goes on from the pipeline's place, begun if there is none."""
        stream = self._stream
        if stream and stream.process != os.getpid():
            # A fork copies no threads, and locks as they stood: begin again from the same place with nothing shared.
            self.close()
            self._compiled = None
        elif stream and stream.failed:
            self.close()
        if self._stream is None:
            compiled = self._compile()
            starts, cursor = self._place()
            self._stream = BatchStream(compiled, starts, cursor, self._skipped, self._agreed)
        return self._stream

    def _counts(self) -> tuple[Totals, np.ndarray, int] | None:
        """What the stream has counted, or the last one did."""
        stream = self._stream
        return (stream.totals, stream.given, stream.begun) if stream else self._account

    def _with(self, operator: Any) -> Pipeline:
        new = self._derive()
        new._operators = (*self._operators, operator)
        return new

    def _derive(self) -> Pipeline:
        new = Pipeline(self._source)
        new._operators, new._options = self._operators, self._options
        return new

    def _place(self) -> tuple[dict[int, LaneStart], int]:
        """Starts of the owned lanes, and records of this group used."""
        if self._stream:
            return self._stream.starts(), self._stream.cursor
        if self._position:
            return self._position
        if self.awaits_state:
            raise CheckpointError(NO_CUT)
        compiled = self._compile()
        return dict.fromkeys(compiled.topology.owned, compiled.plan.first_start), 0

    def _compile(
        self, tokens_per_row: Mapping[str, float] | None = None, earlier: Sequence[Earlier] | None = None
    ) -> Compiled:
        ratios = self._ratios if tokens_per_row is None else tokens_per_row
        if ratios is not None:
            ratios = {name: ratio for name, ratio in ratios.items() if name in self._source.names}
        earlier = self._earlier if earlier is None else tuple(earlier)
        now = self._compiled
        if now is None or (ratios is not None and ratios != now.tokens_per_row) or earlier != now.earlier:
            operators = Operators.from_list(self._operators)
            compiled = compile_pipeline(self._source, operators, self._options, ratios, earlier)
            if tokens_per_row is not None:
                return compiled
            self._compiled, self._ratios = now, _ = compiled, compiled.tokens_per_row
            _log.info("pipeline ready\n%s", explain(compiled))
        return now


class _Batches:
    """Iterates over a pipeline from wherever it stands, so that `skip`, `seek` and `restore` work inside a loop."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._ended = False

    def __iter__(self) -> Iterator[SampleBatch]:
        return self

    def __next__(self) -> SampleBatch:
        if self._ended:
            raise StopIteration
        try:
            return next(self._pipeline._live_stream())
        except StopIteration:
            self._ended = True
            raise


def _made(kind: Any, name: str, **given: Any) -> Any:
    """An operator of this kind; options that it does not have are refused like those of a pipeline."""
    known = [spec.name for spec in fields(kind)]
    for option in given:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise PipelineError(f"{name} has no option {option!r}{hint}; it has {', '.join(known)}.")
    return kind(**given)


def _joined(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same numbers in as few ranges [first, last) as possible, ascending."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return tuple(joined)


def _names(allow_changes: Any) -> set[str]:
    """The names in `allow_changes`, one name as a set of one."""
    if isinstance(allow_changes, str):
        return {allow_changes}
    if not isinstance(allow_changes, Collection) or not all(isinstance(name, str) for name in allow_changes):
        raise CheckpointError(f"allow_changes is {allow_changes!r}; a list of names of differences is needed.")
    return set(allow_changes)


def _count(name: str, value: Any) -> int | None:
    """`value` as a whole number from 0, or None as it is."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0):
        raise PipelineError(f"{name} is {value!r}; a whole number of at least 0 is needed.")
    if value is not None and value >= _MOST:
        raise PipelineError(f"{name} is {value}; no run is that long.")
    return None if value is None else int(value)


def _with_skips(starts: Mapping[int, LaneStart], then: Collection[str], now: Collection[str]) -> dict[int, LaneStart]:
    """Starts of lanes whose skips, one per dataset of `then` by name, are given one per dataset of `now`."""
    names = sorted(then)
    made = {}
    for lane, start in starts.items():
        skips = dict(zip(names, start.skips, strict=True)) if start.skips else {}
        made[lane] = replace(start, skips=tuple(skips.get(name, 0) for name in sorted(now)))
    return made
