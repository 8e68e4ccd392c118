"""The operator's tools for whole stores: list, scrub, copy, remove. All of them work on `StoredPages`.

Long operations are iterators of progress; the last step is the result, and stopping early leaves a valid store. They
block as the store does and raise BackendUnavailable if it is not usable.
"""
