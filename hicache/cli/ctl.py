"""`hicache ctl`: shows and changes a running daemon, or the cache inside an engine, through its admin surface.

Exit codes are those of every command: 1 for a negative result (nothing found, damage found), 2 for not done.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import click
from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from ..admin import models
from ..admin.advice import advise as advice_on
from ..backends.base import Direction
from ..backends.guard import Override
from ..config.files import open_regular
from ..errors import InvalidInput
from ..hints import KINDS, HintAction, HintsEnvelope, Outcome, OutcomeStatus, hint_of
from . import ctl_view
from .arguments import DURATION, FILE, PATH, SIZE, NamespacePrefix
from .ctl_client import Address, AdminClient
from .ctl_jobs import show_job, watch
from .main import FOUND_EXIT_CODE

_TOKENS_FILE_BYTES_MAX = 32 << 20
_STORE = click.argument("store", required=False)
_YES = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
_NAMESPACE = click.option(
    "--namespace", metavar="HEX", type=NamespacePrefix(), callback=lambda _context, _option, value: value or "",
    help="Only namespaces whose digest starts with these digits; `namespaces` lists them.",
)
_TOKENS = click.option(
    "--tokens", "tokens_file", metavar="FILE", type=PATH,
    help='Token ids as a JSON list, or {"ids": [...], "extra_key": ..., "cache_salt": ...}; - is standard input.',
)


@dataclass(frozen=True)
class Session:
    """The connection of one command, and the format of its output."""

    address: Address
    as_json: bool

    @functools.cached_property
    def client(self) -> AdminClient:
        """The client, made when a command has checked its own arguments. It is closed at the end of the command."""
        client = AdminClient(self.address, self.address.token().get)
        click.get_current_context().call_on_close(client.close)
        return client

    def show(self, answer: object, lines: Iterator[str]) -> None:
        """Print the answer as text, or as JSON with `--json`."""
        if self.as_json:
            click.echo(json.dumps(to_jsonable_python(answer), indent=2))
        else:
            click.echo("\n".join(lines))

    def done(self, what: str, **answer: object) -> None:
        """Print what was done."""
        self.show({"done": what, **answer}, iter([what]))


@click.group()
@click.option("--socket", type=PATH, help="Unix socket of a daemon or an engine. Default: that of this user's daemon.")
@click.option("--url", help="TCP address of a daemon, such as https://host:port; needs the admin token.")
@click.option("-c", "--config", "config_file", type=FILE, help="Configuration of the daemon or engine, with its socket "
              "and token.")
@click.option("--token-file", type=FILE, help="File with the admin token, mode 0600.")
@click.option("--ca-file", type=FILE, help="Authority of the daemon's certificate, PEM.")
@click.option("--certificate", type=FILE, help="Certificate of this client, PEM, for mutual TLS.")
@click.option("--key", type=FILE, help="Private key of --certificate, PEM.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, with whole digests and plain numbers.")
@click.pass_context
def ctl(context: click.Context, /, *, as_json: bool, **address: Any) -> None:
    """Show or change a running daemon, or the cache inside an engine.

    By default this is the daemon of this user, at the default socket of `hicache serve`.
    """
    context.obj = Session(Address(**address), as_json)


def _confirm(yes: bool, question: str) -> None:
    """Ask on a terminal. Raises UsageError without a terminal, and Abort for the answer no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError("cannot ask for confirmation without a terminal; pass --yes to confirm")
    click.confirm(question, abort=True, err=True)


# Show


@ctl.command()
@click.pass_obj
def status(session: Session) -> None:
    """Show tiers, namespaces, stores and clients."""
    found = session.client.get("/status", models.Status)
    session.show(found, ctl_view.status_lines(found))


def _add_part(part: str, lines: Callable[[models.Status], Iterator[str]], what: str) -> None:
    @ctl.command(part, help=what)
    @click.pass_obj
    def show(session: Session) -> None:
        found = session.client.get("/status", models.Status)
        session.show(getattr(found, part), lines(found))


_add_part("stores", ctl_view.store_lines, "List the stores of each namespace, with their breakers.")
_add_part("namespaces", ctl_view.namespace_lines, "List the namespaces that engines have opened.")
_add_part("clients", ctl_view.client_lines, "List the engines whose memory the daemon has mapped.")


