"""The pipeline: build it, look at it, iterate over it, save and restore its place in the stream."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Self

import pyarrow as pa
from msgspec import Meta

from zephon.batch import SampleBatch
from zephon.columns.lane_start import LaneStart
from zephon.config.keys import check, refuse_unknown
from zephon.config.options import Options
from zephon.config.recipe import DataRecipe
from zephon.curriculum.mixture import NO_CUT
from zephon.curriculum.source import WorkSource
from zephon.engine.takeover import cuts_of
from zephon.errors import CheckpointError, PipelineError
from zephon.ops.base import PackCounts
from zephon.ops.batch import Batch
from zephon.ops.chat import TokenizeChat
from zephon.ops.filter import Filter
from zephon.ops.functions import MapBatches, MapTransform, Operator
from zephon.ops.images import TokenizeImages
from zephon.ops.mixture import EnsureMixture
from zephon.ops.pack import PackFlat, PackSequences
from zephon.ops.pretokenized import Pretokenized
from zephon.ops.shuffle import Shuffle
from zephon.ops.stateful import StatefulTransform
from zephon.ops.text import DecodeText, TextTemplate
from zephon.ops.tokenize import Tokenize
from zephon.run.build import operators_of_recipe, options_of_recipe, source_of
from zephon.run.compile import Compiled, compile_pipeline
from zephon.run.explain import explain
from zephon.run.fingerprint import FINGERPRINT_NAMES, check_allowed
from zephon.run.index import FlushIndex
from zephon.run.operators import Operators, operators_for
from zephon.run.report import Account, LeftOver, Mixture, mixture_of
from zephon.run.state import Earlier, RunState, join_ranges, merge_for_group, read_states
from zephon.run.stream import BatchStream
from zephon.vision.geometry import VisionSettings

if TYPE_CHECKING:
    from zephon.torch_data import PipelineDataset

__all__ = ["Pipeline"]

_log = logging.getLogger("zephon")
_Number = Annotated[int, Meta(ge=0, le=1 << 50, title="an integer from 0 to 2**50")]


class Pipeline:
    """A stream of training batches, described step by step.

    Operators and options come first; each gives a new pipeline and leaves this one alone. Then come restore, seek and
    skip. Iterating goes on where it stopped; after the end of a finite stream the next iteration starts over.
    """

    def __init__(self, source: WorkSource) -> None:
        if not isinstance(source, WorkSource):
            raise PipelineError(f"a pipeline needs a work source such as StaticMixtureWorkSource; {source!r} is given.")
        self._source = source
        self._operators: tuple[Any, ...] = ()
        self._options = Options()
        self._compiled: Compiled | None = None
        self._stream: BatchStream | None = None
        self._account: Account | None = None  # of the last stream, or where restore and seek went
        self._skipped: tuple[tuple[int, int], ...] = ()  # ranges of rounds
        self._entered = 0  # records of this group used where restore or seek went
        self._ratios: Mapping[str, float] | None = None  # tokens per row, once measured or restored
        self._earlier: tuple[Earlier, ...] = ()  # the runs that this one took over from
        self._history = ""  # as in `RunState`
        self._after = ""  # digest of the data of the state restored

    @staticmethod
    def from_recipe(
        recipe: DataRecipe | str | os.PathLike[str],
        *,
        tokenizer: Any,
        seq_len: int,
        microbatch_size: int,
        dp_degree: int = 1,
        dp_group_id: int = 0,
        global_batch: int | None = None,
        drop_last: bool = True,
        vision: VisionSettings | None = None,
        **options: Any,
    ) -> Pipeline:
        """The pipeline of a data recipe, given what the training framework owns.

        Args:
            recipe: a `DataRecipe`, or the path of its TOML file.
            tokenizer: a folder with a tokenizer.json, such a file, a name on the Hub, or a tokenizer object.
            seq_len: sequence length that the model sees, in tokens.
            microbatch_size: records per batch.
            dp_degree, dp_group_id: data-parallel groups, and which of them this is.
            global_batch: records per optimizer step over all groups.
            drop_last: see `batch`.
            vision: how the model sees images, and its tokens for them; needed where the recipe has images.
            options: see `options`; they take the place of what the recipe says.
        """
        if not isinstance(recipe, DataRecipe):
            recipe = DataRecipe.from_toml(recipe)
        topology = {"dp_degree": dp_degree, "dp_group_id": dp_group_id, "global_batch": global_batch}
        pipeline = Pipeline(source_of(recipe)).options(**{**options_of_recipe(recipe), **topology, **options})
        operators = *operators_of_recipe(recipe, tokenizer, seq_len, vision), Batch(microbatch_size, drop_last)
        return pipeline._derive(operators=operators)

    def options(self, **changes: Any) -> Pipeline:
        """Set options; see `zephon.config.options.Options`, which refuses what is unknown or unusable."""
        return self._derive(options=self._options.changed(changes))

    # Operators on rows. Each takes columns, datasets and runner as options.

    def filter(self, condition: str | Callable[[dict[str, Any]], Any], **options: Any) -> Pipeline:
        """Keep the rows for which an expression, or a function of a row, is true; see `zephon.ops.Filter`."""
        return self._with(Filter, condition, **options)

    def map_transform(self, transform: Callable[[dict[str, Any]], Any], **options: Any) -> Pipeline:
        """Change rows one by one with a function of your own; see `zephon.ops.MapTransform`."""
        return self._with(MapTransform, transform, **options)

    def map_batches(self, transform: Callable[[pa.Table], pa.Table], **options: Any) -> Pipeline:
        """Change many rows at once with a function from an Arrow table to another; see `zephon.ops.MapBatches`."""
        return self._with(MapBatches, transform, **options)

    def add_op(self, operator: Operator | Callable[[pa.Table], pa.Table], **options: Any) -> Pipeline:
        """Add an operator of your own, set up once per worker; see `zephon.ops.Operator`."""
        return self._with(MapBatches, operator, **options)

    def stateful_transform(self, transform: Any, **options: Any) -> Pipeline:
        """Pass the rows of each lane through an object with a memory; see `zephon.ops.Stateful`."""
        return self._with(StatefulTransform, transform, **options)

    def decode_text(self, field: str = "text", encoding: str = "utf-8", **options: Any) -> Pipeline:
        """Turn a column of bytes into text; see `zephon.ops.DecodeText`."""
        return self._with(DecodeText, field, encoding, **options)

    def text_template(self, template: str, into: str = "text", **options: Any) -> Pipeline:
        """Make the text of documents from several columns; see `zephon.ops.TextTemplate`."""
        return self._with(TextTemplate, template, into, **options)

    # Rows into tokens

    def tokenize(self, tokenizer_id: Any, field: str = "text", **options: Any) -> Pipeline:
        """Turn the text column `field` into tokens; see `zephon.ops.Tokenize`."""
        return self._with(Tokenize, tokenizer_id, field, **options)

    def tokenize_chat(self, tokenizer_id: Any, field: str = "auto", **options: Any) -> Pipeline:
        """Turn conversations into tokens, trained on where the assistant speaks; see `zephon.ops.TokenizeChat`."""
        return self._with(TokenizeChat, tokenizer_id, field, **options)

    def tokenize_images(self, tokenizer_id: Any, **options: Any) -> Pipeline:
        """Turn rows of text and images into tokens; see `zephon.ops.TokenizeImages`."""
        return self._with(TokenizeImages, tokenizer_id=tokenizer_id, **options)

    def pretokenized(self, field: str = "input_ids", **options: Any) -> Pipeline:
        """Take token ids from a column; see `zephon.ops.Pretokenized`."""
        return self._with(Pretokenized, field, **options)

    # From documents to batches

    def ensure_mixture(self, buffer_size: int | None = None) -> Pipeline:
        """Hold the shares of tokens over every stretch of the run; see `zephon.ops.EnsureMixture`."""
        return self._with(EnsureMixture, buffer_size)

    def pack_flat(self, max_length: int, algorithm: str = "wrap", **options: Any) -> Pipeline:
        """Put documents into records of `max_length + 1` tokens; see `zephon.ops.PackFlat`."""
        return self._with(PackFlat, max_length, algorithm, **options)

    def pack_sequences(self, max_length: int, algorithm: str = "best_fit", **options: Any) -> Pipeline:
        """Put whole sequences into padded records of `max_length + 1` tokens; see `zephon.ops.PackSequences`."""
        return self._with(PackSequences, max_length, algorithm, **options)

    def shuffle(self, buffer_size: int, seed: int = 0) -> Pipeline:
        """Shuffle records in a buffer; see `zephon.ops.Shuffle`."""
        return self._with(Shuffle, buffer_size, seed)

    def batch(self, microbatch_size: int, *, drop_last: bool = True) -> Pipeline:
        """Give out records in microbatches; see `zephon.ops.Batch`."""
        return self._with(Batch, microbatch_size, drop_last)

    def prefetch(self, batches: int) -> Pipeline:
        """Keep up to so many microbatches ready; the same as `options(prefetch_batches=batches)`."""
        return self.options(prefetch_batches=batches)

    # The compiled pipeline

    def explain(self) -> str:
        """The compiled plan: data, operators, workers, lanes, window, look-ahead and memory bound.

        Opens the datasets and loads the tokenizer.
        """
        return explain(self.compiled)

    @property
    def compiled(self) -> Compiled:
        """The pipeline made ready: opened datasets, loaded tokenizer, measured ratios and the plan."""
        if self._compiled is None:
            self._compiled = self._compiled_with(self._ratios, self._earlier, self._options, self._history)
            self._ratios = self._compiled.tokens_per_row
            if os.environ.get("RANK", "0") == "0":  # else every rank of a job prints it
                _log.info("pipeline ready\n%s", explain(self._compiled))
        return self._compiled

    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides the data, by name, as JSON types; the same on all ranks of a run."""
        return {**self.compiled.fingerprint, "tokens_per_row": self.compiled.tokens_per_row}

    # The stream

    def __iter__(self) -> Iterator[SampleBatch]:
        if self._last().finished:
            self._move(self._beginning(), 0, {})
        self._live_stream()
        # From wherever the pipeline stands, so that skip, seek and restore work inside a loop.
        return iter(lambda: next(self._live_stream(), None), None)

    def __len__(self) -> int:
        raise TypeError("a Pipeline has no length; a DataLoader takes pipeline.torch_dataset() and batch_size=None.")

    def __bool__(self) -> bool:
        return True

    def torch_dataset(self, **to_training: Any) -> PipelineDataset:
        """What `SampleBatch.to_training` gives, for PyTorch's `DataLoader` and torchdata's `StatefulDataLoader`."""
        from zephon.torch_data import PipelineDataset

        return PipelineDataset(self, **to_training)

    def mixture(self) -> dict[str, Mixture]:
        """Target and achieved token shares by dataset, since the stream was last begun in this process.

        Under a schedule the target is the mean over the planned tokens of the run that lie there.
        """
        return mixture_of(self.compiled, self._last())

    def packing(self) -> PackCounts:
        """How full records are, and what became of long documents, since the stream was last begun in this process.

        Records ahead of the consumer are counted, and so are those made again after a restore.
        """
        counts = self._last().totals.packing
        return replace(counts, slots=counts.records * self.compiled.operators.pack.record_length)

    @property
    def left_over(self) -> LeftOver | None:
        """Data of a finite run that this group did not hand out, once it has ended; None before."""
        last = self._last()
        return LeftOver(last.totals.left_out, last.left_records) if last.finished else None

    @property
    def cursor(self) -> int:
        """Records that all groups together have used since the start of the run, as this group sees it."""
        return self._place()[1] * self._options.dp_degree

    def checkpoint(self) -> dict[str, Any]:
        """The place in the stream after the last batch handed out, as JSON types. Does not disturb the stream."""
        return self.compiled.state(*self._place(), self._skipped).to_dict()

    def restore(
        self,
        state: Mapping[str, Any] | RunState | Sequence[Mapping[str, Any] | RunState],
        *,
        allow_changes: Collection[str] = (),
        remedy: str = "allow_changes",
    ) -> Self:
        """Go on where `state` was taken; call before iterating.

        Where the source continues another one, the state may be one of the earlier run: then this run takes over. Each
        lane ends the shuffle buffer that it is in, and goes on with the new mixture from there. Lanes that are "auto"
        are those of the state. An accepted change that makes other records of the same rows takes each lane back to
        where it can be entered: no row is lost, and rows used since come again.

        Args:
            state: what `checkpoint` gave, or a list of such from the ranks that took it.
            allow_changes: names of changes to accept although the data will differ.
            remedy: how messages call `allow_changes`, such as the option of a command.

        Raises:
            CheckpointError: the state is damaged, incomplete or of other data, or a name is that of no difference. The
                pipeline stays as it was.
        """
        read = merge_for_group(read_states(state), self._options.dp_degree, self._options.dp_group_id)
        if self._options.canonical_replicas == "auto":
            fixed = copy(self)
            fixed._options = self._options.changed({"canonical_replicas": read.lanes_total})
            same = self._compiled is not None and self._compiled.topology.lanes == read.lanes_total
            fixed._compiled = self._compiled if same else None
            fixed.restore(read, allow_changes=allow_changes, remedy=remedy)
            self.close()
            self.__dict__.update(fixed.__dict__)
            return self
        allow = {allow_changes} if isinstance(allow_changes, str) else set(allow_changes)
        takes_over = len(read.earlier) < self._source.generations
        options, known = self._options, self._compiled is not None and self._compiled.topology.feeds == read.feeds
        if options.feeds == "auto" and not known and read.lanes_total == options.lanes:
            options = options.changed({"feeds": read.feeds})
        earlier, ratios = read.earlier, read.tokens_per_row
        theirs, after = read.fingerprint, read.data
        if takes_over:
            read, earlier, ratios = self._take_over(read, options, allow, remedy)
        compiled = self._compiled_with(ratios, earlier, options, read.history)
        check_allowed(allow, [theirs, compiled.fingerprint], remedy)
        if not takes_over:
            read, compiled = compiled.accepting(read, allow, remedy)
        starts, used, images = read.starts(compiled.topology)
        # Ranges asked for before restoring stay; those of the run so far are added.
        skipped = join_ranges([*self._skipped, *read.skipped])
        if read.global_batch != options.global_batch:
            compiled.topology.check_skipped(used, skipped)
        if compiled.plan.mixture:
            starts = {lane: read.skips_of(start, compiled.plan.dataset_names) for lane, start in starts.items()}
        self._move(starts, used, images)
        self._compiled, self._ratios = compiled, compiled.tokens_per_row
        self._earlier, self._history = compiled.earlier, compiled.history
        self._options, self._after, self._skipped = options, after, skipped
        return self

    def seek(self, *, step: int | None = None, sequence_number: int | None = None) -> Self:
        """Go to any place of the run without a checkpoint: the next batch starts there.

        With `options(flush_index=...)` of the run, at most a window per lane is replayed; else the stream is recounted
        from its start, which costs the time it takes to make it.

        Args:
            step: number of steps before that place; needs the option `global_batch`.
            sequence_number: the record instead, at the start of a round (a multiple of the number of lanes).

        Raises:
            PipelineError: the place is not one where all groups can start.
            CheckpointError: the flush index belongs to other data; or the run went on over a change that made other
                records of its rows, so that it can be entered at its states alone.
        """
        compiled = self.compiled
        if self.awaits_state:
            raise CheckpointError(NO_CUT)
        if compiled.history:
            raise CheckpointError(
                "seek counts records from the start of the run, and this one went on over a change that made other "
                "records of its rows (allow_changes); restore one of its states."
            )
        topology = compiled.topology
        if step is not None and sequence_number is None:
            rounds = check(_Number, step, "seek step", PipelineError) * self._rounds_per_step()
        elif sequence_number is not None and step is None:
            number = check(_Number, sequence_number, "seek sequence_number", PipelineError)
            rounds = topology.round_at(number, "seek sequence_number")
        else:
            raise PipelineError("seek needs either step or sequence_number.")
        topology.check_skipped(rounds * topology.width, self._skipped)
        starts = self._beginning()
        if (folder := self._options.flush_index) is not None:
            index = FlushIndex(folder, compiled.digest, compiled.lane_history, compiled.plan.first_start)
            starts = {feed: index.start(feed, rounds * topology.lanes_per_feed) for feed in topology.owned_feeds}
        self._move(starts, rounds * topology.width, {})
        return self

    def skip(self, first_step: int, last_step: int) -> Self:
        """Leave out `last_step - first_step` steps after the first `first_step` ones, for example after a loss spike.

        Steps keep their numbers: batches of `global_batch` records from record 0 on. A global batch with a step on both
        sides of the range is refused. The range is kept in the state. All ranks do the same, before they reach it.
        """
        first, last = (check(_Number, each, "a step to skip", PipelineError) for each in (first_step, last_step))
        per_step, width = self._rounds_per_step(), self.compiled.topology.width
        reached = -(-self._place()[1] // (width * per_step))
        if not reached <= first < last:
            raise PipelineError(
                f"skip({first_step}, {last_step}) is no range of steps to come; expected numbers from {reached} (steps "
                "done) on, the second above the first."
            )
        skipped = join_ranges([*self._skipped, (first * per_step, last * per_step)])
        self.compiled.topology.check_skipped(self._entered, skipped)
        self.close()
        self._skipped = skipped
        batch = per_step * self.compiled.topology.lanes
        _log.info("left out: steps %d to %d, records %d to %d", first + 1, last, first * batch, last * batch - 1)
        return self

    @property
    def awaits_state(self) -> bool:
        """Whether this run takes over from an earlier one whose state has not been restored yet."""
        return self._source.generations > len(self._earlier)

    @property
    def skipped(self) -> tuple[tuple[int, int], ...]:
        """The ranges [first, last) of sequence numbers that are left out, ascending, passed already or to come."""
        lanes = self.compiled.topology.lanes
        return tuple((first * lanes, last * lanes) for first, last in self._skipped)

    def close(self) -> None:
        """End the threads of the stream; iterating again goes on where it stopped, or starts over after the end."""
        if self._stream:
            self._account = self._stream.account()
            self._stream.close()
            self._stream = None

    def __getstate__(self) -> dict[str, Any]:
        """The description and the place in the stream; what runs is made again where it is needed."""
        account = self._stream.account() if self._stream else self._account
        return {**self.__dict__, "_account": account, "_compiled": None, "_stream": None}

    def _take_over(
        self, read: RunState, options: Options, allow: Collection[str], remedy: str
    ) -> tuple[RunState, tuple[Earlier, ...], dict[str, float]]:
        """The state, where lanes are cut for this run to take over from its run, and the ratios that stay known."""
        source = self._source.continues
        assert source is not None
        before = Pipeline(source)
        before._operators = operators_for(self._operators, source.names)
        before._options = options.changed({"ledger": None, "flush_index": None, "runner": "inline", "isolate": False})
        theirs = {*FINGERPRINT_NAMES, *read.fingerprint, *(f"dataset {name}" for name in source.names)}
        before.restore(read, allow_changes=theirs.intersection(allow), remedy=remedy)
        compiled = before.compiled
        if compiled.history != read.history:
            raise CheckpointError(
                "other changes cannot be accepted together with a takeover; restore the state under the earlier recipe "
                "with these changes first, and take over from a state that it saves."
            )
        same_unit = source.counts_tokens == self._source.counts_tokens
        if compiled.operators.mixture and len(source.datasets) > 1 and not same_unit:
            raise CheckpointError(
                "token_estimation is not what it was in the run to take over from, but with ensure_mixture the window "
                "that is under way goes by it; leave it as it was."
            )
        earlier = (*compiled.earlier, Earlier(compiled.tokens_per_row, cuts_of(compiled.plan, *before._place()[:2])))
        before.close()
        state = compiled.state(*before._place(), before._skipped)
        return state, earlier, compiled.tokens_per_row if same_unit else {}

    def _rounds_per_step(self) -> int:
        if (rounds := self.compiled.topology.rounds_per_step) is None:
            raise PipelineError("global_batch is missing, so steps cannot be counted; set options(global_batch=...).")
        return rounds

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
            self._stream = BatchStream(self.compiled, *self._place(), self._skipped, self._last().agreed, self._after)
        return self._stream

    def _last(self) -> Account:
        """The account of the stream, or of the last one."""
        if self._stream:
            self._account = self._stream.account()
        return self._account or Account.at(self._beginning(), 0, len(self._source.datasets), {})

    def _place(self) -> tuple[dict[int, LaneStart], int, Mapping[int, tuple[int, int]]]:
        """Starts of the feeds of this group, its records used, and the images of its lanes; see `Account`."""
        last = self._last()
        if self._account is None and self.awaits_state:
            raise CheckpointError(NO_CUT)
        return last.starts, last.cursor, last.images

    def _beginning(self) -> dict[int, LaneStart]:
        """Starts of the feeds of this group at the start of the run."""
        return dict.fromkeys(self.compiled.topology.owned_feeds, self.compiled.plan.first_start)

    def _move(self, starts: dict[int, LaneStart], cursor: int, images: Mapping[int, tuple[int, int]]) -> None:
        """Go on from another place."""
        self.close()
        self._account, self._entered = Account.at(starts, cursor, len(self._source.datasets), images), cursor

    def _compiled_with(
        self, ratios: Mapping[str, float] | None, earlier: Sequence[Earlier], options: Options, history: str
    ) -> Compiled:
        """The pipeline compiled with these tokens per row, as far as they are of its datasets, and runs before."""
        if ratios is not None:
            ratios = {name: ratio for name, ratio in ratios.items() if name in self._source.names}
        now = self._compiled
        if now is not None and (ratios, tuple(earlier), options) == (now.tokens_per_row, now.earlier, now.options):
            return replace(now, history=history)
        operators = Operators.from_list(self._operators)
        return replace(compile_pipeline(self._source, operators, options, ratios, earlier), history=history)

    def _with(self, kind: Any, *args: Any, **options: Any) -> Pipeline:
        """This pipeline and an operator of a kind; options that it does not have are refused."""
        refuse_unknown(options, [field.name for field in fields(kind)], f"option of {kind.kind}", PipelineError)
        return self._derive(operators=(*self._operators, kind(*args, **options)))

    def _derive(self, *, operators: tuple[Any, ...] | None = None, options: Options | None = None) -> Pipeline:
        if self._entered or self._skipped:
            raise PipelineError("options and operators come before restore, seek and skip. Set them there.")
        new = Pipeline(self._source)
        new._operators = self._operators if operators is None else operators
        new._options = options or self._options
        return new
