"""Follows a job of a daemon or engine from `hicache ctl`: its progress, cancellation and result."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator

import click
from pydantic import BaseModel

from ..admin.models import Job, JobKind, JobState
from ..backends.tools.verify import SPARED
from ..units import counted, format_size
from .ctl_client import AdminClient
from .interrupts import noted_signals
from .main import FOUND_EXIT_CODE, INTERRUPTED_EXIT_CODE, USAGE_EXIT_CODE
from .progress import StepProgress, follow

# The polling interval of a job: short jobs end soon, and one request costs the server a millisecond.
ASK_S = 0.2
_CANCEL_S_MAX = 30.0
# The most damaged pages that are printed as text.
_NAMED_MAX = 10


def watch(
    client: AdminClient, path: str = "", request: BaseModel | None = None, title: str = "job", *, job: str = "",
    background: bool = False,
) -> Job:
    """Start a job by POST, or use the one with the id `job`, and follow it until it ends; return it. With `background`
    return at once. Ctrl-C cancels it."""
    with noted_signals() as noted:  # an interrupt now would leave a job behind that has begun
        first = client.get(f"/jobs/{job}", Job) if request is None else client.post(path, request, Job)
    if background:
        return first
    try:
        if noted:
            signal.raise_signal(noted[0])
        return follow(_steps(client, first), title, _job_progress)
    except KeyboardInterrupt:
        click.echo("cancelling; press Ctrl-C again to leave it running", err=True)
        client.delete(f"/jobs/{first.id}")
        deadline = time.monotonic() + _CANCEL_S_MAX
        return next(job for job in _steps(client, first) if job.state.is_final or time.monotonic() >= deadline)


def _steps(client: AdminClient, job: Job) -> Iterator[Job]:
    yield job
    while not job.state.is_final:
        time.sleep(ASK_S)
        job = client.get(f"/jobs/{job.id}", Job)
        yield job


def _job_progress(job: Job) -> StepProgress:
    progress = job.progress
    found = f"{progress.store} {format_size(progress.bytes)}"
    if job.kind is JobKind.SCRUB:
        found += f", {sum(progress.damaged.values())} damaged"
    elif job.kind is JobKind.CLEAR:
        found += f", {progress.removed:,} removed"
    return StepProgress(progress.pages, progress.total, found.strip())


def show_job(client: AdminClient, job: Job, as_json: bool) -> None:
    """Print the result of a job, and exit with its exit code."""
    if as_json:
        click.echo(json.dumps(job.model_dump(mode="json"), indent=2))
    else:
        for line in summary(job):
            click.echo(line)
    if job.state is JobState.FAILED:
        raise click.exceptions.Exit(USAGE_EXIT_CODE)
    if job.state is JobState.CANCELLED or job.is_cancelling:
        raise click.exceptions.Exit(INTERRUPTED_EXIT_CODE)
    is_cold = job.kind is JobKind.WARM and job.state is JobState.DONE and not job.progress.pages
    if job.progress.damaged or job.progress.unsupported or is_cold:
        raise click.exceptions.Exit(FOUND_EXIT_CODE)


def summary(job: Job) -> Iterator[str]:
    """Yield the lines of a job's result."""
    progress = job.progress
    if not job.state.is_final:
        yield f"job {job.id} {'is being cancelled' if job.is_cancelling else job.state.value}: {job.what}"
        yield f"  `hicache ctl jobs {job.id}` follows it"
        return
    yield f"{job.what}: {job.state.value} after {job.elapsed_s:.1f} s{f': {job.error}' if job.error else ''}"
    if job.kind is JobKind.SCRUB:
        yield f"  read      {counted(progress.pages, 'page')}, {format_size(progress.bytes)}"
        for reason, pages in sorted(progress.damaged.items()):
            yield f"  damaged   {counted(pages, 'page')}: {reason}"
        for page in progress.findings[:_NAMED_MAX]:
            yield f"    {page.store}  {page.namespace[:12]}  {page.key[:16]}  {page.damage}"
        if len(progress.findings) > _NAMED_MAX:
            yield "    ... (`--json` names the first 100)"
        if not progress.damaged:
            yield "  damaged   none"
        if progress.spared:
            yield f"  spared    {counted(progress.spared, 'page')}: {SPARED}"
        if progress.unsupported:
            yield f"  not ours  {counted(progress.unsupported, 'page')} that the configured keys do not verify"
        if progress.unverifiable:
            yield f"  unchecked {counted(progress.unverifiable, 'page')} without a tag, or for which the key is missing"
        if progress.skipped:
            yield f"  skipped   {', '.join(progress.skipped)}: cannot be listed"
    if job.kind is JobKind.WARM:
        yield f"  in memory {progress.pages:,} of {counted(progress.total or 0, 'page')}"
        yield f"  read      {format_size(progress.bytes)}"
        for reason in progress.skipped:
            yield f"  skipped   {reason}"
    if progress.removed or job.kind is JobKind.CLEAR:
        yield f"  removed   {counted(progress.removed, 'page')}"
