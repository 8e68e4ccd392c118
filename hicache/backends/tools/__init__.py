"""What an operator does with a whole store, whatever it is: look, scrub, copy, remove. All of it works on a `RawStore`.

The long ones are iterators of progress, the last step being the result; closing one early leaves a sound store. They
block as the store does and raise BackendUnavailable where it cannot be used.
"""