@ctl.command()
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@_TOKENS
@_NAMESPACE
@click.option("--timeout", type=DURATION, default=5.0, help="Time limit, such as 30s.")
@click.pass_obj
def lookup(session: Session, keys: tuple[str, ...], tokens_file: Path | None, namespace: str, timeout: float) -> None:
    """Show on which tiers and in which stores pages are.

    KEY is a page key of 64 hexadecimal digits, or at least its first 4, for which stores are listed. --tokens selects
    the pages of a prompt prefix; this works only with an engine. Exit code 1 if nothing was found.
    """
    found = session.client.post("/lookup", _lookup(keys, tokens_file, namespace, timeout), models.Lookup)
    session.show(found, ctl_view.lookup_lines(found))
    if not any(page.places for page in found.pages):
        raise click.exceptions.Exit(FOUND_EXIT_CODE)


def _lookup(keys: tuple[str, ...], tokens_file: Path | None, namespace: str, timeout: float) -> models.LookupRequest:
    if tokens_file is not None:
        return _checked(models.LookupRequest, tokens=_tokens(tokens_file), namespace=namespace, timeout_s=timeout)
    pages = _page_keys(keys, digits_min=64 if len(keys) > 1 else 4)
    if len(pages) == 1 and len(pages[0]) < 64:
        return _checked(models.LookupRequest, prefix=pages[0], namespace=namespace, timeout_s=timeout)
    return _checked(models.LookupRequest, keys=pages, namespace=namespace, timeout_s=timeout)


def _page_keys(keys: tuple[str, ...], digits_min: int = 64) -> list[str]:
    lower = [key.lower() for key in keys]
    for key in lower:
        if not digits_min <= len(key) <= 64 or key.strip("0123456789abcdef"):
            shorter = "" if digits_min == 64 else f", or at least the first {digits_min}"
            raise InvalidInput(f"{key[:70]!r} is not a page key; use its 64 hexadecimal digits{shorter}")
    return lower


@ctl.command()
@click.argument("rid", required=False)
@click.option("--last", type=click.IntRange(1, models.ACCOUNTS_MAX), help="The last N requests.")
@_TOKENS
@click.pass_obj
def explain(session: Session, rid: str | None, last: int | None, tokens_file: Path | None) -> None:
    """Show which tokens of prompts came from which tier, and why the others were computed.

    RID is the engine's id of a request, --tokens a prompt that comes now. Without them: all of the last hour.
    """
    if sum(one is not None for one in (rid, last, tokens_file)) > 1:
        raise InvalidInput("explain: pass one of RID, --last and --tokens")
    if tokens_file is not None:
        found = session.client.post("/v1/explain", _lookup((), tokens_file, "", 5.0), models.Explanation)
    else:
        query = f"last={last or 0}" if rid is None else f"rid={quote(rid, safe='')}"
        found = session.client.get(f"/v1/explain?{query}", models.Explanation)
    session.show(found, ctl_view.explanation_lines(found, is_list=last is not None))


@ctl.command()
@click.pass_obj
def advise(session: Session) -> None:
    """Show the three largest reasons of the last hour for which tokens were computed, each with what to change."""
    found = session.client.get(f"/v1/explain?last={models.ACCOUNTS_MAX}", models.Explanation)
    advice = advice_on(found)
    answer = [cause.model_dump() | {"advice": text} for cause, text in advice]
    session.show(answer, ctl_view.advice_lines(advice, found.total.tokens))


# Memory


