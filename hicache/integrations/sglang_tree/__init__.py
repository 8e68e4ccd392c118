"""HiCache as the tree cache of SGLang (`--radix-cache-backend hicache`): tree, host memory and storage in one.

    plugin     registers the tree with SGLang; imports nothing until the flag is used
    start      builds the cache from SGLang's flags and pools
    tree       HiCacheTree: SGLang's interface of a tree, over an EngineCache
    views      keys of prompts, ids, traces and figures, as SGLang passes and reads them
    pool       SGLang's device memory and its free list, for the cache
    prefill    measures SGLang's prefill speed
    events     the tree's KV events in SGLang's form
    weights    whether a flush is one for new weights
    settings   flags that are refused or have no effect

SGLang owns the slots of L1, and its scheduler calls from one thread. `hicache.integrations.sglang` is the other way:
storage below SGLang's own tree. See docs/engines.md.
"""
