"""The HTTP interface `/v1` of a node, as a FastAPI application.

Handlers run on the event loop. Blocking calls run on the threads of a namespace, or on a few for opening and mapping.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from starlette.exceptions import HTTPException

from .. import __version__
from ..admin.access import AdminAccess
from ..admin.router import AdminSurface
from ..backends.errors import ErrorKind
from ..errors import InvalidInput
from . import protocol as v1
from .admin import NodeAdmin
from .bodies import PagesAnswer, write_pages
from .history import History
from .metrics import daemon_collector
from .node import Node
from .page import page_router
from .protocol import Refused
from .sharing import SharedStore
from .staging import Staging
from .statistics import NodeState, status_json

T = TypeVar("T")

# Separate threads for opening namespaces, mapping memory, and counting: stores that hang while they are opened block
# neither the unmapping of engines' memory nor status requests.
_OPENING_THREADS = 32
_MEMORY_THREADS = 32
_COUNTING_THREADS = 4
# The longest deadline of a request: an engine does not wait longer for a prefetch.
_REQUEST_S_MAX = 60.0
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": v1.ErrorAnswer} for status in (400, 401, 403, 404, 409, 413, 422, 503)
}

_OCTETS: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

NamespacePath = Annotated[v1.Digest, Path(description="The digest of the namespace.")]
EngineName = Annotated[str, Query(pattern="^[0-9a-f]{0,32}$", description="The name of the engine.")]
MemoryPath = Annotated[v1.MemoryName, Path(description="The name of the memory.")]


def create_app(node: Node, staging: Staging, history: History, access: AdminAccess) -> FastAPI:
    """Return the application of `node`: `/v1`, the probes, and the routes of other modules. Its threads end with the
    process."""
    app = FastAPI(
        title="HiCache daemon", version=__version__, docs_url=None, redoc_url=None, openapi_url="/openapi.json",
        summary="Batches of KV pages between the engines of a node and its stores.",
        responses={status: {"model": v1.ErrorAnswer} for status in (400, 422)},  # of all routes, also added ones
    )
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(InvalidInput, _misused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    counting = ThreadPoolExecutor(_COUNTING_THREADS, thread_name_prefix="hicache-counting")
    _add_probes(app, node, counting)
    _add_metrics(app, node, counting)
    _add_namespaces(app, node, staging)
    _add_memory(app, node)
    _add_lookups(app, node)
    _add_verbs(app, node)
    _add_bodies(app, node, staging)
    app.include_router(page_router(history), responses={422: _REFUSALS[422]})
    app.include_router(AdminSurface(NodeAdmin(node), access).router)
    return app


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return error.answer()


async def _misused(_: Request, error: Exception) -> Response:
    """Replace the message of a backend's check of arguments, which may contain a whole key."""
    reason = "keys: the batch is not valid; the parent must not be one of its keys"
    return Refused(422, ErrorKind.BAD_REQUEST, reason).answer()


