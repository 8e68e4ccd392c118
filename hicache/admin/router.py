"""The routes of `/v1/admin`: checks the caller, calls an AdminTarget on separate threads, and writes the audit log.

Each change is one INFO line: caller, action, result. Reads are DEBUG lines. Lines never contain tokens, token ids or
whole keys.

Locking design: the routes run on the event loop. Blocking calls run on a SupervisedPool, whose threads return their
result through a Future; only the event loop changes `_Calls.waiting`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from ..backends.base import Direction
from ..errors import AdminError, BackendError, ConfigError, HiCacheError, InvalidInput, InvariantError
from ..hints import HintsEnvelope, Outcome
from ..logs import LimitedLog
from ..supervised import Beat, SupervisedPool
from ..units import counted, format_size
from . import models, work
from .access import PEER, AdminAccess
from .jobs import Jobs
from .target import AdminTarget

logger = logging.getLogger(__name__)
_strangers = LimitedLog(logger)
T = TypeVar("T")

PREFIX = "/v1/admin"
# There are few operators. A store that hangs blocks one of the threads until its deadline.
THREADS = 4
WAITING_MAX = 32

# The status code of each kind of error; all other kinds are 409: a valid request that does not suit this target.
_STATUS = {
    "forbidden": 403, "invalid": 422, "busy": 503, "closed": 503, "scheduler_stopped": 503, "store": 503,
    "internal": 500,
}
_RETRY_S = 1
_REFUSALS: dict[int | str, Any] = {code: {"model": models.Refusal} for code in [403, 404, 409, 422, 500, 503]}


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    function: Callable[[], Any]
    answer: Future[Any] = field(default_factory=Future)


class _Calls:
    """Threads that call the target."""

    def __init__(self) -> None:
        self.waiting = 0
        self.pool: SupervisedPool[_Call] = SupervisedPool(
            "admin-call", THREADS, handle=self._handle, fail=self._fail, linger_s=10.0
        )

    async def run(self, function: Callable[[], T]) -> T:
        if self.waiting >= WAITING_MAX:
            raise AdminError("busy", f"{WAITING_MAX} admin requests are in flight; try again later")
        call = _Call(function)
        self.waiting += 1
        try:
            self.pool.submit(call)
            return cast(T, await asyncio.wrap_future(call.answer))
        finally:
            self.waiting -= 1

    @staticmethod
    def _handle(call: _Call, beat: Beat) -> None:
        if not call.answer.set_running_or_notify_cancel():
            return  # the client has disconnected
        try:
            call.answer.set_result(call.function())
        except HiCacheError as error:
            call.answer.set_exception(error)

    @staticmethod
    def _fail(call: _Call) -> None:
        call.answer.set_exception(AdminError("internal", "an unexpected error, which is in the log; please report it"))


class AdminSurface:
    """The admin surface of one target: `router` has its routes. `close` ends its jobs and threads."""

    def __init__(self, target: AdminTarget, access: AdminAccess) -> None:
        self.jobs = Jobs(target.clock)
        self._calls = _Calls()
        self.router = _router(target, access, self.jobs, self._calls)

    def close(self, timeout_s: float) -> None:
        """Cancel all jobs and end the threads; blocks."""
        self.jobs.close(timeout_s)
        self._calls.pool.close(timeout_s)


def refused(error: HiCacheError) -> tuple[int, models.Refusal]:
    """Return the status code and the body for an error."""
    kind = "conflict"
    if isinstance(error, AdminError):
        kind = error.kind
    elif isinstance(error, InvariantError):
        kind = "internal"
    elif isinstance(error, BackendError):
        kind = "store"
    elif isinstance(error, InvalidInput):
        kind = "invalid"
    elif isinstance(error, ConfigError):
        kind = "configuration"
    code = 404 if kind.startswith("unknown_") else _STATUS.get(kind, 409)
    return code, models.Refusal(error=kind, detail=str(error))


def _guarded(access: AdminAccess) -> type[APIRoute]:
    """Return a route class that checks `access` before it reads a body, and logs each action."""

    class Guarded(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def handle(request: Request) -> Response:
                who = access.who(request.scope.get("state", {}).get(PEER), request.headers)
                what = f"{request.method} {request.url.path[:100]!r}"
                try:
                    if who is None:
                        raise AdminError("forbidden", access.how)
                    response: Response = await handler(request)
                    result = "ok"
                except RequestValidationError as error:
                    response, result = _answer(AdminError("invalid", _problems(error)))
                except HiCacheError as error:
                    response, result = _answer(error)
                reads = request.method == "GET" or what.endswith(("/lookup'", "/explain'"))
                what = getattr(request.state, "what", what)
                if who is None:  # a stranger must not be able to fill the log
                    _strangers.warn(request.method, "admin: %s: %s: %s", _stranger(request), what, result)
                else:
                    logger.log(logging.DEBUG if reads else logging.INFO, "admin: %s: %s: %s", who, what, result)
                return response

            return handle

    return Guarded


def _stranger(request: Request) -> str:
    peer = request.scope.get("state", {}).get(PEER)
    if peer is not None:
        return f"uid {peer}"
    return "unknown" if request.client is None else request.client.host


def _answer(error: HiCacheError) -> tuple[Response, str]:
    code, refusal = refused(error)
    headers = {"Retry-After": str(_RETRY_S)} if code == 503 else None
    return JSONResponse(refusal.model_dump(), code, headers=headers), f"refused ({refusal.error})"


def _problems(error: RequestValidationError) -> str:
    """Return the problems without the values, which include token ids and salts."""
    found = [f"{'.'.join(map(str, one['loc'][1:])) or 'body'}: {one['msg']}" for one in error.errors()]
    return "; ".join(found[:5])


def _router(target: AdminTarget, access: AdminAccess, jobs: Jobs, calls: _Calls) -> APIRouter:
    guarded: dict[str, Any] = {"tags": ["admin"], "route_class": _guarded(access), "responses": _REFUSALS}
    router, prompts, both = APIRouter(prefix=PREFIX, **guarded), APIRouter(prefix="/v1", **guarded), APIRouter()
    _add_reading(router, target, calls)
    _add_jobs(router, target, jobs, calls)
    _add_pins(router, target, calls)
    _add_stores(router, target, calls)
    _add_limits(router, target, calls)
    _add_prompts(prompts, target, calls)
    both.include_router(router)
    both.include_router(prompts)
    return both


def _add_reading(router: APIRouter, target: AdminTarget, calls: _Calls) -> None:
    @router.get("/status")
    async def status() -> models.Status:
        """Show tiers, namespaces, stores and clients."""
        return await calls.run(target.status)

    @router.post("/lookup")
    async def lookup(body: models.LookupRequest) -> models.Lookup:
        """Find pages on all tiers and stores."""
        return await calls.run(lambda: work.look_up(target, body))


def _add_jobs(router: APIRouter, target: AdminTarget, jobs: Jobs, calls: _Calls) -> None:
    def ended(job: models.Job) -> None:
        logger.info("admin: job %s: %s: %s after %.1f s, %s, %s damaged, %s removed%s", job.id, job.what,
                    job.state.value, job.elapsed_s, counted(job.progress.pages, "page"),
                    sum(job.progress.damaged.values()), job.progress.removed,
                    f": {job.error}" if job.error else "")

    @router.post("/scrub", status_code=202)
    async def scrub(body: models.ScrubRequest, request: Request) -> models.Job:
        """Verify stored pages, as a job."""
        what = f"scrub {_named(body.store)}{', removing damaged pages' if body.remove else ''}"
        request.state.what = what
        steps = await calls.run(lambda: work.scrub(target, body))
        return jobs.submit(models.JobKind.SCRUB, what, steps, ended)

    @router.post("/clear", status_code=202)
    async def clear(body: models.ClearRequest, request: Request) -> models.Job:
        """Remove pages from memory and stores, as a job."""
        where = _named(body.store) if body.where == "store" else {"all": "everything", "pool": "memory"}[body.where]
        what = f"clear {where}{_whose(body.namespace) or ' of all namespaces'}"
        request.state.what = what
        steps = await calls.run(lambda: work.clear(target, body))
        return jobs.submit(models.JobKind.CLEAR, what, steps, ended)

    @router.post("/warm", status_code=202)
    async def warm(body: models.WarmRequest, request: Request) -> models.Job:
        """Read chains from storage into free memory, as a job."""
        what = f"{'dry run of a warm-up' if body.dry_run else 'warm-up'} {_chains(body)}{_whose(body.namespace)}"
        request.state.what = what
        steps = await calls.run(lambda: work.warm(target, body))
        return jobs.submit(models.JobKind.WARM, what, steps, ended)

    @router.get("/jobs")
    async def list_jobs() -> list[models.Job]:
        """List jobs, the oldest first."""
        return jobs.all()

    @router.get("/jobs/{job}")
    async def get_job(job: str) -> models.Job:
        """Show the progress of a job."""
        return jobs.get(job)

    @router.delete("/jobs/{job}")
    async def cancel_job(job: str, request: Request) -> models.Job:
        """Cancel a job. It ends after its current page."""
        request.state.what = f"cancel job {job[:16]!r}"
        return jobs.cancel(job)


def _add_pins(router: APIRouter, target: AdminTarget, calls: _Calls) -> None:
    @router.get("/pins")
    async def list_pins() -> list[models.PinStatus]:
        """List the active pins."""
        return list(await calls.run(target.pins))

    @router.post("/pins", status_code=201)
    async def pin(body: models.PinRequest, request: Request) -> models.PinStatus:
        """Keep a chain in memory."""
        request.state.what = f"pin a chain for {body.ttl_s:g} s"
        return await calls.run(lambda: target.pin(body))

    @router.delete("/pins/{pin_id}", status_code=204)
    async def unpin(pin_id: str, request: Request) -> None:
        """End a pin."""
        request.state.what = f"unpin {pin_id[:16]!r}"
        await calls.run(lambda: target.unpin(pin_id))


def _add_prompts(router: APIRouter, target: AdminTarget, calls: _Calls) -> None:
    @router.get("/explain")
    async def explain(rid: str | None = None, last: models.Last = 0) -> models.Explanation:
        """Show where the tokens of prompts came from, and why the others were computed."""
        return await calls.run(lambda: target.explain(rid, last))

    @router.post("/explain")
    async def foresee(body: models.LookupRequest) -> models.Explanation:
        """Show what would happen to a prompt now."""
        return await calls.run(lambda: target.explain(None, 0, body))

    @router.post("/hints")
    async def hint(body: HintsEnvelope, request: Request) -> list[Outcome]:
        """Carry out hints about prompts."""
        request.state.what = f"hints {', '.join(action.action_type[:32] for action in body.actions)}"
        return list(await calls.run(lambda: target.hint(body)))


def _add_stores(router: APIRouter, target: AdminTarget, calls: _Calls) -> None:
    @router.post("/attach", status_code=204)
    async def attach(body: models.StoreRequest, request: Request) -> None:
        """Use the configured storage, or only one store of it. It is open once `status` shows it."""
        request.state.what = "attach the storage" if body.store is None else f"attach {_named(body.store)} alone"
        target.stores.require(body.store)
        if target.stores.whole is None:
            raise AdminError("unsupported", "attach: the configuration has no section `storage`; add one and restart")
        await calls.run(lambda: target.attach(body.store))

    @router.post("/detach", status_code=204)
    async def detach(body: models.StoreRequest, request: Request) -> None:
        """Close the storage and continue without it."""
        request.state.what = "detach the storage"
        if body.store is not None and len(target.stores.specs) > 1 and target.stores.require(body.store):
            raise AdminError(
                "unsupported", f"{body.store!r} is one of several stores and cannot be closed alone; bypass it, or "
                "detach all and attach another one alone",
            )
        target.stores.require(body.store)
        await calls.run(target.detach)

    @router.put("/breakers", status_code=204)
    async def force_breaker(body: models.BreakerRequest, request: Request) -> None:
        """Force breakers on or off, or let them decide again. Both directions off: the store is bypassed."""
        way = "both directions" if body.direction is None else body.direction.value
        request.state.what = f"breaker of {_named(body.store)}, {way}: {body.mode.value}"
        target.stores.require(body.store)
        for direction in Direction if body.direction is None else (body.direction,):
            await calls.run(lambda way=direction: target.override(body.store, way, body.mode))  # type: ignore[misc]


def _add_limits(router: APIRouter, target: AdminTarget, calls: _Calls) -> None:
    @router.get("/quotas")
    async def quotas() -> list[models.Quota]:
        """List the quotas."""
        return list(await calls.run(target.quotas))

    @router.put("/quotas", status_code=204)
    async def set_quota(body: models.QuotaRequest, request: Request) -> None:
        """Set or remove the quota of a namespace."""
        request.state.what = f"quota of {body.namespace[:12]}...: {body.quota_bytes or 'none'}"
        await calls.run(lambda: target.set_quota(body.namespace, body.quota_bytes))

    @router.get("/log_level")
    async def log_level() -> models.LogLevel:
        """Show the log level."""
        level = logging.getLevelName(logging.getLogger("hicache").getEffectiveLevel()).lower()
        known = {"debug", "info", "warning", "error"}
        return models.LogLevel(level=cast(Literal["debug"], level if level in known else "error"))

    @router.put("/log_level", status_code=204)
    async def set_log_level(body: models.LogLevel, request: Request) -> None:
        """Set the log level."""
        request.state.what = f"log level {body.level}"
        logging.getLogger("hicache").setLevel(body.level.upper())


def _named(store: str | None) -> str:
    return "all stores" if store is None else f"store {store!r}"


def _whose(namespace: str) -> str:
    return f" of namespaces {namespace[:12]}..." if namespace else ""


def _chains(body: models.WarmRequest) -> str:
    if body.top_bytes is not None:
        return f"with the hottest {format_size(body.top_bytes)}"
    return f"with {counted(len(body.prompts), 'prompt')}" if body.prompts else f"with {counted(len(body.keys), 'page')}"