@ctl.command()
@click.option("--pool", "where", flag_value="pool", help="Only memory: the pool of a daemon, L1 and L2 of an engine.")
@click.option("--store", help="Only the store of this name.")
@click.option("--all", "where", flag_value="all", help="Memory and all stores.")
@_NAMESPACE
@_YES
@click.pass_obj
def clear(session: Session, *, where: str | None, store: str | None, namespace: str, yes: bool) -> None:
    """Remove pages from memory and stores: of all namespaces, or of those whose digest starts with --namespace.

    A removed page is a miss. In stores this includes namespaces of other daemons and engines. Asks for confirmation.
    """
    if (where is None) is (store is None):
        raise InvalidInput("clear: pass one of --pool, --store NAME and --all")
    request = _checked(models.ClearRequest, namespace=namespace, where="store" if store else where, store=store)
    whose = f"namespaces {namespace}..." if namespace else "ALL namespaces"
    what = f"store {store!r}" if store else {"pool": "memory", "all": "memory and ALL stores"}[where or ""]
    _confirm(yes, f"Remove all pages of {whose} from {what} at {session.client.where}?")
    show_job(session.client, watch(session.client, "/clear", request, "clearing"), session.as_json)


@ctl.command()
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@_TOKENS
@_NAMESPACE
@click.option("--ttl", type=DURATION, default=models.PIN_TTL_S, help="Lifetime, such as 12h; default 1h.")
@click.pass_obj
def pin(session: Session, keys: tuple[str, ...], tokens_file: Path | None, namespace: str, ttl: float) -> None:
    """Keep a chain in memory: KEYS in the order of the chain (daemon), or a prompt prefix by --tokens (engine).

    Without either, list the pins. Only pages that are in memory now are pinned.
    """
    if not keys and tokens_file is None:
        found = session.client.get("/pins", list[models.PinStatus])
        session.show(found, ctl_view.pin_lines(found))
        return
    tokens = None if tokens_file is None else _tokens(tokens_file)
    request = _checked(models.PinRequest, namespace=namespace, keys=_page_keys(keys), tokens=tokens, ttl_s=ttl)
    made = session.client.post("/pins", request, models.PinStatus)
    session.show(made, ctl_view.pin_lines([made]))
    if not made.pages:
        raise click.exceptions.Exit(FOUND_EXIT_CODE)


@ctl.command()
@click.argument("action", type=click.Choice(list(KINDS)))
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@_TOKENS
@_NAMESPACE
@click.option("--session", "session_id", help="The pages of the last request of this session (engine).")
@click.option("--ttl", "ttl_s", type=DURATION, help="For kv.pin and kv.retain; default 1m.")
@click.option("--value", type=float, help="For kv.retain: above 0, at most 1; default 1.")
@click.option("--destination", type=click.Choice(["device", "host", "storage"]), help="For kv.prefetch, kv.demote.")
@click.option("--needed-in", "needed_in_s", type=DURATION, help="For kv.prefetch: when a request comes.")
@click.option("--expected", "expected_s", type=DURATION, help="For session.wait: when the session returns.")
@click.option("--source", help="For session.wait: who estimates the time.")
@click.pass_obj
def hint(session: Session, /, *, action: str, keys: tuple[str, ...], tokens_file: Path | None, **entries: Any) -> None:
    """Tell the cache what comes next: ACTION about a session, a prompt (--tokens) or a chain of page keys.

    docs/hints.md describes the actions. Exit code 1 if the cache did not accept it.
    """
    payload = {name: value for name, value in entries.items() if value is not None}
    if keys:
        payload["page_keys"] = _page_keys(keys)
    if tokens_file is not None:
        prompt = _tokens(tokens_file)
        salt = prompt.cache_salt
        payload |= {"tokens": prompt.ids, "extra_key": prompt.extra_key,
                    "cache_salt": None if salt is None else salt.get_secret_value()}
    one = HintAction(action_id="ctl", action_type=action, payload=payload)
    hint_of(one)
    found = session.client.post("/v1/hints", HintsEnvelope(actions=[one]), list[Outcome])
    session.show(found, ctl_view.outcome_lines(found))
    if found[0].status in (OutcomeStatus.REJECTED, OutcomeStatus.MISSING):
        raise click.exceptions.Exit(FOUND_EXIT_CODE)


@ctl.command()
@click.argument("pin_id", metavar="PIN")
@click.pass_obj
def unpin(session: Session, pin_id: str) -> None:
    """End the pin PIN; `pin` without arguments lists them."""
    if not pin_id.isalnum():
        raise InvalidInput(f"unpin: {pin_id[:40]!r} is not the id of a pin; `hicache ctl pin` lists them")
    session.client.delete(f"/pins/{pin_id}")
    session.done(f"unpinned {pin_id}")


