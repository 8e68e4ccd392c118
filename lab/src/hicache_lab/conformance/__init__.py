"""The conformance tests for drivers of stores, built-in or from other packages. They need pytest, hypothesis and
zstandard.

`DriverContract` is the suite for drivers, `InspectionContract` the suite for those that `Inspects` describes; subclass
them in a test module. `SampleContract` is one test of each kind, for other connections, topologies and compositions of
a driver that passes the whole suite. `StoreContract` has the rules that `Store` keeps for all drivers. The other names
are helpers for tests of stores.
`python -m pytest -p hicache_lab.conformance.table` prints which store passes which test.
"""

from .contract import DriverContract, SampleContract, SoleDriverContract
from .damage import DAMAGES
from .inspection import InspectionContract, OpenStored, by_key
from .machine import StorageMachine, run_machine
from .pages import (
    CORRUPT,
    GET_ERROR,
    HIT,
    MISS,
    NAMESPACE,
    OTHER_NAMESPACE,
    PAYLOAD_BYTES,
    PRESENT,
    SET_ERROR,
    STORED,
    ContractFixtures,
    OpenStore,
    Subject,
    bare,
    churn,
    delete,
    driver_of,
    empty_frames,
    empty_views,
    exists,
    forged,
    full_frames,
    full_views,
    holds,
    in_parts,
    in_threads,
    load,
    make_keys,
    memory_store,
    memory_subject,
    open_backend,
    payload_of,
    sealed,
    soon,
    store_chain,
    store_of,
)
from .shell import StoreContract

__all__ = [
    "CORRUPT",
    "DAMAGES",
    "GET_ERROR",
    "HIT",
    "MISS",
    "NAMESPACE",
    "OTHER_NAMESPACE",
    "PAYLOAD_BYTES",
    "PRESENT",
    "SET_ERROR",
    "STORED",
    "ContractFixtures",
    "DriverContract",
    "InspectionContract",
    "OpenStore",
    "OpenStored",
    "SampleContract",
    "SoleDriverContract",
    "StorageMachine",
    "StoreContract",
    "Subject",
    "bare",
    "by_key",
    "churn",
    "delete",
    "driver_of",
    "empty_frames",
    "empty_views",
    "exists",
    "forged",
    "full_frames",
    "full_views",
    "holds",
    "in_parts",
    "in_threads",
    "load",
    "make_keys",
    "memory_store",
    "memory_subject",
    "open_backend",
    "payload_of",
    "run_machine",
    "sealed",
    "soon",
    "store_chain",
    "store_of",
]
