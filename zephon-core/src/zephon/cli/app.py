"""The arguments of the command. What a command does is in the module of its name."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from zephon.errors import ZephonError

__all__ = ["app"]


class _Group(TyperGroup):
    """Turns errors into one line on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ZephonError as error:
            text = str(error)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever read our output has enough
            text = f"{error.filename or 'the operating system'}: {error.strerror or error}"
        typer.echo(f"error: {text}", err=True)
        raise typer.Exit(2)


_terminal = sys.stdout.isatty() and sys.stderr.isatty()
app = typer.Typer(
    cls=_Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Boxes are for people; elsewhere help and errors are plain lines.
    rich_markup_mode="rich" if _terminal else None,
    help="Raw documents in, training batches out, the same on any number of GPUs.",
)

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="Data recipe (TOML).")]
Tokenizer = Annotated[
    str, typer.Option("--tokenizer", metavar="T", help="Folder with a tokenizer.json, such a file, or a Hub name.")
]
_LIMIT = 1 << 24
SeqLen = Annotated[int, typer.Option("--seq-len", metavar="N", min=1, max=_LIMIT, help="Tokens that the model sees.")]
GlobalBatch = Annotated[
    int, typer.Option("--global-batch", metavar="B", min=1, max=_LIMIT, help="Records per step over all ranks.")
]
Replicas = Annotated[
    int | None,
    typer.Option(
        "--canonical-replicas", metavar="L", min=1, max=1 << 20, help="Lanes, in place of what the recipe says."
    ),
]
Runner = Annotated[str | None, typer.Option("--runner", metavar="R", help='"threads", "process" or "inline".')]
FlushIndex = Annotated[Path | None, typer.Option("--flush-index", metavar="DIR", help="Flush index of the run.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from zephon import __version__

        typer.echo(f"zephon {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command("stream")
def _stream(
    recipe: Recipe,
    tokenizer: Tokenizer,
    seq_len: SeqLen,
    microbatch_size: Annotated[
        int, typer.Option("--microbatch-size", metavar="M", min=1, max=_LIMIT, help="Records per batch.")
    ],
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="K", min=1, help="Stop after so many steps; else at the data's end."),
    ] = None,
    dp_degree: Annotated[int, typer.Option("--dp-degree", metavar="G", min=1, help="Data-parallel groups.")] = 1,
    dp_rank: Annotated[int, typer.Option("--dp-rank", metavar="R", min=0, help="Which of them this is.")] = 0,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            metavar="B",
            min=1,
            max=_LIMIT,
            help="Records per step over all ranks; else a step is a batch.",
        ),
    ] = None,
    canonical_replicas: Replicas = None,
    runner: Runner = None,
    digests: Annotated[
        Path | None, typer.Option("--digests", metavar="FILE", help="Write sequence number and SHA-256 of each record.")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option("--ledger", metavar="DIR", help="Keep a ledger, for zephon verify.")
    ] = None,
    flush_index: FlushIndex = None,
    seek_step: Annotated[
        int | None, typer.Option("--seek-step", metavar="S", min=0, help="Start at this step instead of the first.")
    ] = None,
) -> None:
    """Stream training batches, and say how fast, from where, and what was left out."""
    from zephon.cli.stream import stream

    stream(
        recipe,
        tokenizer=tokenizer,
        seq_len=seq_len,
        microbatch_size=microbatch_size,
        steps=steps,
        dp_degree=dp_degree,
        dp_rank=dp_rank,
        global_batch=global_batch,
        canonical_replicas=canonical_replicas,
        runner=runner,
        digests=digests,
        ledger=ledger,
        flush_index=flush_index,
        seek_step=seek_step,
    )


@app.command("plan")
def _plan(
    recipe: Recipe,
    tokenizer: Tokenizer,
    seq_len: SeqLen,
    global_batch: GlobalBatch,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="N", help="Length of the run in tokens, as in 500m or 20b.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="K", min=1, max=1 << 40, help="Length of the run in steps.")
    ] = None,
    max_passes: Annotated[
        float, typer.Option("--max-passes", metavar="P", min=0, help="Warn of sources gone through more often.")
    ] = 4.0,
    canonical_replicas: Replicas = None,
) -> None:
    """Draw how the mixture of a run goes, and tell how often each source is gone through."""
    from zephon.cli.plan import plan

    plan(
        recipe,
        tokenizer=tokenizer,
        seq_len=seq_len,
        global_batch=global_batch,
        tokens=tokens,
        steps=steps,
        max_passes=max_passes,
        canonical_replicas=canonical_replicas,
    )