async def _invalid(_: Request, error: Exception) -> Response:
    """Name the first wrong entry, without its value."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part)[:40] for part in first["loc"][1:])
    return Refused(422, ErrorKind.BAD_REQUEST, f"{where or 'body'}: {first['msg']}").answer()


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = {"error": ErrorKind.BAD_REQUEST, "detail": f"{error.detail}; see /openapi.json"}
    return JSONResponse(answer, error.status_code, error.headers)


def _add_probes(app: FastAPI, node: Node, counting: ThreadPoolExecutor) -> None:
    @app.get("/livez", tags=["probes"], response_model_exclude_defaults=True)
    async def livez() -> v1.State:
        """The process works."""
        return v1.State(state=node.state.value)

    @app.get("/readyz", tags=["probes"], responses={503: {"model": v1.State}}, response_model_exclude_defaults=True)
    async def readyz(response: Response) -> v1.State:
        """The daemon accepts requests, even if stores are down: then it is degraded and serves misses."""
        if node.state is not NodeState.READY:
            response.status_code = 503
            return v1.State(state=node.state.value)
        problems = [
            v1.DegradedStore(store=one.store, state=one.health.state, since_s=one.health.since_s or 0.0,
                          cause=one.health.cause, advice=one.health.advice)
            for one in (await _on(counting, node.statistics)).problems()
        ]
        return v1.State(state="degraded" if problems else "ready", problems=problems)

    @app.get("/statusz", tags=["probes"])
    async def statusz() -> dict[str, Any]:
        """Return a snapshot of all counters."""
        return status_json(await _on(counting, node.statistics))


def _add_metrics(app: FastAPI, node: Node, counting: ThreadPoolExecutor) -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)  # register further collectors here: they run on a thread
    registry.register(daemon_collector(node.statistics))

    @app.get("/metrics", tags=["probes"], response_class=Response)
    async def metrics() -> Response:
        """Return all metrics for Prometheus."""
        return Response(await _on(counting, lambda: generate_latest(registry)), media_type=CONTENT_TYPE_LATEST)


def _add_namespaces(app: FastAPI, node: Node, staging: Staging) -> None:
    threads = ThreadPoolExecutor(_OPENING_THREADS, thread_name_prefix="hicache-opening")

    @app.put("/v1/namespaces/{namespace}", tags=["control"], responses=_REFUSALS)
    async def open_namespace(
        namespace: NamespacePath, body: v1.OpenNamespace, engine: EngineName = ""
    ) -> v1.NamespaceOpened:
        """Open a namespace, or confirm that it is open. `engine` is a random name, for the release."""
        deadline = _deadline(node, body.timeout_s)
        found = await _on(threads, lambda: node.open(namespace, body, deadline, engine))
        frame_bytes = found.wire.frame_bytes
        pages_max = staging.piece_max() // frame_bytes
        return v1.NamespaceOpened(frame_bytes=frame_bytes, instance=node.instance, body_pages_max=pages_max)

    @app.delete("/v1/namespaces/{namespace}", tags=["control"], responses=_REFUSALS)
    async def release_namespace(
        namespace: NamespacePath, engine: EngineName, timeout_s: float = 30.0
    ) -> v1.NamespaceReleased:
        """End the use of a namespace by an engine. Without engines the daemon may close its store; the pages stay in
        the pool and in the store."""
        await _on(threads, lambda: node.release(namespace, engine, _deadline(node, timeout_s)))
        return v1.NamespaceReleased(instance=node.instance)


def _add_memory(app: FastAPI, node: Node) -> None:
    threads = ThreadPoolExecutor(_MEMORY_THREADS, thread_name_prefix="hicache-memory")

    @app.put("/v1/memory/{name}", tags=["control"], responses=_REFUSALS)
    async def attach_memory(name: MemoryPath, body: v1.AttachMemory) -> v1.MemoryAttached:
        """Map the shared memory of an engine on this host."""
        deadline = _deadline(node, body.timeout_s)
        if body.identity is None and body.shape is None:
            raise Refused(422, ErrorKind.BAD_REQUEST, "memory: send device and inode, or the shape of its pages")
        mapping = await _on(threads, lambda: node.memories.attach(name, body, deadline))
        return v1.MemoryAttached(instance=node.instance, mapping=mapping.id)

    @app.delete("/v1/memory/{name}", tags=["control"], responses=_REFUSALS)
    async def detach_memory(name: MemoryPath, timeout_s: float = 30.0) -> v1.MemoryAttached:
        """Unmap a memory; answer once the daemon can no longer access it."""
        await _on(threads, lambda: node.memories.detach(name, _deadline(node, timeout_s)))
        return v1.MemoryAttached(instance=node.instance, mapping="")


def _add_bodies(app: FastAPI, node: Node, staging: Staging) -> None:
    path = "/v1/namespaces/{namespace}"

    @app.post(f"{path}/read", tags=["pages"], response_class=Response,
              responses={**_REFUSALS, 200: {"content": _OCTETS}})
    async def read(namespace: NamespacePath, body: v1.LookupRequest) -> Response:
        """Read pages: one byte per key for its outcome (`H` hit, `M` miss, `C` corrupt, `E` error), then the frames of
        the hits in order."""
        keys, deadline = body.keys, _deadline(node, body.timeout_s)
        return PagesAnswer(node, node.find(namespace), staging, keys, deadline)

    @app.post(f"{path}/write", tags=["pages"], responses=_REFUSALS,
              openapi_extra={"requestBody": {"required": True, "content": _OCTETS}})
    async def write(
        namespace: NamespacePath, request: Request, keys: Annotated[int, Query(ge=1, le=v1.KEYS_MAX)],
        timeout_s: Annotated[v1.Timeout, Query()], parent: Annotated[v1.Digest | None, Query()] = None,
        copies: Annotated[bool, Query()] = False,
    ) -> v1.SetOutcomes:
        """Store pages. The body is the keys, 32 bytes each, then their frames. From the first damaged frame on, pages
        are not stored. `copies` of pages of another store keep their time of storing, even if that has expired."""
        found, deadline = node.find(namespace), _deadline(node, timeout_s)
        above = None if parent is None else bytes.fromhex(parent)
        outcomes, errors = await write_pages(node, found, staging, request, keys, above, deadline, copies)
        return v1.SetOutcomes(outcomes=outcomes, errors=errors)


def _post(app: FastAPI, verb: str) -> Callable[[Any], Any]:
    return app.post(f"/v1/namespaces/{{namespace}}/{verb}", tags=["pages"], responses=_REFUSALS)


def _add_lookups(app: FastAPI, node: Node) -> None:
    @_post(app, "exists")
    async def exists(namespace: NamespacePath, body: v1.LookupRequest) -> v1.Pages:
        """Return how many of the keys are stored up to the first hole."""
        pages, errors = await _call(node, namespace, body, SharedStore.batch_exists, body.keys)
        return v1.Pages(pages=pages, errors=errors)

    @_post(app, "has")
    async def has(namespace: NamespacePath, body: v1.LookupRequest) -> v1.Stored:
        """Return for each of the keys whether it is stored."""
        stored, errors = await _call(node, namespace, body, SharedStore.batch_has, body.keys)
        return v1.Stored(stored=stored, errors=errors)

    @_post(app, "touch")
    async def touch(namespace: NamespacePath, body: v1.LookupRequest) -> v1.Stored:
        """Count pages as used. Return for each whether it may be stored (False: known to be missing)."""
        missing, errors = await _call(node, namespace, body, SharedStore.batch_touch, body.keys)
        gone = set(missing)
        return v1.Stored(stored=[key not in gone for key in body.keys], errors=errors)


def _add_verbs(app: FastAPI, node: Node) -> None:
    @_post(app, "get")
    async def get(namespace: NamespacePath, body: v1.TransferRequest) -> v1.GetOutcomes:
        """Read pages into frames of an engine's memory."""
        outcomes, errors = await _transfer(node, namespace, body, SharedStore.batch_get)
        return v1.GetOutcomes(outcomes=outcomes, errors=errors)

    @_post(app, "set")
    async def put(namespace: NamespacePath, body: v1.StoreRequest) -> v1.SetOutcomes:
        """Store pages from frames of an engine's memory."""
        parent = None if body.parent is None else bytes.fromhex(body.parent)
        outcomes, errors = await _transfer(node, namespace, body, partial(SharedStore.batch_set, parent=parent))
        return v1.SetOutcomes(outcomes=outcomes, errors=errors)

    @_post(app, "delete")
    async def delete(namespace: NamespacePath, body: v1.LookupRequest) -> v1.Pages:
        """Remove pages."""
        pages, errors = await _call(node, namespace, body, SharedStore.delete, body.keys)
        return v1.Pages(pages=pages, errors=errors)

    @_post(app, "clear")
    async def clear(namespace: NamespacePath, body: v1.Deadline) -> v1.Pages:
        """Remove all pages of the namespace."""
        pages, errors = await _call(node, namespace, body, SharedStore.clear)
        return v1.Pages(pages=pages, errors=errors)

    @app.get("/v1/namespaces/{namespace}/usage", tags=["pages"], responses=_REFUSALS)
    async def usage(namespace: NamespacePath) -> v1.UsageAnswer:
        """Return the pages and bytes stored in the namespace."""
        found = node.find(namespace)
        counted, _ = await node.call(found, lambda errors: found.store.usage())
        return v1.UsageAnswer(pages=counted.pages, bytes=counted.bytes, capacity_bytes=counted.capacity_bytes)


