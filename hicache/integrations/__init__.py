"""HiCache under engines that others wrote: vLLM and SGLang load a class from here by its name in their own flags.

Importing this package imports no engine. A module that needs one is loaded by that engine, or by a test.
"""