@ctl.command()
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@_TOKENS
@click.option("--prompts", "prompts_file", metavar="FILE", type=PATH,
              help="One prompt per line, each as in the file of --tokens; - is standard input.")
@click.option("--top", "top_bytes", type=SIZE,
              help="The most recently used chains of the stores, up to this size, such as 20GiB.")
@_NAMESPACE
@click.option("--rate", "rate_bytes_per_s", type=SIZE, help="Limit of bytes read per second, such as 200MiB.")
@click.option("--dry-run", is_flag=True, help="Read no pages; print the result with enough free memory.")
@click.option("--background", is_flag=True, help="Return at once; `jobs` shows the progress.")
@click.pass_obj
def warm(
    session: Session, /, *, keys: tuple[str, ...], tokens_file: Path | None, prompts_file: Path | None,
    background: bool, **entries: Any,
) -> None:
    """Read chains from storage into free memory, so that the first requests hit: L2 of an engine, or a daemon's pool.

    Pass one of: KEYS, a chain of page keys, root first; --tokens or --prompts, for an engine that keys pages by tokens;
    --top, for a daemon or vLLM. Evicts nothing. Ctrl-C cancels it. Exit code 1 if none of the pages is in memory.
    """
    if sum(bool(one) for one in (keys, tokens_file, prompts_file, entries["top_bytes"])) != 1:
        raise InvalidInput("warm: pass one of KEYS, --tokens, --prompts and --top")
    prompts = [] if tokens_file is None else [_tokens(tokens_file)]
    if prompts_file is not None:
        prompts = _prompts(prompts_file)
    request = _checked(models.WarmRequest, keys=_page_keys(keys), prompts=prompts, **entries)
    job = watch(session.client, "/warm", request, "warming up", background=background)
    show_job(session.client, job, session.as_json)


# Stores


@ctl.command()
@_STORE
@click.pass_obj
def attach(session: Session, store: str | None) -> None:
    """Open the configured storage, or only its part STORE, and use it instead of the current storage.

    `stores` shows it once it is open; a failed attempt is repeated.
    """
    session.client.post("/attach", models.StoreRequest(store=store), type(None))
    session.done(f"attaching {store or 'the configured storage'}")


@ctl.command()
@_STORE
@_YES
@click.pass_obj
def detach(session: Session, store: str | None, yes: bool) -> None:
    """Close the storage and continue without it: every page that is not in memory is a miss.

    Use it for work on a store that must not be open. STORE may name a single store; for one of several, use bypass.
    """
    _confirm(yes, f"Close the storage at {session.client.where}?")
    session.client.post("/detach", models.StoreRequest(store=store), type(None))
    session.done("detached; `hicache ctl attach` opens the storage again")


@ctl.command()
@_STORE
@click.option("--end", is_flag=True, help="End the bypass; the breaker decides again.")
@click.pass_obj
def bypass(session: Session, store: str | None, end: bool) -> None:
    """Stop reads and writes of STORE, or of all stores. The stores stay open."""
    mode = Override.AUTO if end else Override.OFF
    session.client.put("/breakers", models.BreakerRequest(store=store, mode=mode))
    session.done(f"{store or 'all stores'}: {'in use again' if end else 'bypassed; `bypass --end` uses it again'}")


@ctl.command()
@click.argument("store")
@click.argument("mode", type=click.Choice([mode.value for mode in Override]))
@click.option("--direction", type=click.Choice([way.value for way in Direction]), help="Default: both.")
@click.pass_obj
def breaker(session: Session, store: str, mode: str, direction: str | None) -> None:
    """Force the breaker of STORE (or "all"): `on` allows every call, `off` rejects all, `auto` lets it decide."""
    way = None if direction is None else Direction(direction)
    name = None if store == "all" else store
    session.client.put("/breakers", models.BreakerRequest(store=name, direction=way, mode=Override(mode)))
    session.done(f"{store}, {direction or 'both directions'}: {mode}")