@app.command("index")
def _index(
    target: Annotated[str, typer.Argument(metavar="PATH | RECIPE", help="A dataset, or a recipe (.toml).")],
    text_field: Annotated[
        str | None, typer.Option("--text-field", metavar="C", help="Column of the documents, where it is unusual.")
    ] = None,
    fmt: Annotated[
        str | None, typer.Option("--fmt", metavar="F", help="Format of the files, where their names do not say.")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option("--cache-dir", metavar="DIR", help="The run's cache folder, where it is not usual.")
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", min=1, max=1024, help="Files that are looked at in parallel.")
    ] = 32,
) -> None:
    """Look into every file of a dataset, once, so that training on it starts at once.

    Runs find what this leaves in their cache folder. It can be interrupted, and goes on where it was.
    """
    from zephon.cli.index import index

    index(target, text_field=text_field, fmt=fmt, cache_dir=cache_dir, jobs=jobs)


@app.command("show")
def _show(
    recipe: Recipe,
    tokenizer: Tokenizer,
    seq_len: SeqLen,
    global_batch: GlobalBatch,
    step: Annotated[int, typer.Option("--step", metavar="N", min=0, max=1 << 40, help="The step, from 0.")],
    canonical_replicas: Replicas = None,
    flush_index: FlushIndex = None,
    record: Annotated[
        int | None, typer.Option("--record", metavar="R", min=0, help="Only the record with this sequence number.")
    ] = None,
    chars: Annotated[
        int, typer.Option("--chars", metavar="C", min=0, help="Characters of text to print of each document.")
    ] = 200,
) -> None:
    """Print what the model saw in a step: documents, where they came from, and their text."""
    from zephon.cli.show import show

    show(
        recipe,
        tokenizer=tokenizer,
        seq_len=seq_len,
        global_batch=global_batch,
        step=step,
        canonical_replicas=canonical_replicas,
        flush_index=flush_index,
        record=record,
        chars=chars,
    )


@app.command("verify")
def _verify(
    targets: Annotated[list[Path], typer.Argument(metavar="RECIPE | LEDGER...", help="A recipe, or ledger folders.")],
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", metavar="T", help="As for zephon stream.")] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", metavar="N", min=1, max=_LIMIT, help="Tokens that the model sees.")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option("--global-batch", metavar="B", min=1, max=_LIMIT, help="Records per step over all ranks."),
    ] = None,
    dp: Annotated[
        str | None, typer.Option("--dp", metavar="G,G", help="Numbers of ranks, the reference first.")
    ] = None,
    resume_at: Annotated[
        str | None, typer.Option("--resume-at", metavar="S,S", help="Steps at which to go on with other ranks.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="K", min=1, help="Steps of each run; by default 10 or more.")
    ] = None,
    microbatch_size: Annotated[
        int | None,
        typer.Option("--microbatch-size", metavar="M", min=1, max=_LIMIT, help="Records per batch, at most."),
    ] = None,
    canonical_replicas: Replicas = None,
    runner: Runner = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Draw the barcode: a row per run, a cell per step."),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="Keep the ledgers and states of the runs here.")
    ] = None,
) -> None:
    """Compare runs step by step; given a recipe, make the runs first, on every topology and through resumes.

    Exits with 1 where anything differs, and names the first difference.
    """
    from zephon.cli.verify import verify

    identical = verify(
        targets,
        tokenizer=tokenizer,
        seq_len=seq_len,
        global_batch=global_batch,
        dp=dp,
        resume_at=resume_at,
        steps=steps,
        microbatch_size=microbatch_size,
        canonical_replicas=canonical_replicas,
        runner=runner,
        plot=plot,
        keep=keep,
    )
    if not identical:
        raise typer.Exit(1)