async def _on(threads: ThreadPoolExecutor, call: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, call)


def _deadline(node: Node, timeout_s: float) -> float:
    return node.clock() + min(timeout_s, _REQUEST_S_MAX)


async def _call(
    node: Node, digest: str, body: v1.LookupRequest | v1.Deadline, verb: Callable[..., T], *arguments: object
) -> tuple[T, list[str]]:
    """Run a verb of a namespace; see `Node.call`."""
    deadline, found = _deadline(node, body.timeout_s), node.find(digest)
    return await node.call(found, partial(verb, found.store, *arguments, deadline=deadline))


async def _transfer(node: Node, digest: str, body: v1.TransferRequest, verb: Callable[..., T]) -> tuple[T, list[str]]:
    """Run a verb of a namespace on frames of an engine's memory."""
    keys, numbers, deadline = body.keys, body.frames, _deadline(node, body.timeout_s)
    found, mapping = node.find(digest), node.memories.find(body.memory, body.mapping)
    if len(keys) != len(numbers):
        detail = f"frames: got {len(numbers)} for {len(keys)} keys; send one for each key"
        raise Refused(422, ErrorKind.BAD_REQUEST, detail)

    def call(errors: list[str]) -> T:
        with node.memories.frames(mapping, numbers, found.wire.frame_bytes) as frames:
            return verb(found.store, keys, frames, deadline=deadline, errors=errors)

    return await node.call(found, call)