@ctl.command()
@_STORE
@click.option("--rate", type=SIZE, help="Limit of bytes read per second, such as 200MiB.")
@click.option("--remove", is_flag=True, help="Remove damaged pages. A removed page is a miss.")
@click.option("--background", is_flag=True, help="Return at once; `jobs` shows the progress.")
@click.pass_obj
def scrub(session: Session, *, store: str | None, rate: int | None, remove: bool, background: bool) -> None:
    """Read and verify every page of STORE, or of all stores, in the background of the daemon or engine.

    Ctrl-C cancels it and prints the result. Exit code 1 if damage was found, even if it was removed.
    """
    request = _checked(models.ScrubRequest, store=store, rate_bytes_per_s=rate, remove=remove)
    job = watch(session.client, "/scrub", request, "scrubbing", background=background)
    show_job(session.client, job, session.as_json)


# Limits


@ctl.command()
@click.argument("namespace", required=False, type=NamespacePrefix())
@click.argument("size", required=False)
@click.pass_obj
def quota(session: Session, namespace: str | None, size: str | None) -> None:
    """Show the quotas, or limit NAMESPACE to SIZE of the daemon's pool, such as 4GiB; `none` removes the limit."""
    if namespace is not None and size is None:
        raise InvalidInput("quota: pass a size too, such as 4GiB, or none")
    if namespace is not None:
        quota_bytes = None if size == "none" else SIZE.convert(size, None, None)
        session.client.put("/quotas", _checked(models.QuotaRequest, namespace=namespace, quota_bytes=quota_bytes))
    found = session.client.get("/quotas", list[models.Quota])
    session.show(found, ctl_view.quota_lines(found))


@ctl.command()
@click.argument("level", required=False, type=click.Choice(["debug", "info", "warning", "error"]))
@click.pass_obj
def logs(session: Session, level: str | None) -> None:
    """Show the log level, or set it until the process ends."""
    if level is not None:
        session.client.put("/log_level", {"level": level})
    found = session.client.get("/log_level", dict[str, str])
    session.show(found, iter([found["level"]]))


@ctl.command()
@click.argument("job", required=False)
@click.option("--cancel", is_flag=True, help="Cancel JOB.")
@click.pass_obj
def jobs(session: Session, job: str | None, cancel: bool) -> None:
    """List jobs, or follow JOB until it ends."""
    if job is None:
        found = session.client.get("/jobs", list[models.Job])
        session.show(found, ctl_view.job_lines(found))
        return
    if not job.isalnum():
        raise InvalidInput(f"jobs: {job[:40]!r} is not the id of a job; `hicache ctl jobs` lists them")
    if cancel:
        session.client.delete(f"/jobs/{job}")
    show_job(session.client, watch(session.client, job=job), session.as_json)


Request = TypeVar("Request", bound=BaseModel)


def _checked(kind: type[Request], **entries: Any) -> Request:
    """Return a request. Raises InvalidInput that names the wrong entries, without their values."""
    try:
        return kind(**entries)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise InvalidInput("; ".join(problems[:3])) from None


def _tokens(path: Path) -> models.TokenPrefix:
    """Return the token ids in a file."""
    return _prompt(_read(path), f"--tokens {path}")


def _prompts(path: Path) -> list[models.TokenPrefix]:
    """Return the prompts in a file, one per line. Raises InvalidInput without any."""
    lines = enumerate(_read(path).splitlines(), 1)
    found = [_prompt(line, f"--prompts {path}, line {number}") for number, line in lines if line.strip()]
    if not found:
        raise InvalidInput(f"--prompts {path}: is empty; write one prompt per line")
    return found


def _read(path: Path) -> bytes:
    if str(path) == "-":
        return sys.stdin.buffer.read(_TOKENS_FILE_BYTES_MAX)
    with open_regular(path) as file:
        return file.read(_TOKENS_FILE_BYTES_MAX)


def _prompt(text: bytes, source: str) -> models.TokenPrefix:
    """Return a prompt of this JSON. Errors do not quote it."""
    try:
        found = json.loads(text)
    except ValueError:
        raise InvalidInput(f"{source}: is not JSON; write a list of token ids") from None
    return _checked(models.TokenPrefix, **({"ids": found} if not isinstance(found, dict) else found))
